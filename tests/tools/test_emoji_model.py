"""The text-to-emoji model as it ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from diffusers import DDIMScheduler, DiffusionPipeline, StableDiffusionPipeline
from safetensors import safe_open

from tools.emoji.metrics import NearestEmoji
from tools.emoji.pipeline import draw
from tools.emoji.render import draw_all
from tools.emoji.sources import is_flag_or_skin_tone

MODEL = Path(__file__).parents[2] / "models" / "emoji"
MOST_BYTES = 40_000_000
NAMES = ("red apple", "penguin", "rocket", "pizza", "red heart", "guitar", "cactus", "soccer ball")
LEAST_RECOGNISED = 7


@pytest.fixture(scope="module")
def labels() -> list[dict[str, str]]:
    return json.loads((MODEL / "labels.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionPipeline:
    loaded = DiffusionPipeline.from_pretrained(MODEL)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_size() -> None:
    assert sum(file.stat().st_size for file in MODEL.rglob("*") if file.is_file()) <= MOST_BYTES


def test_weights_are_half_precision_safetensors() -> None:
    weights = sorted(MODEL.rglob("*.safetensors"))
    assert [file.relative_to(MODEL).as_posix() for file in weights] == [
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    for file in weights:
        with safe_open(file, "pt") as tensors:
            types = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        assert types == {"F16"}
    assert not list(MODEL.rglob("*.bin"))


def test_labels(labels: list[dict[str, str]]) -> None:
    assert len(labels) >= 600
    assert all(set(label) == {"emoji", "name"} for label in labels)
    assert len({label["emoji"] for label in labels}) == len(labels)
    assert len({label["name"] for label in labels}) == len(labels)
    assert not [label for label in labels if is_flag_or_skin_tone(label["emoji"])]
    assert {"emoji": "🍎", "name": "red apple"} in labels


def test_pipeline_and_scheduler(pipeline: StableDiffusionPipeline) -> None:
    assert type(pipeline) is StableDiffusionPipeline
    assert pipeline.safety_checker is None
    assert isinstance(pipeline.scheduler, DDIMScheduler)
    config = pipeline.scheduler.config
    assert config.prediction_type == "v_prediction"
    assert config.rescale_betas_zero_snr
    assert config.timestep_spacing == "trailing"
    assert pipeline.scheduler.alphas_cumprod[-1] == 0


def test_names_are_recognised(pipeline: StableDiffusionPipeline, labels: list[dict[str, str]]) -> None:
    nearest = NearestEmoji(draw_all(label["emoji"] for label in labels))
    places = {label["name"]: index for index, label in enumerate(labels)}
    print(f"seeds 0 to {len(NAMES) - 1}")
    pictures = draw(pipeline, NAMES, range(len(NAMES)))
    ranks = {name: nearest.rank(picture, places[name]) for name, picture in zip(NAMES, pictures, strict=True)}
    assert sum(rank < 5 for rank in ranks.values()) >= LEAST_RECOGNISED, ranks
