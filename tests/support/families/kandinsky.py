"""Kandinsky 1 to 5: priors, decoders that are told a picture's embedding, both combined, and the later ones."""

from __future__ import annotations

from typing import Any

import diffusers

from . import Case
from . import components as c
from .flux import SQUARE, flow_match, image, inpaint
from .stable_diffusion import MIXED

UNET = {
    "out_channels": 8,  # the mean and the variance
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "encoder_hid_dim": 32,
    "attention_head_dim": 4,
    "resnet_time_scale_shift": "scale_shift",
}
FIRST = {"addition_embed_type": "text_image", "encoder_hid_dim_type": "text_image_proj"}
SECOND = {"addition_embed_type": "image", "encoder_hid_dim_type": "image_proj"}
HINT = {"addition_embed_type": "image_hint", "encoder_hid_dim_type": "image_proj"}


def _unet(channels: int, values: dict[str, Any]) -> Any:
    return c.unet(channels=channels, **(UNET | values))


# Taken to predict noise, an untrained model ends with latents so large that rounding errors show.
SCHEDULE = {
    "beta_schedule": "linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
    "prediction_type": "sample",
}


def _ddim() -> Any:
    return diffusers.DDIMScheduler(**SCHEDULE)


def _ddpm() -> Any:
    return diffusers.DDPMScheduler(**SCHEDULE)


def _multilingual_clip() -> Any:
    from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

    config = MCLIPConfig(
        numDims=32,
        transformerDimensions=32,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=c.VOCAB,
        initializer_range=0.2,
    )
    return MultilingualCLIP(config).eval()


def _embeds(i: int) -> dict[str, Any]:
    return {"image_embeds": c.noise(i, 1, 32), "negative_image_embeds": c.noise(i + 10, 1, 32)}


def _hint(i: int) -> dict[str, Any]:
    return {"hint": c.noise(i + 20, 1, 3, 128, 128)}  # the UNet makes hints 8 times smaller


PRIOR_PARTS = {
    "prior": c.prior,
    "image_encoder": c.clip_vision,
    "text_encoder": c.clip_text_projected,
    "tokenizer": c.clip_tokenizer,
    "scheduler": c.prior_scheduler,
    "image_processor": c.clip_image_processor,
}
COMBINED = {f"prior_{name}": make for name, make in PRIOR_PARTS.items()}
PARTS_1 = {
    **COMBINED,
    "text_encoder": _multilingual_clip,
    "tokenizer": c.xlm_roberta_tokenizer,
    "unet": lambda: _unet(4, FIRST),
    "scheduler": _ddim,
    "movq": c.movq,
}
PARTS_2 = {**COMBINED, "unet": lambda: _unet(4, SECOND), "scheduler": _ddpm, "movq": c.movq}
PARTS_3 = {
    "tokenizer": c.t5_tokenizer,
    "text_encoder": c.t5_encoder,
    "unet": lambda: diffusers.Kandinsky3UNet(
        in_channels=4,
        time_embedding_dim=8,
        groups=2,
        attention_head_dim=4,
        layers_per_block=2,
        block_out_channels=(16, 32),
        cross_attention_dim=8,
        encoder_hid_dim=32,
    ).eval(),
    "scheduler": _ddpm,
    "movq": c.movq,
}
PARTS_5 = {
    "vae": lambda: c.vae(16, blocks=4),
    "text_encoder": c.qwen_vl,
    "tokenizer": c.qwen_vl_processor,
    "text_encoder_2": lambda: c.clip_text(16),
    "tokenizer_2": c.clip_tokenizer,
    "scheduler": lambda: flow_match(shift=7.0),
}


def _transformer_5(**values: Any) -> Any:
    return c.awaken(
        diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=16,
            out_visual_dim=16,
            in_text_dim=32,
            in_text_dim2=16,
            time_dim=16,
            patch_size=(1, 2, 2),
            model_dim=16,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=1,
            axes_dims=(2, 2, 4),
            attention_type="regular",
            **values,
        )
    ).eval()


def _case(name: str, kind: str, parts: Any, inputs: Any = lambda i: {}, *, prompt: bool = True, **params: Any) -> Case:
    return Case(
        pipeline=name,
        modality="image",
        kind=kind,
        build=c.builder(name, parts),
        params=params,
        inputs=inputs,
        steps=c.steps_of(kind, params),
        guidance_scale=MIXED,
        has_prompt=prompt,
    )


def _case_5(name: str, kind: str, inputs: Any = lambda i: {}, *, visual: bool = False) -> Case:
    """Kandinsky 5, which knows a few sizes only: it is told a small one."""
    parts = {**PARTS_5, "transformer": lambda: _transformer_5(visual_cond=visual)}
    case = _case(name, kind, parts, inputs, height=64, width=64, max_sequence_length=512)
    return c.with_attributes(case, resolutions=[(64, 64)])


TWO = {"prior_num_inference_steps": 2, **SQUARE}
HINTED = {**PARTS_2, "unet": lambda: _unet(8, HINT)}
INPAINT_1 = {**PARTS_1, "unet": lambda: _unet(9, FIRST)}
INPAINT_2 = {**PARTS_2, "unet": lambda: _unet(9, SECOND)}
PRIORS = [  # their outputs are embeddings, not pictures, so they are none of the cases
    _case("KandinskyPriorPipeline", "prior", PRIOR_PARTS),
    _case("KandinskyV22PriorPipeline", "prior", PRIOR_PARTS),
    _case("KandinskyV22PriorEmb2EmbPipeline", "prior", PRIOR_PARTS, image, strength=0.8),
]
CASES = [
    _case("KandinskyPipeline", "text", PARTS_1, _embeds, **SQUARE),
    _case("KandinskyImg2ImgPipeline", "image-to-image", PARTS_1, c.together(image, _embeds), strength=0.8, **SQUARE),
    _case("KandinskyInpaintPipeline", "inpaint", INPAINT_1, c.together(inpaint, _embeds), **SQUARE),
    _case("KandinskyCombinedPipeline", "text", PARTS_1, **TWO),
    _case("KandinskyImg2ImgCombinedPipeline", "image-to-image", PARTS_1, image, strength=0.8, **TWO),
    _case("KandinskyInpaintCombinedPipeline", "inpaint", INPAINT_1, inpaint, **TWO),
    _case("KandinskyV22Pipeline", "embedding", PARTS_2, _embeds, prompt=False, **SQUARE),
    _case(
        "KandinskyV22Img2ImgPipeline",
        "image-to-image",
        PARTS_2,
        c.together(image, _embeds),
        prompt=False,
        strength=0.8,
        **SQUARE,
    ),
    _case("KandinskyV22InpaintPipeline", "inpaint", INPAINT_2, c.together(inpaint, _embeds), prompt=False, **SQUARE),
    _case("KandinskyV22ControlnetPipeline", "control", HINTED, c.together(_hint, _embeds), prompt=False, **SQUARE),
    _case(
        "KandinskyV22ControlnetImg2ImgPipeline",
        "control image-to-image",
        HINTED,
        c.together(image, _hint, _embeds),
        prompt=False,
        strength=0.8,
        **SQUARE,
    ),
    _case("KandinskyV22CombinedPipeline", "text", PARTS_2, **TWO),
    _case("KandinskyV22Img2ImgCombinedPipeline", "image-to-image", PARTS_2, image, strength=0.8, **TWO),
    _case("KandinskyV22InpaintCombinedPipeline", "inpaint", INPAINT_2, inpaint, **TWO),
    _case("Kandinsky3Pipeline", "text", PARTS_3, **SQUARE),
    _case("Kandinsky3Img2ImgPipeline", "image-to-image", PARTS_3, image, strength=0.8),
    _case_5("Kandinsky5T2IPipeline", "text"),
    _case_5("Kandinsky5I2IPipeline", "edit", lambda i: {"image": c.picture(i, 64)}, visual=True),
]
