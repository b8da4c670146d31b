"""Stable Diffusion 1 and 2 and the pipelines made of their parts: one UNet, one CLIP text encoder, one autoencoder."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from . import Case
from . import components as c

SIZE = 32
SQUARE = {"height": SIZE, "width": SIZE}
MIXED = (None, None, 1.0, None)
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def ddim(**values: Any) -> Any:
    """DDIMScheduler as Stable Diffusion sets it."""
    return diffusers.DDIMScheduler(**(BETAS | {"clip_sample": False, "set_alpha_to_one": False} | values))


def pndm() -> Any:
    """PNDMScheduler as Stable Diffusion sets it: one call more than steps."""
    return diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, set_alpha_to_one=False, steps_offset=1)


def euler() -> Any:
    """EulerDiscreteScheduler, which scales the model's input."""
    return diffusers.EulerDiscreteScheduler(**BETAS)


PARTS = {
    "vae": c.vae,
    "text_encoder": c.clip_text,
    "tokenizer": c.clip_tokenizer,
    "unet": c.unet,
    "scheduler": ddim,
    "image_encoder": c.clip_vision,
    "feature_extractor": c.clip_image_processor,
}
LCM_PARTS = {
    **PARTS,
    "unet": lambda: c.unet(time_cond_proj_dim=16),
    "scheduler": lambda: diffusers.LCMScheduler(**BETAS),
}


def image(i: int) -> dict[str, Any]:
    """A picture to begin with."""
    return {"image": c.picture(i, SIZE)}


def inpaint(i: int) -> dict[str, Any]:
    """A picture and what is to be painted anew."""
    return {"image": c.picture(i, SIZE), "mask_image": c.mask(i, SIZE)}


def _depth_estimator() -> Any:
    config = transformers.DPTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        backbone_out_indices=[0, 1, 2, 3],
        image_size=32,
        patch_size=8,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        is_hybrid=False,
    )
    return transformers.DPTForDepthEstimation(config).eval()


def _depth_extractor() -> Any:
    return transformers.DPTImageProcessorPil(size={"height": 32, "width": 32}, do_resize=True)


def _latent_upscale_unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=8,
        out_channels=5,
        block_out_channels=(32, 64, 64),
        down_block_types=("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
        up_block_types=("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
        mid_block_type=None,
        layers_per_block=1,
        norm_num_groups=None,
        attention_head_dim=8,
        cross_attention_dim=32,
        only_cross_attention=False,
        conv_in_kernel=1,
        conv_out_kernel=1,
        act_fn="gelu",
        timestep_post_act="gelu",
        time_embedding_type="fourier",
        time_cond_proj_dim=160,  # the noise level (128 features) and the pooled text (32)
        resnet_time_scale_shift="scale_shift",
    ).eval()


def _unclip_unet() -> Any:
    values = {"class_embed_type": "projection", "projection_class_embeddings_input_dim": 64}
    return c.unet(use_linear_projection=True, **values)


UNCLIP_PARTS = {
    **PARTS,
    "unet": _unclip_unet,
    "prior_tokenizer": c.clip_tokenizer,
    "prior_text_encoder": c.clip_text_projected,
    "prior": c.prior,
    "prior_scheduler": c.prior_scheduler,
    "image_normalizer": lambda: _image_normalizer(),
    "image_noising_scheduler": lambda: diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
}


def _image_normalizer() -> Any:
    from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer

    return StableUnCLIPImageNormalizer(embedding_dim=32)


def _gligen_unet() -> Any:
    return c.awaken(c.unet(attention_type="gated"))


def _gligen_image_unet() -> Any:
    return c.awaken(c.unet(attention_type="gated-text-image"))


def _gligen(i: int) -> dict[str, Any]:
    left = 0.1 + 0.05 * i
    return {"gligen_phrases": [c.PROMPTS[i][2:]], "gligen_boxes": [[left, 0.2, left + 0.5, 0.8]]}


def _clip_processor() -> Any:
    return transformers.CLIPProcessor(c.clip_image_processor(), c.clip_tokenizer())


def _image_project() -> Any:
    from diffusers.pipelines.stable_diffusion.clip_image_project_model import CLIPImageProjection

    return CLIPImageProjection(hidden_size=32)


def _case(name: str, kind: str, parts: Any = PARTS, **values: Any) -> Case:
    """A case with this family's defaults; what begins with `make_` is a part, all else belongs to the case."""
    makers = {key[5:]: values.pop(key) for key in list(values) if key.startswith("make_")}
    settings = {"modality": "image", "guidance_scale": MIXED, "params": SQUARE} | values
    settings.setdefault("steps", c.steps_of(kind, settings["params"]))
    return Case(pipeline=name, kind=kind, build=c.builder(name, parts, **makers), **settings)


def _nine() -> Any:
    return c.unet(channels=9)


CASES = [
    _case("StableDiffusionPipeline", "text", make_scheduler=pndm),
    _case("StableDiffusionImg2ImgPipeline", "image-to-image", inputs=image, params={}),
    _case("StableDiffusionInpaintPipeline", "inpaint", make_unet=_nine, inputs=inpaint),
    _case(
        "StableDiffusionDepth2ImgPipeline",
        "image-to-image",
        make_unet=lambda: c.unet(channels=5),
        make_depth_estimator=_depth_estimator,
        make_feature_extractor=_depth_extractor,
        inputs=image,
        params={},
    ),
    _case(
        "StableDiffusionUpscalePipeline",
        "upscale",
        make_unet=lambda: c.unet(channels=7, num_class_embeds=1000),
        make_low_res_scheduler=lambda: diffusers.DDPMScheduler(**BETAS),
        inputs=lambda i: {"image": c.picture(i, 16)},
        params={},
    ),
    _case(
        "StableDiffusionLatentUpscalePipeline",
        "upscale",
        make_unet=_latent_upscale_unet,
        make_vae=lambda: c.vae(blocks=4),
        make_scheduler=lambda: diffusers.EulerDiscreteScheduler(prediction_type="sample"),
        inputs=lambda i: {"image": c.picture(i, 64)},
        params={},
    ),
    _case(
        "StableDiffusionInstructPix2PixPipeline",
        "edit",
        make_unet=lambda: c.unet(channels=8),
        make_scheduler=euler,
        inputs=image,
        params={},
    ),
    _case("StableDiffusionPAGPipeline", "text"),
    _case("StableDiffusionPAGImg2ImgPipeline", "image-to-image", inputs=image, params={}),
    _case("StableDiffusionPAGInpaintPipeline", "inpaint", inputs=inpaint),
    _case("LatentConsistencyModelPipeline", "text", LCM_PARTS),
    _case("LatentConsistencyModelImg2ImgPipeline", "image-to-image", LCM_PARTS, inputs=image, params={}),
    _case("StableUnCLIPPipeline", "text", UNCLIP_PARTS, params=SQUARE | {"prior_num_inference_steps": 2}),
    _case("StableUnCLIPImg2ImgPipeline", "image-to-image", UNCLIP_PARTS, inputs=image),
    _case("StableDiffusionImageVariationPipeline", "image-to-image", inputs=image, has_prompt=False),
    _case("StableDiffusionSAGPipeline", "text"),
    _case("StableDiffusionPanoramaPipeline", "text", params={"height": 32, "width": 64}),
    _case("StableDiffusionGLIGENPipeline", "layout", make_unet=_gligen_unet, inputs=_gligen),
    _case(
        "StableDiffusionGLIGENTextImagePipeline",
        "layout",
        make_unet=_gligen_image_unet,
        make_processor=_clip_processor,
        make_image_project=_image_project,
        inputs=lambda i: _gligen(i) | {"gligen_images": [c.picture(i, SIZE)]},
    ),
    _case("StableDiffusionLDM3DPipeline", "text", make_vae=lambda: c.vae(in_channels=6, out_channels=6)),
    _case("SemanticStableDiffusionPipeline", "text"),
    _case("StableDiffusionPipelineSafe", "text"),
    _case(
        "StableDiffusionAttendAndExcitePipeline",
        "text",
        inputs=lambda i: {"token_indices": [2, 5]},
        params=SQUARE | {"attn_res": (8, 8), "max_iter_to_alter": 1, "thresholds": {0: 0.01}},
    ),
    _case("StableDiffusionModelEditingPipeline", "text"),
    _case(
        "StableDiffusionParadigmsPipeline",
        "text",
        make_scheduler=lambda: diffusers.DDIMParallelScheduler(**BETAS, clip_sample=False),
        params=SQUARE | {"parallel": 2},
    ),
    _case(
        "CycleDiffusionPipeline",
        "image-to-image",
        inputs=lambda i: image(i) | {"source_prompt": c.PROMPTS[(i + 1) % 4]},
        params={"eta": 0.1},
    ),
    _case(
        "StableDiffusionDiffEditPipeline",
        "inpaint",
        make_inverse_scheduler=lambda: diffusers.DDIMInverseScheduler(**BETAS),
        inputs=lambda i: {"mask_image": c.mask(i, 16), "image_latents": c.noise(i, 1, 2, 4, 16, 16)},
        params={"inpaint_strength": 1.0},
        steps=(2, 2, 2, 2),  # it is given the latents of each step
    ),
]
