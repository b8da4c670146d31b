"""The third stage of the training, on the model that ships."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline

from tools.emoji import decoder
from tools.emoji.decoder import DecoderStage
from tools.emoji.metrics import NearestEmoji
from tools.emoji.pipeline import decode
from tools.emoji.render import draw_all
from tools.emoji.sources import load_emoji

MODEL = Path(__file__).parents[2] / "models" / "emoji"
SEED = 5
DRAWN = 4


def new_stage() -> DecoderStage:
    entries = load_emoji()
    pipeline = StableDiffusionPipeline.from_pretrained(MODEL)
    pipeline.set_progress_bar_config(disable=True)
    pictures = draw_all(entry.character for entry in entries)
    return DecoderStage(entries, pictures, pipeline, SEED, torch.device("cpu"), bfloat16=False)


def test_decoder_alone_learns_from_latents_that_were_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is kept with the emoji that it shows, and goes on after a stop; no other network moves."""
    print(f"seed {SEED}")
    monkeypatch.setattr(decoder, "DRAWN_AT_ONCE", DRAWN)
    stage = new_stage()
    before = {name: weights.clone() for name, weights in stage._pipeline.vae.state_dict().items()}
    unet = {name: weights.clone() for name, weights in stage._pipeline.unet.state_dict().items()}
    assert torch.isfinite(stage.step(0, 0.0))
    stage.update()

    assert 1 <= len(stage._drawn) == len(stage._drawn_of) <= DRAWN
    nearest = NearestEmoji(stage._originals)
    for picture, index in zip(decode(stage._pipeline, stage._drawn), stage._drawn_of.tolist(), strict=True):
        assert nearest.rank(picture, index) < 5
    moved = {
        name for name, weights in stage._pipeline.vae.state_dict().items() if not torch.equal(weights, before[name])
    }
    assert moved
    assert all(name.startswith("decoder.") for name in moved)
    assert all(torch.equal(weights, unet[name]) for name, weights in stage._pipeline.unet.state_dict().items())

    again = new_stage()
    again.load_state(stage.state())
    assert torch.equal(again._drawn, stage._drawn)
    # Between two drawings a step depends on the saved state alone.
    torch.testing.assert_close(again.step(1, 0.1), stage.step(1, 0.1))


def test_oldest_latents_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "DRAWN_AT_ONCE", DRAWN)
    monkeypatch.setattr(decoder, "MOST_DRAWN", 3)
    stage = new_stage()
    for step in (0, 16):
        stage._draw_more(step)
    assert len(stage._drawn) == len(stage._drawn_of) == 3
