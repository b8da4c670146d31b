"""Z-Image: a transformer that takes lists of pictures and texts, each of its own size."""

from __future__ import annotations

from typing import Any

import diffusers

from . import components as c
from .flux import SQUARE, control, flow_match, image, inpaint

VALUES = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "dim": 32,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
}


def transformer(**values: Any) -> Any:
    """ZImageTransformer2DModel."""
    settings = {
        "in_channels": 16,
        "n_layers": 2,
        "cap_feat_dim": 32,
        "axes_dims": [8, 4, 4],
        "axes_lens": [512, 32, 32],
    }
    model = diffusers.ZImageTransformer2DModel(**(VALUES | settings | values))
    for name, parameter in model.named_parameters():
        if name.endswith("pad_token"):  # made without values
            parameter.data.fill_(1.0)
    return model.eval()


def _controlnet(channels: int) -> Any:
    places = {"control_layers_places": [0], "control_refiner_layers_places": [0]}
    return c.awaken(diffusers.ZImageControlNetModel(**VALUES, **places, control_in_dim=channels)).eval()


PARTS = {
    "scheduler": lambda: flow_match(shift=3.0),
    "vae": lambda: c.vae(16),
    "text_encoder": lambda: c.language_model("Qwen3Model"),
    "tokenizer": c.qwen_tokenizer,
    "transformer": transformer,
    "controlnet": lambda: _controlnet(16),
}
TEXT = {"max_sequence_length": 128}


def _case(name: str, kind: str, *inputs: Any, make: Any = None, **params: Any) -> Any:
    settings = SQUARE | TEXT | params
    return c.image_case(name, kind, PARTS, *inputs, params=settings, make=make, guidance_scale=(None, None, 0.0, None))


INPAINT = {"controlnet": lambda: _controlnet(33)}
CASES = [
    _case("ZImagePipeline", "text"),
    _case("ZImageImg2ImgPipeline", "image-to-image", image, strength=0.8),
    _case("ZImageInpaintPipeline", "inpaint", inpaint, strength=0.8),
    _case("ZImageControlNetPipeline", "controlnet", control),
    _case("ZImageControlNetInpaintPipeline", "controlnet inpaint", inpaint, control, make=INPAINT),
]
