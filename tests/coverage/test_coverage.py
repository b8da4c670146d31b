"""A cut through the coverage report: families of different kinds, and those that must not be batched."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest

from tests.support.families import all_cases
from tools.coverage.measure import Row, measure
from tools.coverage.page import write_page

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what diffusers' old pipelines say of themselves when they are imported
    CASES = {case.pipeline: case for case in all_cases()}

BATCHED = [
    "StableDiffusionPipeline",
    "StableDiffusionXLControlNetPipeline",  # two denoisers
    "StableDiffusion3Pipeline",
    "FluxPipeline",
    "FluxKontextPipeline",
    "PixArtSigmaPipeline",
    "ZImagePipeline",  # lists of tensors
    "KandinskyV22CombinedPipeline",  # pipelines within a pipeline
    "WanPipeline",  # two experts
    "WanVACEPipeline",  # takes one prompt at a time: guessed, not doubled
    "LTX2Pipeline",  # copies its scheduler
    "StableAudioPipeline",
    "AnimateDiffPipeline",  # frames folded into the rows
]

NOT_BATCHED = {
    "StableDiffusionPAGPipeline": "module_state",
    "QwenImage21Pipeline": "self_check",
    "LTXLatentUpsamplePipeline": "no_meeting_point",
}


pytestmark = pytest.mark.filterwarnings("ignore")  # likewise, when they run


def test_there_are_as_many_classes_as_the_report_claims() -> None:
    assert len(CASES) >= 250
    assert len({case.kind for case in CASES.values()}) >= 5


@pytest.mark.parametrize("pipeline", BATCHED)
def test_a_class_is_batched_and_equals_running_alone(pipeline: str) -> None:
    row = measure(CASES[pipeline])
    assert (row.verdict, row.reason) == ("batched", "")
    assert row.is_right, row
    assert row.rows > 1.5, "hardly any forward was shared"


@pytest.mark.parametrize("pipeline", NOT_BATCHED)
def test_a_class_whose_calls_cannot_be_merged_runs_solo_and_right(pipeline: str) -> None:
    row = measure(CASES[pipeline])
    assert row.verdict == "solo"
    assert NOT_BATCHED[pipeline] in row.reason
    assert row.is_right, row


def test_a_cache_that_a_denoiser_hands_out_is_not_shared() -> None:
    """Flux2KleinKV keeps keys and values of its first step: they belong to one request."""
    row = measure(CASES["Flux2KleinKVPipeline"])
    assert row.verdict in ("in part", "solo")
    assert row.is_right, row


def test_the_page_tells_every_class(tmp_path: Path) -> None:
    rows = [
        Row("APipeline", "image", "text", "batched", "", 1e-6, False, 1.0, 4.0, 0.1),
        Row("BPipeline", "video", "text", "solo", "self_check", 0.0, False, 0.0, 1.0, 0.1),
        Row("CPipeline", "image", "text", "failed", "ValueError: a|b", math.nan, False, 0.0, 0.0, 0.1),
    ]
    write_page(tmp_path / "page.md", rows)
    page = (tmp_path / "page.md").read_text()
    assert "**3 classes, 1 batched** (1 batched, 1 solo, 1 failed); 2 of 3 equal running alone" in page
    assert "| APipeline | text | batched | 1.0e-06 | 4.0 |  |" in page
    assert "| CPipeline | text | failed | nan | 0.0 | ValueError: a\\|b |" in page
