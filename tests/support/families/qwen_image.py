"""Qwen-Image and what is built like it: text encoders that read pictures too, a video autoencoder for one frame."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import diffusers

from . import Case
from . import components as c
from .components_video import lively
from .flux import SQUARE, control, flow_match, image, inpaint

SIZE = 32
TEXT = {"max_sequence_length": 512}  # the prompt's template is some 250 tokens long


def vae(latents: int = 4, **values: Any) -> Any:
    """AutoencoderKLQwenImage that makes pictures half as large."""
    model = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=latents,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * latents,
        latents_std=[1.0] * latents,
        **values,
    )
    return c.certain(model).eval()


VALUES = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (8, 4, 4),
}


def _transformer(**values: Any) -> Any:
    return lively(diffusers.QwenImageTransformer2DModel(**(VALUES | values)), 2.0)


def _controlnet(**values: Any) -> Any:
    return c.awaken(diffusers.QwenImageControlNetModel(**(VALUES | values))).eval()


PARTS = {
    "scheduler": lambda: flow_match(use_dynamic_shifting=True),
    "vae": vae,
    "text_encoder": c.qwen_vl,
    "tokenizer": c.qwen_tokenizer,
    "processor": lambda: c.qwen_vl_processor("Qwen2VLProcessor"),
    "transformer": _transformer,
    "controlnet": _controlnet,
}
INPAINT = {"controlnet": lambda: _controlnet(extra_condition_channels=4)}
LAYERED = {  # the latents have another number of channels than the picture, by which the pipeline tells them apart
    "transformer": lambda: _transformer(
        in_channels=64, out_channels=16, use_additional_t_cond=True, use_layer3d_rope=True
    ),
    "vae": lambda: vae(16, input_channels=4),
}


def _negative(i: int) -> dict[str, Any]:
    """A negative prompt, which switches guidance on."""
    return {"negative_prompt": ("a white table", "a red river", "a blue frog", "a green lake")[i % 4]}


def _control_mask(i: int) -> dict[str, Any]:
    return control(i) | {"control_mask": c.mask(i, SIZE)}


def shrunk(case: Case, module: str) -> Case:
    """Return the case of a pipeline that scales pictures to a megapixel, made to scale them to few pixels.

    Its module in `diffusers` has a function for the size, which is replaced when the case is built.
    """

    def build() -> Any:
        found = importlib.import_module(f"diffusers.pipelines.{module}")
        original = found.calculate_dimensions
        if not hasattr(original, "original"):

            def calculate_dimensions(target_area: int, ratio: float) -> Any:
                return original(min(target_area, 64 * 64), ratio)

            calculate_dimensions.original = original
            found.calculate_dimensions = calculate_dimensions
        return case.build()

    return dataclasses.replace(case, build=build)


def _case(name: str, kind: str, *inputs: Any, make: Any = None, module: str = "", **params: Any) -> Case:
    case = c.image_case(name, kind, PARTS, _negative, *inputs, make=make, params=params)
    return shrunk(case, module) if module else case


EDIT = "qwenimage.pipeline_qwenimage_edit"
CASES = [
    _case("QwenImagePipeline", "text", **SQUARE, **TEXT),
    _case("QwenImageImg2ImgPipeline", "image-to-image", image, strength=0.8, **SQUARE, **TEXT),
    _case("QwenImageInpaintPipeline", "inpaint", inpaint, strength=0.8, **SQUARE, **TEXT),
    _case("QwenImageEditPipeline", "edit", image, module=EDIT, **SQUARE, **TEXT),
    _case("QwenImageEditInpaintPipeline", "edit inpaint", inpaint, module=EDIT + "_inpaint", strength=0.8, **SQUARE),
    _case("QwenImageEditPlusPipeline", "edit", image, module=EDIT + "_plus", **SQUARE, **TEXT),
    _case("QwenImageControlNetPipeline", "controlnet", control, **SQUARE, **TEXT),
    _case("QwenImageControlNetInpaintPipeline", "controlnet inpaint", _control_mask, make=INPAINT, **SQUARE),
    _case(
        "QwenImageLayeredPipeline",
        "layers",
        lambda i: {"image": c.picture(i, SIZE, "RGBA")},
        make=LAYERED,
        module="qwenimage.pipeline_qwenimage_layered",
        layers=2,
        **TEXT,
    ),
]
