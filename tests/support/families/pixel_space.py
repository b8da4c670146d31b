"""Pipelines without an autoencoder, and other early ones: DDPM and its kin, DeepFloyd IF, unCLIP, latent diffusion."""

from __future__ import annotations

from typing import Any

import diffusers

from . import Case
from . import components as c
from .stable_diffusion import MIXED, ddim, image, inpaint

# --- Without a prompt -----------------------------------------------------------------------------------------------


def _unet(channels: int = 3, out_channels: int = 3, **values: Any) -> Any:
    settings = {
        "sample_size": 16,
        "in_channels": channels,
        "out_channels": out_channels,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "norm_num_groups": 8,
        "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return diffusers.UNet2DModel(**(settings | values)).eval()


def _vq(latent_channels: int = 3) -> Any:
    return diffusers.VQModel(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        norm_num_groups=4,
        num_vq_embeddings=32,
    ).eval()


def _plain(name: str, scheduler: Any, **parts: Any) -> Case:
    makers = {"unet": _unet, "scheduler": scheduler, **parts}
    return c.image_case(name, "unconditional", makers, params={}, has_prompt=False)


# --- DeepFloyd IF ---------------------------------------------------------------------------------------------------


def _if_unet(channels: int = 3, **values: Any) -> Any:
    settings = {
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "encoder_hid_dim": 32,
        "attention_head_dim": 8,
        "addition_embed_type": "text",
        "addition_embed_type_num_heads": 2,
        "cross_attention_norm": "group_norm",
        "resnet_time_scale_shift": "scale_shift",
        "act_fn": "gelu",
    }
    return c.unet(channels=channels, out_channels=6, size=32, **(settings | values))


def _if_scheduler() -> Any:
    return diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", thresholding=True, variance_type="learned_range")


IF = {
    "tokenizer": c.t5_tokenizer,
    "text_encoder": c.t5_encoder,
    "unet": _if_unet,
    "scheduler": _if_scheduler,
    "image_noising_scheduler": lambda: diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
}
IF_UPSCALE = {"unet": lambda: _if_unet(6, class_embed_type="timestep")}


def _small(i: int) -> dict[str, Any]:
    return {"image": c.picture(i, 16)}


def _original(i: int) -> dict[str, Any]:
    return {"original_image": c.picture(i, 32)}


def _mask(i: int) -> dict[str, Any]:
    return {"mask_image": c.mask(i, 32)}


def _if(name: str, kind: str, *inputs: Any, upscale: bool = False, **params: Any) -> Case:
    settings = {"clean_caption": False} | params
    make = IF_UPSCALE if upscale else {}
    return c.image_case(name, kind, IF, *inputs, params=settings, make=make, guidance_scale=MIXED)


# --- unCLIP ---------------------------------------------------------------------------------------------------------


def _decoder() -> Any:
    return c.unet(
        channels=3,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        attention_head_dim=4,
        resnet_time_scale_shift="scale_shift",
        class_embed_type="identity",
    )


def _text_projection() -> Any:
    projection_class = c.part_of("unclip", "UnCLIPTextProjModel")
    return c.awaken(projection_class(clip_embeddings_dim=32, time_embed_dim=64, cross_attention_dim=32)).eval()


def _super_resolution() -> Any:
    return _unet(
        6,
        sample_size=32,
        down_block_types=("ResnetDownsampleBlock2D", "ResnetDownsampleBlock2D"),
        up_block_types=("ResnetUpsampleBlock2D", "ResnetUpsampleBlock2D"),
    )


UNCLIP = {
    "prior": c.prior,
    "decoder": _decoder,
    "text_encoder": c.clip_text_projected,
    "tokenizer": c.clip_tokenizer,
    "text_proj": _text_projection,
    "super_res_first": _super_resolution,
    "super_res_last": _super_resolution,
    "prior_scheduler": c.prior_scheduler,
    # An untrained model that is taken to predict noise would only make black and white pictures.
    "decoder_scheduler": lambda: diffusers.UnCLIPScheduler(variance_type="learned_range", prediction_type="sample"),
    "super_res_scheduler": lambda: diffusers.UnCLIPScheduler(prediction_type="sample"),
    "feature_extractor": c.clip_image_processor,
    "image_encoder": c.clip_vision,
}
UNCLIP_STEPS = {"decoder_num_inference_steps": 3, "super_res_num_inference_steps": 2}


# --- Latent diffusion -----------------------------------------------------------------------------------------------

LDM = {
    "vqvae": lambda: c.vae(blocks=4),
    "bert": c.clip_text,
    "tokenizer": c.clip_tokenizer,
    "unet": c.unet,
    "scheduler": ddim,
}
LDM_UPSCALE = {"vqvae": _vq, "unet": lambda: _unet(6, sample_size=32), "scheduler": ddim}

CASES = [
    _plain("DDPMPipeline", lambda: diffusers.DDPMScheduler(prediction_type="sample")),
    _plain("DDIMPipeline", lambda: diffusers.DDIMScheduler(prediction_type="sample")),
    _plain("PNDMPipeline", lambda: diffusers.PNDMScheduler(skip_prk_steps=True)),
    _plain("ConsistencyModelPipeline", diffusers.CMStochasticIterativeScheduler),
    _plain("ScoreSdeVePipeline", diffusers.ScoreSdeVeScheduler),
    _plain("KarrasVePipeline", diffusers.KarrasVeScheduler),
    _plain("LDMPipeline", ddim, vqvae=_vq),
    c.image_case(
        "RePaintPipeline",
        "inpaint",
        {"unet": lambda: _unet(sample_size=32), "scheduler": diffusers.RePaintScheduler},
        inpaint,
        params={"jump_length": 1, "jump_n_sample": 2},
        has_prompt=False,
    ),
    c.image_case(
        "LDMTextToImagePipeline", "text", LDM, params={"height": 64, "width": 64}, guidance_scale=(3.0, 5.0, None, 2.0)
    ),
    c.image_case("LDMSuperResolutionPipeline", "upscale", LDM_UPSCALE, image, params={}, has_prompt=False),
    _if("IFPipeline", "text"),
    _if("IFImg2ImgPipeline", "image-to-image", image, strength=0.8),
    _if("IFInpaintingPipeline", "inpaint", inpaint),
    _if("IFSuperResolutionPipeline", "upscale", _small, upscale=True, height=32, width=32),
    _if("IFImg2ImgSuperResolutionPipeline", "upscale", _small, _original, upscale=True),
    _if("IFInpaintingSuperResolutionPipeline", "upscale inpaint", _small, _original, _mask, upscale=True),
    c.image_case("UnCLIPPipeline", "text", UNCLIP, params=UNCLIP_STEPS | {"prior_num_inference_steps": 2}),
    c.image_case(
        "UnCLIPImageVariationPipeline", "image-to-image", UNCLIP, image, params=UNCLIP_STEPS, has_prompt=False
    ),
]
