"""LTX-2, video with sound: from text, pictures, conditions and latents."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition

from . import Case
from . import components as parts
from .components_video import clip, lively
from .ltx import GUIDANCE, LATENT, PARAMS, SIZE


def ltx2_vae(latent: int = 4) -> Any:
    """Return the autoencoder of the frames of LTX-2."""
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=latent,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=1,
    )
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return lively(vae)


def _ltx2(name: str, more: Any = dict, **config: Any) -> Any:
    """Return a pipeline of LTX-2; its sound has 8 mel bins in 2 channels."""
    text_width, text_layers, heads = 32, 2, {"attention_head_dim": 8, "num_attention_heads": 2}
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        **heads,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=text_width,
        rope_double_precision=False,
        rope_type="split",
        **config,
    )
    connector = {f"{kind}_connector_{key}": value for kind in ("video", "audio") for key, value in heads.items()}
    for kind in ("video", "audio"):
        connector |= {f"{kind}_connector_num_layers": 1, f"{kind}_connector_num_learnable_registers": None}
        connector[f"{kind}_connector_num_attention_heads"] = text_width // 8
    connectors = LTX2TextConnectors(
        caption_channels=text_width,
        text_proj_in_factor=text_layers + 1,
        **connector,
        connector_rope_base_seq_len=32,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        rope_type="split",
    )
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mel_bins=8,
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=16,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
        output_sampling_rate=16000,
    )
    components = {
        "tokenizer": parts.gemma_tokenizer("left"),
        "text_encoder": parts.language_model("Gemma3ForCausalLM", text_width, layers=text_layers),
        "connectors": lively(connectors),
        "transformer": lively(transformer),
        "vae": ltx2_vae(),
        "audio_vae": lively(audio_vae),
        "vocoder": lively(vocoder),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }
    return getattr(diffusers, name)(**components | more())


def _temporal_refinement() -> dict[str, Any]:
    upsampler = LTX2LatentUpsamplerModel(
        in_channels=4, mid_channels=32, num_blocks_per_stage=1, spatial_upsample=False, temporal_upsample=True
    )
    return {
        "temporal_latent_upsampler": lively(upsampler),
        "scheduler": diffusers.LTXEulerAncestralRFScheduler(eta=0.5),
    }


def _ltx2_latent_upsample() -> Any:
    upsampler = LTX2LatentUpsamplerModel(in_channels=4, mid_channels=32, num_blocks_per_stage=1)
    return diffusers.LTX2LatentUpsamplePipeline(vae=ltx2_vae(), latent_upsampler=lively(upsampler))


def _diffusion_decode() -> Any:
    decoder = diffusers.LTX2VideoDiffusionDecoderModel(
        latent_channels=LATENT,
        patch_size=2,
        decoder_head_dim=8,
        decoder_stage_channels=(32, 16, 8, 8, 8),
        decoder_stage_depths=(1, 1, 1, 1, 1),
        decoder_stage_kernels=((1, 3, 3),) * 4,
        decoder_upsample_strides=((1, 2, 2), (2, 1, 1), (1, 1, 1), (1, 1, 1)),
        decoder_upsample_channel_reductions=(2, 2, 1, 1),
        decoder_stage5_kernel=(1, 3, 3),
        decoder_t_emb_dim=16,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )
    return diffusers.LTX2VideoDiffusionDecodePipeline(
        diffusion_decoder=lively(decoder, 1.0), scheduler=FlowMatchEulerDiscreteScheduler()
    )


SOUND = {**PARAMS, "num_frames": 5, "frame_rate": 25.0}
PLAIN_GUIDANCE = {
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "spatio_temporal_guidance_blocks": None,
}
_sound = partial(Case, modality="video+audio", params=SOUND, guidance_scale=GUIDANCE)


CASES = [
    _sound(
        pipeline="LTX2Pipeline",
        kind="text",
        build=partial(_ltx2, "LTX2Pipeline"),
        params={**SOUND, "spatio_temporal_guidance_blocks": [1]},
    ),
    _sound(
        pipeline="LTX2ImageToVideoPipeline",
        kind="image-to-video",
        build=partial(_ltx2, "LTX2ImageToVideoPipeline"),
        params={**SOUND, **PLAIN_GUIDANCE, "image_crf": 0},
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
    _sound(
        pipeline="LTX2ConditionPipeline",
        kind="image-to-video",
        build=partial(_ltx2, "LTX2ConditionPipeline"),
        params={**SOUND, **PLAIN_GUIDANCE},
        inputs=lambda i: {"conditions": LTX2VideoCondition(frames=parts.picture(i, SIZE), index=0, crf=0)},
    ),
    _sound(
        pipeline="LTX2InContextPipeline",
        kind="image-to-video",
        build=partial(_ltx2, "LTX2InContextPipeline"),
        params={**SOUND, **PLAIN_GUIDANCE},
        inputs=lambda i: {"conditions": LTX2VideoCondition(frames=parts.picture(i, SIZE), index=0, crf=0)},
    ),
    _sound(
        pipeline="LTX2HDRPipeline",
        modality="video",  # it makes no sound
        kind="video-to-video",
        build=partial(_ltx2, "LTX2HDRPipeline"),
        inputs=lambda i: {"reference_conditions": LTX2HDRReferenceCondition(frames=clip(i, 5, SIZE), strength=1.0)},
        guidance_scale=(None, 3.0, None, 3.0),
    ),
    _sound(
        pipeline="LTX2DFRPipeline",
        kind="text",
        build=partial(_ltx2, "LTX2DFRPipeline", use_keyframes_abs_pos_embedding=True),
        guidance_scale=(None, None, None, None),
    ),
    _sound(
        pipeline="LTX2DFRTemporalRefinePipeline",
        kind="refine",
        build=partial(
            _ltx2, "LTX2DFRTemporalRefinePipeline", _temporal_refinement, use_keyframes_abs_pos_embedding=True
        ),
        params={**SOUND, "keyframe_positions": [4], "sigmas": [0.9, 0.6, 0.3]},
        inputs=lambda i: {
            "latents": parts.noise(i, 1, 4, 3, 16, 16),
            "keyframes_latents": parts.noise(i + 10, 1, 4, 1, 16, 16),
            "audio_latents": parts.noise(i + 20, 1, 2, 5, 2),
        },
        guidance_scale=(None, None, None, None),
    ),
    Case(
        pipeline="LTX2LatentUpsamplePipeline",
        modality="video",
        kind="upscale",
        build=_ltx2_latent_upsample,
        params={"height": SIZE, "width": SIZE, "num_frames": 5},
        inputs=lambda i: {"video": clip(i, 5, SIZE)},
        has_prompt=False,
    ),
    Case(
        pipeline="LTX2VideoDiffusionDecodePipeline",
        modality="video",
        kind="decode",
        build=_diffusion_decode,
        inputs=lambda i: {"latents": parts.noise(i, 1, LATENT, 2, 4, 4)},
        has_prompt=False,
    ),
]
