"""Cosmos 1, 2, 2.5 and 3: worlds from text, pictures, videos and controls."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import EDMEulerScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin

from . import Case
from . import components as parts
from .components_video import clip, lively, negative, offline_torchvision, t5
from .wan import wan_vae

SIZE = 32
FRAMES = 9
TEXT = 32
PARAMS = {"height": SIZE, "width": SIZE, "num_frames": FRAMES, "max_sequence_length": 16}
GUIDANCE = (None, None, 1.0, None)
BLOCKS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "mlp_ratio": 2,
    "text_embed_dim": TEXT,
    "adaln_lora_dim": 4,
    "max_size": (4, 32, 32),
    "patch_size": (1, 2, 2),
    "rope_scale": (2.0, 1.0, 1.0),
    "extra_pos_embed_type": "learnable",
}


class AllowAll(ModelMixin, ConfigMixin):
    """Stands for the guard rails, which are a package of their own with large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(1))

    def check_text_safety(self, prompt: str) -> bool:
        """Find nothing wrong with a prompt."""
        return True

    def check_video_safety(self, frames: Any) -> Any:
        """Return the frames as they are."""
        return frames


def _vae() -> Any:
    return lively(
        diffusers.AutoencoderKLCosmos(
            latent_channels=4,
            encoder_block_out_channels=(8, 8, 8, 8),
            decode_block_out_channels=(8, 8, 8, 8),
            attention_resolutions=(8,),
            resolution=64,
            num_layers=1,
            patch_size=4,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ),
        1.2,
    )


def _transformer(in_channels: int, out_channels: int, **config: Any) -> Any:
    return lively(
        offline_torchvision(diffusers.CosmosTransformer3DModel)(
            in_channels=in_channels,
            out_channels=out_channels,
            num_layers=2,
            concat_padding_mask=True,
            **BLOCKS,
            **config,
        )
    )


def _first(name: str, in_channels: int) -> Any:
    scheduler = EDMEulerScheduler(sigma_max=80, sigma_data=0.5, final_sigmas_type="sigma_min")
    return getattr(diffusers, name)(
        **t5(TEXT),
        transformer=_transformer(in_channels, 4),
        vae=_vae(),
        scheduler=scheduler,
        safety_checker=AllowAll(),
    )


def _second() -> Any:
    return diffusers.Cosmos2VideoToWorldPipeline(
        **t5(TEXT),
        transformer=_transformer(17, 16),
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        safety_checker=AllowAll(),
    )


def _two_and_a_half(name: str, more: Any = dict, **config: Any) -> Any:
    layers = 2
    return getattr(diffusers, name)(
        text_encoder=parts.qwen_vl(hidden=TEXT // layers, layers=layers),
        tokenizer=parts.qwen_tokenizer(),
        transformer=_transformer(17, 16, **config),
        vae=wan_vae(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        safety_checker=AllowAll(),
        **more(),
    )


def _third() -> Any:
    transformer = diffusers.Cosmos3OmniTransformer(
        hidden_size=32,
        intermediate_size=64,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        latent_channel=16,
        latent_patch_size=1,
        patch_latent_dim=16,
        rope_axes_dim=[4, 2, 2],
        vocab_size=parts.VOCAB,
    )
    return diffusers.Cosmos3OmniPipeline(
        transformer=lively(transformer),
        text_tokenizer=parts.qwen_tokenizer(),
        vae=wan_vae(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        enable_safety_checker=False,
    )


_images = {"img_context_dim_in": TEXT, "img_context_dim_out": TEXT}


def _controlnet() -> dict[str, Any]:
    controlnet = offline_torchvision(diffusers.CosmosControlNetModel)(
        n_controlnet_blocks=2,
        in_channels=18,
        latent_channels=18,
        model_channels=TEXT,
        **BLOCKS,
        **_images,
    )
    return {"controlnet": lively(controlnet)}


_case = partial(Case, modality="video", params=PARAMS, guidance_scale=GUIDANCE)
# The chat template's own text comes before the prompt.
_long = {**PARAMS, "max_sequence_length": 160}

CASES = [
    _case(pipeline="CosmosTextToWorldPipeline", kind="text", build=partial(_first, "CosmosTextToWorldPipeline", 4)),
    _case(
        pipeline="CosmosVideoToWorldPipeline",
        kind="image-to-video",
        build=partial(_first, "CosmosVideoToWorldPipeline", 5),
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
    _case(
        pipeline="Cosmos2VideoToWorldPipeline",
        kind="image-to-video",
        build=_second,
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
    _case(
        pipeline="Cosmos2_5_PredictBasePipeline",
        kind="video-to-video",
        build=partial(_two_and_a_half, "Cosmos2_5_PredictBasePipeline"),
        params=_long,
        inputs=lambda i: {"video": clip(i, FRAMES, SIZE), **negative(i)},
    ),
    _case(
        pipeline="Cosmos2_5_TransferPipeline",
        kind="controlnet",
        build=partial(
            _two_and_a_half,
            "Cosmos2_5_TransferPipeline",
            _controlnet,
            controlnet_block_every_n=1,
            img_context_num_tokens=4,
            **_images,
        ),
        params={**_long, "num_frames": 5, "num_frames_per_chunk": 16},
        inputs=lambda i: {"controls": clip(i, 5, SIZE), **negative(i)},
    ),
    _case(
        pipeline="Cosmos3OmniPipeline",
        kind="image-to-video",
        build=_third,
        params={
            "height": SIZE,
            "width": SIZE,
            "num_frames": 5,
            "use_system_prompt": False,
            "add_resolution_template": False,
            "add_duration_template": False,
        },
        inputs=lambda i: {"image": parts.picture(i, SIZE), **negative(i)},
    ),
]
