"""Side networks for the UNets of Stable Diffusion and Stable Diffusion XL: ControlNet, its variants, T2I-Adapter."""

from __future__ import annotations

from typing import Any

import diffusers

from . import Case
from . import components as c
from . import stable_diffusion as sd
from . import stable_diffusion_xl as sdxl

SIZE = sd.SIZE


def _union(context: int, **values: Any) -> Any:
    settings = c.unet_values(context) | {
        "conditioning_embedding_out_channels": (8, 16),
        "num_control_type": 2,
        "num_trans_channel": 16,
        "num_trans_head": 2,
        "num_proj_channel": 16,
    }
    return c.awaken(diffusers.ControlNetUnionModel(**(settings | values))).eval()


def _xs(context: int, **values: Any) -> Any:
    adapter = diffusers.ControlNetXSAdapter(
        conditioning_embedding_out_channels=(8, 16),
        num_attention_heads=2,
        block_out_channels=[8, 16],
        base_block_out_channels=[16, 32],
        cross_attention_dim=context,
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
        sample_size=16,
        max_norm_num_groups=4,
        **values,
    )
    return c.awaken(adapter).eval()


def _adapter(kind: str, downscale: int) -> Any:
    adapter = diffusers.T2IAdapter(
        in_channels=3, channels=[16, 32], num_res_blocks=1, downscale_factor=downscale, adapter_type=kind
    )
    return c.awaken(adapter).eval()


def _adapted_unet() -> Any:
    """A UNet whose upper level has attention, which is where the smaller adapter adds its features."""
    attention_first = ("CrossAttnDownBlock2D", "DownBlock2D")
    return c.unet(down_block_types=attention_first, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))


SD_PARTS = {**sd.PARTS, "controlnet": c.controlnet}
XL_PARTS = {**sdxl.PARTS, "controlnet": lambda: c.controlnet(sdxl.CONTEXT, **sdxl.CONDITION)}
UNION_PARTS = {**XL_PARTS, "controlnet": lambda: _union(sdxl.CONTEXT, **sdxl.CONDITION)}
SD_XS_PARTS = {
    **SD_PARTS,
    "unet": lambda: c.unet(layers_per_block=2, use_linear_projection=True),
    "controlnet": lambda: _xs(32),
}
XL_XS_PARTS = {
    **XL_PARTS,
    "unet": lambda: sdxl.unet(layers_per_block=2),
    "controlnet": lambda: _xs(sdxl.CONTEXT, transformer_layers_per_block=(1, 2)),
}
SD_ADAPTER_PARTS = {**SD_PARTS, "unet": _adapted_unet, "adapter": lambda: _adapter("full_adapter", 2)}
XL_ADAPTER_PARTS = {**XL_PARTS, "adapter": lambda: _adapter("full_adapter_xl", 4)}


def _control(i: int) -> dict[str, Any]:
    return {"control_image": c.picture(i + 20, SIZE)}


def _only_control(i: int) -> dict[str, Any]:
    return {"image": c.picture(i + 20, SIZE)}


def _image(i: int) -> dict[str, Any]:
    return sd.image(i) | _control(i)


def _inpaint(i: int) -> dict[str, Any]:
    return sd.inpaint(i) | _control(i)


def _mode(values: Any) -> Any:
    """The same request to a ControlNet that knows several kinds of control pictures: of the i-th kind."""
    return lambda i: values(i) | {"control_mode": i % 2}


def _case(name: str, kind: str, parts: Any, inputs: Any, **params: Any) -> Case:
    return Case(
        pipeline=name,
        modality="image",
        kind=f"controlnet {kind}".strip(),
        build=c.builder(name, parts),
        inputs=inputs,
        params=sd.SQUARE | params,
        steps=c.steps_of(kind, params),
        guidance_scale=sd.MIXED,
    )


CASES = [
    _case("StableDiffusionControlNetPipeline", "", SD_PARTS, _only_control),
    _case("StableDiffusionControlNetImg2ImgPipeline", "image-to-image", SD_PARTS, _image),
    _case("StableDiffusionControlNetInpaintPipeline", "inpaint", SD_PARTS, _inpaint),
    _case("StableDiffusionControlNetPAGPipeline", "", SD_PARTS, _only_control),
    _case("StableDiffusionControlNetPAGInpaintPipeline", "inpaint", SD_PARTS, _inpaint),
    _case("StableDiffusionControlNetXSPipeline", "", SD_XS_PARTS, _only_control),
    _case("StableDiffusionAdapterPipeline", "", SD_ADAPTER_PARTS, _only_control),
    _case("StableDiffusionXLControlNetPipeline", "", XL_PARTS, _only_control),
    _case("StableDiffusionXLControlNetImg2ImgPipeline", "image-to-image", XL_PARTS, _image),
    _case("StableDiffusionXLControlNetInpaintPipeline", "inpaint", XL_PARTS, _inpaint),
    _case("StableDiffusionXLControlNetPAGPipeline", "", XL_PARTS, _only_control),
    _case("StableDiffusionXLControlNetPAGImg2ImgPipeline", "image-to-image", XL_PARTS, _image),
    _case("StableDiffusionXLControlNetUnionPipeline", "", UNION_PARTS, _mode(_control)),
    _case("StableDiffusionXLControlNetUnionImg2ImgPipeline", "image-to-image", UNION_PARTS, _mode(_image)),
    _case("StableDiffusionXLControlNetUnionInpaintPipeline", "inpaint", UNION_PARTS, _mode(_inpaint)),
    _case("StableDiffusionXLControlNetXSPipeline", "", XL_XS_PARTS, _only_control),
    _case("StableDiffusionXLAdapterPipeline", "", XL_ADAPTER_PARTS, _only_control),
]
