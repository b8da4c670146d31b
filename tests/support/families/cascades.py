"""Würstchen and Stable Cascade, which diffuse twice, and aMUSEd, which fills in masked tokens."""

from __future__ import annotations

from typing import Any

import diffusers

from . import Case
from . import components as c
from .stable_diffusion import image, inpaint

LARGE = {"height": 64, "width": 64}
# The combined pipelines make latents 42.67 times smaller than the picture, then 10.67 times larger.
COMBINED = {"height": 128, "width": 128, "prior_num_inference_steps": 2}
GUIDED = (4.0, 4.0, 1.0, 4.0)  # decoders are not guided by default


def _embeddings(i: int) -> dict[str, Any]:
    return {"image_embeddings": c.noise(i, 1, 4, 2, 2)}


def _vqgan() -> Any:
    # Untrained decoders end with latents some hundred times too large, which would only make black and white pictures.
    values = {"bottleneck_blocks": 1, "embed_dim": 16, "num_vq_embeddings": 8, "scale_factor": 0.01}
    return c.part_of("wuerstchen", "PaellaVQModel")(**values).eval()


# --- Würstchen ------------------------------------------------------------------------------------------------------


def _wuerstchen_prior() -> Any:
    return c.awaken(c.part_of("wuerstchen", "WuerstchenPrior")(c_in=4, c=16, c_cond=32, c_r=8, depth=2, nhead=2)).eval()


def _wuerstchen_decoder() -> Any:
    decoder = c.part_of("wuerstchen", "WuerstchenDiffNeXt")(
        c_r=8,
        c_cond=32,
        c_hidden=[16, 16, 16, 16],
        nhead=[-1, 2, 2, 2],
        blocks=[1, 1, 1, 1],
        effnet_embd=4,
        clip_embd=32,
    )
    return c.awaken(decoder).eval()


TEXT = {"tokenizer": c.clip_tokenizer, "text_encoder": c.clip_text}
SCHEDULER = {"scheduler": lambda: diffusers.DDPMWuerstchenScheduler()}
SMALLER = {"latent_mean": lambda: 0.01, "latent_std": lambda: 0.0}
WUERSTCHEN_PRIOR = {**TEXT, **SCHEDULER, **SMALLER, "prior": _wuerstchen_prior}
WUERSTCHEN_DECODER = {
    **TEXT,
    **SCHEDULER,
    "decoder": _wuerstchen_decoder,
    "vqgan": _vqgan,
    "latent_dim_scale": lambda: 8.0,
}


# --- Stable Cascade -------------------------------------------------------------------------------------------------


def _cascade_prior() -> Any:
    prior = diffusers.StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        timestep_ratio_embedding_dim=8,
        conditioning_dim=32,
        block_out_channels=(16, 16),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        switch_level=(False,),
        clip_image_in_channels=32,
        clip_text_in_channels=32,
        clip_text_pooled_in_channels=32,
    )
    return c.awaken(prior).eval()


def _cascade_decoder() -> Any:
    plain = ("SDCascadeResBlock", "SDCascadeTimestepBlock")
    decoder = diffusers.StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        timestep_ratio_embedding_dim=8,
        patch_size=2,
        conditioning_dim=32,
        block_out_channels=(16, 16),
        num_attention_heads=(-1, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        block_types_per_layer=(plain, (*plain, "SDCascadeAttnBlock")),
        clip_text_pooled_in_channels=32,
        effnet_in_channels=4,
        pixel_mapper_in_channels=3,
        timestep_conditioning_type=("sca",),
    )
    return c.awaken(decoder).eval()


CASCADE_TEXT = {"tokenizer": c.clip_tokenizer, "text_encoder": c.clip_text_projected}
CASCADE_PRIOR = {**CASCADE_TEXT, **SCHEDULER, "prior": _cascade_prior}
CASCADE_DECODER = {
    **CASCADE_TEXT,
    **SCHEDULER,
    "decoder": _cascade_decoder,
    "vqgan": _vqgan,
    "latent_dim_scale": lambda: 8.0,
}


def _combined(prior: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    return {**decoder, **{f"prior_{name}": make for name, make in prior.items()}}


# --- aMUSEd ---------------------------------------------------------------------------------------------------------


def _muse_transformer() -> Any:
    return diffusers.UVit2DModel(
        hidden_size=16,
        cond_embed_dim=32,
        micro_cond_encode_dim=4,
        micro_cond_embed_dim=20,
        encoder_hidden_size=32,
        vocab_size=33,  # one more than the codebook: the mask
        codebook_size=32,
        in_channels=16,
        block_out_channels=16,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        sample_size=16,
    ).eval()


def _muse_vae() -> Any:
    return diffusers.VQModel(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=8,
        norm_num_groups=4,
        num_vq_embeddings=32,
        lookup_from_codebook=True,
        mid_block_add_attention=False,
    ).eval()


MUSE = {
    "vqvae": _muse_vae,
    "tokenizer": c.clip_tokenizer,
    "text_encoder": c.clip_text_projected,
    "transformer": _muse_transformer,
    "scheduler": lambda: diffusers.AmusedScheduler(mask_token_id=32),
}


def _case(
    name: str, kind: str, parts: Any, *inputs: Any, guidance: Any = (None, None, 1.0, None), **params: Any
) -> Case:
    return c.image_case(name, kind, parts, *inputs, params=params, guidance_scale=guidance)


WUERSTCHEN = _combined(WUERSTCHEN_PRIOR, WUERSTCHEN_DECODER)
CASCADE = _combined(CASCADE_PRIOR, CASCADE_DECODER)
NONE = (None,) * 4
PRIORS = [  # their outputs are embeddings, not pictures, so they are none of the cases
    _case("StableCascadePriorPipeline", "prior", CASCADE_PRIOR, **LARGE),
    _case("WuerstchenPriorPipeline", "prior", WUERSTCHEN_PRIOR, **LARGE),
]
CASES = [
    _case("StableCascadeDecoderPipeline", "decoder", CASCADE_DECODER, _embeddings, guidance=GUIDED),
    _case("StableCascadeCombinedPipeline", "text", CASCADE, guidance=NONE, **COMBINED),
    _case("WuerstchenDecoderPipeline", "decoder", WUERSTCHEN_DECODER, _embeddings, guidance=GUIDED),
    _case("WuerstchenCombinedPipeline", "text", WUERSTCHEN, guidance=NONE, **COMBINED),
    _case("AmusedPipeline", "text", MUSE, height=32, width=32),
    _case("AmusedImg2ImgPipeline", "image-to-image", MUSE, image, strength=0.8),
    _case("AmusedInpaintPipeline", "inpaint", MUSE, inpaint, strength=0.8),
]
