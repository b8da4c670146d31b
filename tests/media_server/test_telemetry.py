"""What the server tells of sound and video: outputs by modality, steps, and times that add up."""

from __future__ import annotations

import time

import pytest

from tests.support.client import eventually
from tests.support.media_files import array, picture

PARTS = ("queue", "preprocess", "execute", "postprocess")
VIDEO = {"num_frames": 9, "height": 32, "width": 32}
CALLS = {
    # the model: what is sent, and the modalities that come out
    "sound": ({"duration_s": 1.0, "output_format": "flac"}, ("audio",)),
    "clip": ({**VIDEO, "output_format": "mp4"}, ("video",)),
    "talkie": ({**VIDEO, "output_format": "mp4"}, ("video", "audio")),
    "animate": ({**VIDEO, "prompt": ["a bell", "a drum"], "image": array(picture(1), picture(2))}, ("video",)),
    "inpaint": ({"image": array(picture(1)), "mask_image": array(picture(2))}, ("image",)),
}


@pytest.mark.parametrize("model", CALLS)
def test_outputs_are_counted_by_modality_and_parts_sum_39(served, model):
    """Case 39: each output counts once for each of its modalities; the parts sum to the total."""
    sent, modalities = CALLS[model]
    before = served.metrics()
    begin = time.monotonic()
    if "prompt" not in sent:
        sent = {**sent, "prompt": "a bell", "num_outputs_per_prompt": 2}
    answer = served.infer(f"{model}_unary", num_inference_steps=2, **sent)
    client_ms = (time.monotonic() - begin) * 1e3
    delta = served.metrics() - before
    for modality in ("image", "video", "audio"):
        count = delta.get("diffusion_outputs_total", model, modality=modality)
        assert count == (2 if modality in modalities else 0), modality
    assert delta.get("diffusion_steps_total", model) == 2
    assert delta.get("diffusion_requests_total", model, outcome="completed") == 1
    total = answer.metrics["time_total_ms"]
    parts = [answer.metrics[f"time_{name}_ms"] for name in PARTS]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(total, rel=0.01)
    assert total <= client_ms
    assert answer.metrics["time_queue_ms"] < answer.metrics["time_to_first_step_ms"] <= total
    for name, key in {**{name: name for name in PARTS}, "duration": "total"}.items():
        seconds = delta.get(f"diffusion_request_{name}_seconds_sum", model)
        assert seconds == pytest.approx(answer.metrics[f"time_{key}_ms"] / 1e3, rel=1e-3, abs=1e-4)


def test_a_prompt_that_came_before_is_taken_from_the_cache(served):
    """The same prompt again, with other seeds and steps: one encoding, which stays in memory."""

    def values() -> list[float]:
        metrics = served.metrics()
        return [
            metrics.get(f"diffusion_prompt_cache_{name}", "emoji") for name in ("hits_total", "misses_total", "bytes")
        ]

    hits, misses, num_bytes = values()
    for seed in range(3):
        served.infer("emoji_unary", prompt="a prompt of this test alone", seed=seed, num_inference_steps=1 + seed)
    eventually(lambda: values()[:2] == [hits + 2, misses + 1], f"one miss and two hits; there are {values()}")
    assert values()[2] > num_bytes
