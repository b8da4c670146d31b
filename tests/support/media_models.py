"""Tiny pipelines of sound, video, video with sound and pictures in, saved so that a server can load them offline.

Run as a script it saves them all: `python -m tests.support.media_models FOLDER`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.pipelines.ltx2 import LTX2Vocoder

from tests.support.families import audio, control_unet, ltx, ltx2, stable_diffusion
from tests.support.families.components_video import lively

SEED = 11
SOUND_RATE = 512
"""Hz, of `sound`."""

SOUND_MAX_S = 2.0
"""The longest sound that the network of `sound` makes, in seconds."""

TRACK_RATE = 16_000
"""Hz, of `talkie`."""


def _build(cases: list[Any], name: str) -> Any:
    return next(case for case in cases if case.pipeline == name).build()


def _sound() -> Any:
    """Stable Audio: 32 latents of 32 samples each, in stereo."""
    pipeline = _build(audio.CASES, "StableAudioPipeline")
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=6,
        downsampling_ratios=[4, 8],
        channel_multiples=[2, 4],
        decoder_channels=4,
        decoder_input_channels=4,
        sampling_rate=SOUND_RATE,
    )
    pipeline.register_modules(vae=lively(vae, 1.0))
    return pipeline


def _talkie() -> Any:
    """LTX-2 whose frames have few latents, as it is probed with 121 of them, and whose sound has its real rate."""
    pipeline = _build(ltx2.CASES, "LTX2Pipeline")
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
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
        patch_size=8,
    )
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=16,
        upsample_kernel_sizes=[32, 20],
        upsample_factors=[16, 10],  # together the 160 samples of a frame of its spectrogram
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
        output_sampling_rate=TRACK_RATE,
    )
    more = {"vae": lively(vae), "vocoder": lively(vocoder)}
    return type(pipeline)(**{**pipeline.components, **more})


def _video(name: str) -> Any:
    """LTX Video whose frames have few latents, as it is probed with 161 of them."""
    pipeline = _build(ltx.CASES, name)
    return type(pipeline)(**{**pipeline.components, "vae": ltx.ltx_vae(patch_size=2)})


def _control() -> Any:
    """A ControlNet beside the picture to begin with; random weights would hardly lead."""
    pipeline = _offset(_build(control_unet.CASES, "StableDiffusionControlNetImg2ImgPipeline"))
    lively(pipeline.controlnet, 2.0)
    return pipeline


def _offset(pipeline: Any) -> Any:
    """Give a Stable Diffusion pipeline the offset of the steps that it would otherwise warn of."""
    pipeline.register_modules(scheduler=stable_diffusion.ddim(steps_offset=1))
    return pipeline


MODELS: dict[str, Callable[[], Any]] = {
    "sound": _sound,
    "clip": lambda: _video("LTXPipeline"),
    "talkie": _talkie,
    "animate": lambda: _video("LTXImageToVideoPipeline"),
    "inpaint": lambda: _offset(_build(stable_diffusion.CASES, "StableDiffusionInpaintPipeline")),
    "control": _control,
}
"""What makes each pipeline, by the name of the model that serves it."""


def save_all(folder: Path) -> dict[str, Path]:
    """Make every pipeline with random weights that are always the same, and save it; return the folders."""
    paths = {}
    for name, build in MODELS.items():
        torch.manual_seed(SEED)
        paths[name] = folder / name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the pipelines are made of
            build().save_pretrained(paths[name])
    return paths


def save_adapter(model: Path, path: Path, seed: int) -> Path:
    """Write a LoRA adapter of random weights for the denoiser of a Stable Diffusion pipeline; return its file."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import get_peft_model_state_dict

    unet = diffusers.UNet2DConditionModel.from_pretrained(model, subfolder="unet", dtype=torch.float32)
    torch.manual_seed(seed)
    inject_adapter_in_model(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"]), unet)
    layers = get_peft_model_state_dict(unet)
    diffusers.StableDiffusionPipeline.save_lora_weights(path.parent, unet_lora_layers=layers, weight_name=path.name)
    return path


if __name__ == "__main__":
    save_all(Path(sys.argv[1]))
