"""Models that kept Wan's autoencoder: ChronoEdit, Lucy-Edit, AnyFlow, Helios, Sana-Video, Motif-Video."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler

from . import Case
from . import components as parts
from .components_video import clip, lively, offline_ftfy, t5_gemma, umt5
from .wan import FRAMES, GUIDANCE, IMAGE_DIM, PARAMS, flow_unipc, transformer, vision, wan_vae

SQUARE = {"height": 32, "width": 32}


def _chrono_edit() -> Any:
    denoiser = transformer("ChronoEditTransformer3DModel", in_channels=36, image_dim=IMAGE_DIM)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    return offline_ftfy(diffusers.ChronoEditPipeline)(
        **umt5(), **vision(), vae=wan_vae(), scheduler=scheduler, transformer=denoiser
    )


def _lucy_edit() -> Any:
    return offline_ftfy(diffusers.LucyEditPipeline)(
        **umt5(), vae=wan_vae(), scheduler=flow_unipc(), transformer=transformer(in_channels=32), transformer_2=None
    )


def _anyflow(name: str, kind: str, **config: Any) -> Any:
    denoiser = getattr(diffusers, kind)(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
        gate_value=0.25,
        deltatime_type="r",
        **config,
    )
    scheduler = diffusers.FlowMapEulerDiscreteScheduler(shift=5.0)
    return offline_ftfy(getattr(diffusers, name))(
        **umt5(), vae=wan_vae(), scheduler=scheduler, transformer=lively(denoiser)
    )


def _helios(name: str, scheduler: Any, **more: Any) -> Any:
    denoiser = diffusers.HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_dim=(4, 4, 4),
        guidance_cross_attn=True,
        zero_history_timestep=True,
        has_multi_term_memory_patch=True,
        is_amplify_history=False,
    )
    return offline_ftfy(getattr(diffusers, name))(
        **umt5(), vae=wan_vae(), scheduler=scheduler(), transformer=lively(denoiser), **more
    )


def _helios_scheduler() -> Any:
    return diffusers.HeliosScheduler(stages=1, stage_range=[0, 1], use_dynamic_shifting=True)


def _pyramid_scheduler() -> Any:
    # With its default gamma, 1/3, a covariance is singular but for rounding.
    return diffusers.HeliosScheduler(gamma=0.3, use_dynamic_shifting=True)


def _sana(name: str, scheduler: Any) -> Any:
    denoiser = diffusers.SanaVideoTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=16,
        sample_size=8,
        patch_size=(1, 2, 2),
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return getattr(diffusers, name)(
        tokenizer=parts.gemma_tokenizer(),
        text_encoder=parts.language_model("Gemma2Model", 16, layers=1),
        vae=wan_vae(),
        transformer=lively(denoiser),
        scheduler=scheduler(),
    )


def _motif(name: str, sees: bool = False) -> Any:
    denoiser = diffusers.MotifVideoTransformer3DModel(
        in_channels=33,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        num_single_layers=1,
        patch_size=1,
        qk_norm="rms_norm",
        text_embed_dim=32,
        image_embed_dim=8 if sees else None,
        rope_axes_dim=(4, 4, 4),
    )
    return getattr(diffusers, name)(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=t5_gemma(32, 8),
        vae=wan_vae(),
        transformer=lively(denoiser),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        feature_extractor=parts.siglip_image_processor(16) if sees else None,
        guider=diffusers.AdaptiveProjectedGuidance(),
    )


_case = partial(Case, modality="video", params=PARAMS, guidance_scale=GUIDANCE)
_sana_params = {
    **SQUARE,
    "frames": FRAMES,
    "max_sequence_length": 16,
    "complex_human_instruction": [],
    "use_resolution_binning": False,
}
# One chunk is (3 - 1) * 4 + 1 frames.
_helios_params = {**PARAMS, "num_latent_frames_per_chunk": 3}

CASES = [
    _case(
        pipeline="ChronoEditPipeline",
        kind="edit",
        build=_chrono_edit,
        params={**PARAMS, "num_frames": 5},
        inputs=lambda i: {"image": parts.picture(i, 16)},
    ),
    _case(
        pipeline="LucyEditPipeline",
        kind="edit",
        build=_lucy_edit,
        inputs=lambda i: {"video": clip(i, FRAMES)},
    ),
    _case(
        pipeline="AnyFlowPipeline",
        kind="text",
        build=partial(_anyflow, "AnyFlowPipeline", "AnyFlowTransformer3DModel"),
        guidance_scale=(None, 4.0, None, 4.0),
    ),
    _case(
        pipeline="AnyFlowFARPipeline",
        kind="text",
        build=partial(
            _anyflow,
            "AnyFlowFARPipeline",
            "AnyFlowFARTransformer3DModel",
            compressed_patch_size=(1, 4, 4),
            full_chunk_limit=3,
            chunk_partition=(1, 1),
        ),
        params={**PARAMS, "num_frames": 5},  # each new shape of its flex attention takes a second
        guidance_scale=(None, 4.0, None, 4.0),
    ),
    _case(
        pipeline="HeliosPipeline",
        kind="text",
        build=partial(_helios, "HeliosPipeline", _helios_scheduler),
        params=_helios_params,
    ),
    _case(
        pipeline="HeliosPyramidPipeline",
        kind="text",
        build=partial(_helios, "HeliosPyramidPipeline", _pyramid_scheduler),
        params={**_helios_params, "height": 64, "width": 64, "pyramid_num_inference_steps_list": [2, 1, 1]},
    ),
    _case(
        pipeline="SanaVideoPipeline",
        kind="text",
        build=partial(_sana, "SanaVideoPipeline", diffusers.DPMSolverMultistepScheduler),
        params=_sana_params,
    ),
    _case(
        pipeline="SanaImageToVideoPipeline",
        kind="image-to-video",
        build=partial(_sana, "SanaImageToVideoPipeline", FlowMatchEulerDiscreteScheduler),
        params=_sana_params,
        inputs=lambda i: {"image": parts.picture(i, 32)},
    ),
    Case(
        pipeline="MotifVideoPipeline",
        modality="video",
        kind="text",
        build=partial(_motif, "MotifVideoPipeline"),
        params=PARAMS,
    ),
    Case(
        pipeline="MotifVideoImage2VideoPipeline",
        modality="video",
        kind="image-to-video",
        build=partial(_motif, "MotifVideoImage2VideoPipeline", True),
        params=PARAMS,
        inputs=lambda i: {"image": parts.picture(i, 16)},
    ),
]
