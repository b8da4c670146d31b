"""What happens between the first step and the last: events, previews, aborts, faults, memory."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_backend.engine import WorkKind
from diffusion_backend.errors import (
    DeadlineExceededError,
    ExecutorError,
    InvalidArgumentError,
    OutOfMemoryError,
    PipelineError,
    RequestCancelledError,
)
from diffusion_backend.pipelines import layout
from diffusion_backend.pipelines.executor import PipelineExecutor, _Raised, is_out_of_memory, run_calls
from diffusion_backend.pipelines.meeting_point import Call, CallLayout, MeetingPoint
from diffusion_backend.pipelines.oom import RowLimits
from diffusion_backend.request import DiffusionRequest, Event, EventKind
from tests.pipelines.conftest import DEADLINE_S, Served, assert_alike
from tests.support.fakes import Recorder


def make(prompt: Any, seed: int | None = None, **params: Any) -> DiffusionRequest:
    return DiffusionRequest.make(prompt, seed=seed, **params)


# -- steps and previews -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_there_are_exactly_as_many_step_events_as_steps(sd: Served, steps: int) -> None:
    with sd.running() as running:
        handle, beside = running.together(
            [make("a dog", 1, num_inference_steps=steps), make("a cat", 2, num_inference_steps=3)]
        )
        events = list(handle.events())
        beside.result(DEADLINE_S)
    numbers = [(e.step, e.num_steps) for e in events if e.kind is EventKind.STEP]
    assert numbers == [(i + 1, steps) for i in range(steps)]
    assert [e.kind for e in events if e.kind is not EventKind.STEP] == [
        EventKind.QUEUED,
        EventKind.STARTED,
        EventKind.FINISHED,
    ]


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_steps_are_counted_with_other_schedulers_too(sd: Served, name: str) -> None:
    with sd.running() as running:
        handle = running.together([make("a dog", 1, num_inference_steps=6, scheduler=name)])[0]
        steps = [(e.step, e.num_steps) for e in handle.events() if e.kind is EventKind.STEP]
    assert steps == [(i + 1, 6) for i in range(6)]


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_steps_are_counted_in_other_families_too(request: pytest.FixtureRequest, family: str) -> None:
    served: Served = request.getfixturevalue(family)
    size = {"height": 16, "width": 16, "extra_args": {"max_sequence_length": 32}} if family == "flux" else {}
    with served.running() as running:
        handle = running.together([make("a dog", 1, num_inference_steps=4, **size)])[0]
        steps = [(e.step, e.num_steps) for e in handle.events() if e.kind is EventKind.STEP]
    assert steps == [(i + 1, 4) for i in range(4)]


@pytest.mark.parametrize(("interval", "expected"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (3, [3, 6])])
def test_previews_come_every_so_many_steps_but_not_with_the_last(
    sd: Served, interval: int, expected: list[int]
) -> None:
    with sd.running() as running:
        handle = running.together(
            [make("a dog", 1, num_inference_steps=7, preview_interval=interval, num_outputs_per_prompt=2)]
        )[0]
        events = list(handle.events())
    previews = [e for e in events if e.kind is EventKind.PREVIEW]
    assert [e.step for e in previews] == expected
    assert {e.num_steps for e in previews} <= {7}
    for event in previews:
        assert event.preview is not None
        assert event.preview.shape == (2, 16, 16, 3)
        assert event.preview.dtype == np.uint8
        before = events[events.index(event) - 1]
        assert (before.kind, before.step) == (EventKind.STEP, event.step)


@pytest.mark.parametrize("family", ["sd", "sd3"])
def test_previews_change_nothing_in_the_result_and_come_to_resemble_it(
    request: pytest.FixtureRequest, family: str
) -> None:
    served: Served = request.getfixturevalue(family)
    with served.running() as running:
        plain = running.results([make("a dog", 1, num_inference_steps=6)])[0]
        handle = running.together([make("a dog", 1, num_inference_steps=6, preview_interval=1)])[0]
        previews = [e.preview for e in handle.events() if e.kind is EventKind.PREVIEW]
        seen = handle.result(DEADLINE_S)
    assert plain.output.images is not None
    assert seen.output.images is not None
    assert np.array_equal(plain.output.images, seen.output.images)
    assert len(previews) == 5
    final = seen.output.images.astype(int)
    distances = [float(np.abs(p.astype(int) - final).mean()) for p in previews if p is not None]
    assert distances[-1] < distances[0]


def test_previews_of_large_pictures_are_small(sd: Served) -> None:
    """A preview must be cheap: its latents are averaged down to 64 cells a side before they are decoded."""
    with sd.running() as running:
        handle = running.together(
            [make("a dog", 1, num_inference_steps=2, preview_interval=1, height=288, width=144, guidance_scale=1.0)]
        )[0]
        previews = [e.preview for e in handle.events() if e.kind is EventKind.PREVIEW]
    assert [p.shape for p in previews if p is not None] == [(1, 128, 64, 3)]


# -- aborts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_an_abort_at_step_k_ends_the_request_there_and_touches_no_neighbour(sd: Served, k: int) -> None:
    victim = make("a dog", 1, num_inference_steps=500, request_id="victim", preview_interval=2)
    beside = [make("a cat", 2, num_inference_steps=6), make("a whale", 3, num_inference_steps=4, guidance_scale=1.0)]
    recorder = Recorder()
    with sd.running() as running:

        def on_event(event: Event) -> None:
            recorder(event)
            if event.request_id == "victim" and event.kind is EventKind.STEP and event.step == k:
                running.engine.abort("victim")

        handles = running.together([victim, *beside], on_event)
        with pytest.raises(RequestCancelledError):
            handles[0].result(DEADLINE_S)
        for r, handle in zip(beside, handles[1:], strict=True):
            assert_alike(handle.result(DEADLINE_S).output.images, sd.alone(r))
        recorder.wait_for("victim", EventKind.CANCELLED)
        assert list(running.executor._active) == []
    steps = recorder.kinds("victim").count(EventKind.STEP)
    assert k <= steps < 500
    assert recorder.kinds("victim")[-1] is EventKind.CANCELLED


def test_a_deadline_ends_a_running_pipeline(sd: Served) -> None:
    with sd.running() as running:
        handle = running.engine.submit(make("a dog", 1, num_inference_steps=500, timeout_s=0.1))
        with pytest.raises(DeadlineExceededError):
            handle.result(DEADLINE_S)


def test_an_aborted_pipeline_cleans_up_and_cannot_swallow_the_abort(sd: Served) -> None:
    """Driven by hand: the executor throws into the greenlet, whose `finally` clauses run."""
    executor = PipelineExecutor(sd.pipeline, sd.capabilities)
    executor.start()
    try:
        cleaned = []
        request = make("a dog", 1, request_id="a", num_inference_steps=5)
        executor.add_req(request)
        own = executor._active["a"].pipeline
        original = own.unet

        class Clinging:
            """A denoiser whose caller catches every `Exception` and cleans up."""

            config, dtype, device = original.config, original.dtype, original.device

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                try:
                    return original(*args, **kwargs)
                except Exception:
                    return original(*args, **kwargs)
                finally:
                    cleaned.append(True)

        own.__dict__["unet"] = Clinging()
        report = executor.execute(WorkKind.START, ["a"])[0]
        assert report.work is not None
        greenlet = executor._active["a"].greenlet
        error = RequestCancelledError(request_id="a")
        assert executor.abort("a", error).error is error
        assert greenlet.dead
        assert cleaned == [True]
        assert executor._active == {}
    finally:
        executor.close()


def test_a_request_that_ends_frees_its_copy_of_the_pipeline(sd: Served) -> None:
    """500 cancelled requests must not keep 500 schedulers and latents."""
    executor = PipelineExecutor(sd.pipeline, sd.capabilities)
    executor.start()
    try:
        references = []
        for i, ended in enumerate(("aborted", "finished")):
            executor.add_req(make("a dog", i, request_id=ended, num_inference_steps=1))
            references.append(weakref.ref(executor._active[ended].pipeline.scheduler))
            report = executor.execute(WorkKind.START, [ended])[0]
            if ended == "aborted":
                executor.abort(ended, RequestCancelledError())
            while ended == "finished" and report.work is not None:
                report = executor.execute(report.work.kind, [ended])[0]
        del report
        gc.collect()
        assert [reference() for reference in references] == [None, None]
    finally:
        executor.close()


# -- faults -----------------------------------------------------------------------------------------------------


def test_a_poisoned_request_fails_alone_among_eight(
    sd: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The denoiser raises whenever the poisoned prompt is among its rows, joint or not."""
    caplog.set_level(logging.CRITICAL)
    point = sd.points[0]
    original = point.original
    with torch.no_grad():
        marker = sd.bare.encode_prompt("poison", torch.device("cpu"), 1, do_classifier_free_guidance=False)[0][0]
    calls: list[int] = []

    def poisoned(sample: torch.Tensor, timestep: Any, encoder_hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        calls.append(len(sample))
        if any(torch.allclose(row, marker, atol=1e-6) for row in encoder_hidden_states):
            raise RuntimeError("bad row; see /srv/models/unet/weights.bin")
        return original(sample, timestep, encoder_hidden_states=encoder_hidden_states, **kwargs)

    monkeypatch.setattr(point, "original", poisoned)
    requests = [make("poison" if i == 3 else f"a dog {i}", i, num_inference_steps=3 + i % 3) for i in range(8)]
    with sd.running() as running:
        handles = running.together(requests)
        for i, (r, handle) in enumerate(zip(requests, handles, strict=True)):
            if i == 3:
                with pytest.raises(PipelineError, match="failed in step 1: RuntimeError: bad row") as e:
                    handle.result(DEADLINE_S)
                assert "/srv" not in e.value.message
                assert e.value.request_id == r.request_id
            else:
                assert_alike(handle.result(DEADLINE_S).output.images, sd.alone(r))
        assert running.engine.stats()["failed"] == 1
    assert max(calls) == 16, "the poisoned forward was not joint"


@pytest.mark.parametrize("most", [8, 4, 2])
def test_out_of_memory_halves_the_forward_until_it_fits(
    sd: Served, monkeypatch: pytest.MonkeyPatch, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    point = sd.points[0]
    original = point.original
    sizes: list[int] = []

    def small_device(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(sample))
        if len(sample) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(sample, *args, **kwargs)

    monkeypatch.setattr(point, "original", small_device)
    monkeypatch.setattr(point, "row_limits", RowLimits())
    requests = [make(f"a dog {i}", i, num_inference_steps=6) for i in range(6)]  # 12 rows
    with sd.running() as running:
        results = running.results(requests)
        again = running.results([make(f"a cat {i}", i, num_inference_steps=2) for i in range(6)])
    for r, result in zip(requests, results, strict=True):
        assert_alike(result.output.images, sd.alone(r))
    assert max(sizes) == 12
    assert max(size for size in sizes if size <= most) > most // 2
    assert len(again) == 6
    too_large = [i for i, size in enumerate(sizes) if size > most]
    assert max(too_large) < len(sizes) / 3, f"what did not fit at the first step was tried again: {sizes}"


def test_one_request_that_runs_out_of_memory_by_itself_lowers_no_limit(
    sd: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a single call fails, too, the number of rows was not to blame."""
    caplog.set_level(logging.CRITICAL)
    point = sd.points[0]
    original = point.original
    sizes: list[int] = []
    with torch.no_grad():
        marker = sd.bare.encode_prompt("poison", torch.device("cpu"), 1, do_classifier_free_guidance=False)[0][0]

    def leaky(sample: torch.Tensor, timestep: Any, encoder_hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        sizes.append(len(sample))
        if any(torch.allclose(row, marker, atol=1e-6) for row in encoder_hidden_states):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(sample, timestep, encoder_hidden_states=encoder_hidden_states, **kwargs)

    monkeypatch.setattr(point, "original", leaky)
    monkeypatch.setattr(point, "row_limits", RowLimits())
    with sd.running() as running:
        handles = running.together(
            [make("poison" if i == 1 else f"a dog {i}", i, num_inference_steps=4) for i in range(4)]
        )
        with pytest.raises(OutOfMemoryError, match="out of device memory in step 1"):
            handles[1].result(DEADLINE_S)
        for i in (0, 2, 3):
            handles[i].result(DEADLINE_S)
    assert sizes[0] == 8
    assert sizes[-1] == 6, "the others go on together"
    assert not point.row_limits


def test_a_limit_of_rows_holds_for_larger_ones_and_not_for_smaller() -> None:
    limits = RowLimits()
    assert not limits
    assert limits.of(100) is None
    limits.note(100, 8)
    limits.note(400, 2)
    assert [limits.of(size) for size in (99, 100, 399, 400, 10_000)] == [None, 8, 8, 2, 2]
    limits.note(100, 1)
    limits.note(100, 4)
    assert [limits.of(size) for size in (100, 400)] == [1, 1]


def test_a_request_that_does_not_fit_alone_fails_alone_and_the_next_is_fine(
    sd: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    point = sd.points[0]
    original = point.original

    def small_device(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(sample) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return original(sample, *args, **kwargs)

    monkeypatch.setattr(point, "original", small_device)
    monkeypatch.setattr(point, "row_limits", RowLimits())
    small = [make(f"a dog {i}", i, num_inference_steps=3) for i in range(2)]
    with sd.running() as running:
        huge, *others = running.together([make("a cat", 9, num_inference_steps=3, num_outputs_per_prompt=3), *small])
        with pytest.raises(OutOfMemoryError, match="does not fit even alone"):
            huge.result(DEADLINE_S)
        for r, handle in zip(small, others, strict=True):
            assert_alike(handle.result(DEADLINE_S).output.images, sd.alone(r))
        assert running.results([small[0]])


def _point_of_one_row() -> tuple[MeetingPoint, list[int]]:
    """Return a denoiser with memory for one row, and how many activations were still there when each forward began."""
    activations: list[weakref.ref[torch.Tensor]] = []
    kept: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        kept.append(sum(reference() is not None for reference in activations))
        activation = x + 1
        activations.append(weakref.ref(activation))
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return activation * 2

    point = MeetingPoint("unet", WorkKind.FORWARD, forward)
    _teach(point)
    kept.clear()
    activations.clear()
    return point, kept


def test_the_memory_of_a_forward_that_did_not_fit_is_free_before_it_is_tried_in_halves() -> None:
    """An exception keeps the frames that it passed, and those keep the activations: the halves would not fit either."""
    point, kept = _point_of_one_row()
    x = torch.arange(4.0).reshape(4, 1, 1, 1)
    outputs = run_calls([Call(point, (x[i : i + 1],), {}) for i in range(4)])
    assert [float(output) for output in outputs] == [2.0, 4.0, 6.0, 8.0]
    assert kept == [0] * 7  # 4, then 2 and its halves, twice


def test_the_memory_of_a_call_that_does_not_fit_alone_is_free_before_its_neighbours_run() -> None:
    point, kept = _point_of_one_row()
    huge, small = run_calls([Call(point, (torch.ones(n, 1, 1, 1),), {}) for n in (3, 1)])
    assert isinstance(huge, _Raised)
    assert float(small) == 4.0
    assert kept == [0] * 3  # both, then each


def test_a_new_shape_that_does_not_fit_joint_is_tried_with_fewer_rows_the_next_time() -> None:
    tried: list[int] = []

    def forward(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        tried.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * t.reshape(-1, 1, 1, 1)

    point = MeetingPoint("unet", WorkKind.FORWARD, forward)
    calls = [Call(point, (torch.full((1, 1, 1, 1), i + 1.0), torch.tensor(i + 2.0)), {}) for i in range(5)]
    assert len({point.describe(call)[0] for call in calls}) == 1
    assert [float(output) for output in run_calls(calls)] == [2.0, 6.0, 12.0, 20.0, 30.0]
    assert tried == [1, 1, 1, 1, 1, 5]
    assert [point.max_rows(call) for call in calls] == [3] * 5
    run_calls(calls[:3])
    assert [point.max_rows(call) for call in calls] == [2] * 5
    run_calls(calls[:2])
    assert point.layouts, "two rows fit, and the guess was right"


def test_calls_whose_rows_are_not_known_set_no_limit_for_all_others() -> None:
    point = MeetingPoint("unet", WorkKind.FORWARD, lambda x: x)
    _teach(point)
    calls = [Call(point, (torch.zeros(1, 1, 1, 1),), {}) for _ in range(2)]
    point.give_up(calls[0], "output")
    point.limit_rows(calls)
    assert not point.row_limits


def _teach(point: MeetingPoint) -> None:
    one, two = ((torch.zeros(n, 1, 1, 1),) for n in (1, 2))
    point.layouts.append(CallLayout(layout.learn((one, {}), (two, {})), layout.learn(one[0], two[0])))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA out of memory. Tried"), True),
        (RuntimeError("HIP out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_single_call_that_raises_is_raised_in_its_request() -> None:
    def forward(_x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    outputs = run_calls([Call(MeetingPoint("unet", WorkKind.FORWARD, forward), (torch.zeros(1),), {})])
    assert isinstance(outputs[0], _Raised)
    assert str(outputs[0].error) == "no"


def test_a_value_error_after_the_first_denoiser_call_is_ours(
    sd: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it, pipelines check their arguments; after it, a ValueError is no fault of the caller."""
    caplog.set_level(logging.CRITICAL)

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("inside")

    monkeypatch.setattr(sd.points[0], "original", broken)
    with sd.running() as running, pytest.raises(PipelineError, match="ValueError: inside"):
        running.engine.submit(make("a dog", 1)).result(DEADLINE_S)


def test_a_request_over_which_the_executor_itself_breaks_is_not_held_for_ever(
    sd: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else every such fault would keep a pipeline's latents and its place among the live ids."""
    caplog.set_level(logging.CRITICAL)
    original = MeetingPoint.describe

    def breaks(self: MeetingPoint, call: Call) -> Any:
        if call.arguments[0][0].shape[-1] == 12:
            raise RuntimeError("a tensor of a strange kind")
        return original(self, call)

    monkeypatch.setattr(MeetingPoint, "describe", breaks)
    beside = make("a cat", 2, num_inference_steps=3)
    with sd.running() as running:
        broken, fine = running.together([make("a dog", 1, height=16, width=24, num_inference_steps=3), beside])
        with pytest.raises(ExecutorError):
            broken.result(DEADLINE_S)
        assert_alike(fine.result(DEADLINE_S).output.images, sd.alone(beside))


# -- warm-up and control ----------------------------------------------------------------------------------------


def test_the_dummy_run_runs_one_step_of_that_size_and_keeps_nothing(
    sd: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = sd.points[0]
    original = point.original
    shapes: list[tuple[int, ...]] = []

    def watched(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(sample.shape[-2:]))
        return original(sample, *args, **kwargs)

    monkeypatch.setattr(point, "original", watched)
    with sd.running() as running:
        running.engine._dummy_run()
        running.engine._dummy_run(32, 24)
        assert running.executor._active == {}
        assert running.engine.stats()["accepted"] == 0
    assert shapes == [(8, 8), (16, 12)]


def test_a_dummy_run_between_two_steps_does_not_disturb_who_runs(sd: Served) -> None:
    r = make("a dog", 1, num_inference_steps=20, request_id="warm-up")  # the name that a warm-up might use itself
    recorder = Recorder()
    with sd.running() as running:
        handle = running.together([r], recorder)[0]
        recorder.wait_for("warm-up", EventKind.STEP, 2)
        running.engine._dummy_run(24, 24)
        assert_alike(handle.result(DEADLINE_S).output.images, sd.alone(r))


def test_a_dummy_run_that_fails_tells_why(sd: Served) -> None:
    with sd.running() as running:
        with pytest.raises((InvalidArgumentError, PipelineError)):
            running.engine._dummy_run(16, 1)
        assert running.executor._active == {}
        assert running.results([make("a dog", 1, num_inference_steps=1)])


def test_requests_run_without_gradients_on_the_engine_thread_only(sd: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grad mode is thread state: were it not set on the engine thread, every forward would keep its activations."""
    point = sd.points[0]
    original = point.original
    modes: set[tuple[bool, str]] = set()

    def watched(*args: Any, **kwargs: Any) -> Any:
        modes.add((torch.is_grad_enabled(), threading.current_thread().name))
        return original(*args, **kwargs)

    monkeypatch.setattr(point, "original", watched)
    with sd.running() as running:
        running.results([make("a dog", 1, num_inference_steps=2)])
    assert modes == {(False, "diffusion-engine")}
    assert torch.is_grad_enabled()
