"""The pipeline as a whole: put together, drawn with, written to disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer

from tools.emoji.checkpoint import load_json, save_json
from tools.emoji.networks import build_scheduler
from tools.emoji.sources import Emoji, write_labels

DRAW_STEPS = 20
GUIDANCE = 3.0
DRAW_BATCH = 24


def assemble(
    autoencoder: AutoencoderKL, unet: UNet2DConditionModel, text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer
) -> StableDiffusionPipeline:
    """Put the networks together; there is no safety checker, as emoji are all that it can draw."""
    pipeline = StableDiffusionPipeline(
        vae=autoencoder,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: StableDiffusionPipeline, prompts: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
    """Draw one picture a prompt, each from its own seed; returns `uint8[count, 64, 64, 3]`."""
    return decode(pipeline, draw_latents(pipeline, prompts, seeds))


def draw_latents(
    pipeline: StableDiffusionPipeline, prompts: Sequence[str], seeds: Sequence[int], guidance: float = GUIDANCE
) -> torch.Tensor:
    """Draw one latent a prompt, each from its own seed; returns `[count, 16, 8, 8]`."""
    latents = []
    for start in range(0, len(prompts), DRAW_BATCH):
        part = slice(start, start + DRAW_BATCH)
        result = pipeline(
            list(prompts[part]),
            num_inference_steps=DRAW_STEPS,
            guidance_scale=guidance,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds[part]],
            output_type="latent",
        )
        latents.append(result.images)
    return torch.cat(latents)


@torch.no_grad()
def decode(pipeline: StableDiffusionPipeline, latents: torch.Tensor) -> np.ndarray:
    """Decode latents `[count, 16, 8, 8]` as the pipeline does; returns `uint8[count, 64, 64, 3]`."""
    pictures = []
    for part in latents.split(DRAW_BATCH):
        decoded = pipeline.vae.decode(part / pipeline.vae.config.scaling_factor).sample
        values = pipeline.image_processor.postprocess(decoded, output_type="np")
        pictures.append((values * 255).round().astype(np.uint8))
    return np.concatenate(pictures)


def write_pipeline(pipeline: StableDiffusionPipeline, entries: list[Emoji], out: Path) -> None:
    """Write the pipeline in half precision with its labels; other files in the folder stay.

    All is written beside the folder first, so that a stop in between leaves no mixture of two models.
    """
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for module in (pipeline.vae, pipeline.unet, pipeline.text_encoder):
        module.to(device="cpu", dtype=torch.float16)
    pipeline.save_pretrained(partial, safe_serialization=True)
    # Unlike the other networks, the text encoder would be loaded in the type that its configuration
    # records, and a pipeline of two types cannot draw.
    text_config = partial / "text_encoder" / "config.json"
    save_json(text_config, {**load_json(text_config), "dtype": "float32"})
    write_labels(partial / "labels.json", entries)
    out.mkdir(parents=True, exist_ok=True)
    for entry in sorted(partial.iterdir()):
        target = out / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        entry.replace(target)
    partial.rmdir()
