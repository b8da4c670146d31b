"""What a long run is judged by: a leak, a lost answer or a wrong count is found, and noise is not taken for one."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from tests.support.client import Metrics
from tools.soak.books import balance
from tools.soak.calls import Told
from tools.soak.checks import check_answers, check_books, check_flat
from tools.soak.mix import BLOCK, FAULTS, SHARES, Plan, plan
from tools.soak.report import BEGIN, END, MAX_SAMPLES, figures, publish, write_json
from tools.soak.watch import Sample, Usage


def samples(*, leak_kib: float = 0.0, descriptors: float = 0.0, threads: float = 0.0, shared: float = 0.0):
    """Twenty looks at an idle server over 10,000 requests, with noise, and growth for each request."""
    rng = random.Random(1)
    made = []
    for k in range(21):
        n = 500 * k
        warm = min(k, 2) * 20_000
        usage = Usage(
            int(500_000 + warm + leak_kib * n + rng.randint(-400, 400)),
            600_000,
            int(50 + descriptors * n),
            int(30 + threads * n),
        )
        made.append(Sample(k * 60.0, n, True, {"emoji": usage}, 4096 + int(shared * n), 4))
    return made


def failed(checks) -> list[str]:
    return [check.name for check in checks if not check.holds]


def test_noise_and_a_warm_up_are_no_leak():
    assert failed(check_flat(samples())) == []


@pytest.mark.parametrize(
    ("growth", "name"),
    [
        ({"leak_kib": 0.5}, "memory of emoji"),
        ({"descriptors": 0.01}, "descriptors of emoji"),
        ({"threads": 0.01}, "threads of emoji"),
        ({"shared": 0.5}, "shared memory"),
    ],
)
def test_growth_is_found(growth, name):
    """Half a KiB, or a hundredth of a descriptor, for each request."""
    assert failed(check_flat(samples(**growth))) == [name]


def test_the_memory_of_a_short_run_is_not_judged():
    short = [s for s in samples(leak_kib=50.0) if s.requests <= 1500]
    assert failed(check_flat(short)) == []


def told(ended: str, number: int = 0, **more) -> Told:
    return Told(Plan(number, "steps on a stream", "stream", "emoji", "finished"), ended, 0.1, **more)


def test_lost_and_wrong_answers_are_found():
    checks = check_answers([told("finished"), told("lost", 7, problem="no end"), told("wrong", 9, problem="too small")])
    assert failed(checks) == ["no request was lost", "every answer was right"]
    assert "request 7: no end" in checks[0].says
    assert failed(check_answers([told("finished")])) == []


def page(completed: int, cancelled: int, outputs: int = 2, seconds: float = 0.4) -> Metrics:
    return Metrics.parse(
        f"""# TYPE diffusion_requests_total counter
diffusion_requests_total{{model="emoji",outcome="completed"}} {completed}
diffusion_requests_total{{model="emoji",outcome="cancelled"}} {cancelled}
# TYPE diffusion_outputs_total counter
diffusion_outputs_total{{model="emoji",modality="image"}} {outputs}
# TYPE diffusion_steps_total counter
diffusion_steps_total{{model="emoji"}} 9
# TYPE diffusion_request_duration_seconds histogram
diffusion_request_duration_seconds_bucket{{model="emoji",le="+Inf"}} {completed}
diffusion_request_duration_seconds_count{{model="emoji"}} {completed}
diffusion_request_duration_seconds_sum{{model="emoji"}} {seconds}
"""
    )


def test_metrics_that_differ_from_the_clients_count_are_found():
    requests = [told("finished", num_outputs=1, num_steps=3, total_ms=200.0) for _ in range(2)]
    requests += [told("cancelled"), told("gone")]
    for grown in (page(2, 1), page(2, 2)):  # the client of the one that is gone cannot know
        assert failed(check_books(balance(requests, grown))) == []
    wrong = {
        "diffusion_requests_total cancelled, emoji": page(2, 3),
        "diffusion_requests_total completed, emoji": page(3, 1),
        "diffusion_outputs_total, emoji": page(2, 1, outputs=3),
        "diffusion_request_duration_seconds_sum, emoji": page(2, 1, seconds=0.5),
    }
    for name, grown in wrong.items():
        assert name in failed(check_books(balance(requests, grown)))


def test_the_shares_are_exact_and_the_requests_the_seeds():
    """10 % are given up, 2 % are faulty, in every block; the same seed sends the same requests."""
    plans = [plan(5, number) for number in range(4 * BLOCK)]
    assert BLOCK == 50
    assert Counter(one.kind for one in plans) == {kind: 4 * count for kind, count in SHARES.items()}
    ends = Counter(one.end for one in plans)
    assert ends["cancelled"] + ends["gone"] == len(plans) // 10
    assert ends["failed"] == len(plans) // 50
    assert plans == [plan(5, number) for number in range(4 * BLOCK)]
    assert plans != [plan(6, number) for number in range(4 * BLOCK)]


def test_every_fault_gets_its_turn():
    plans = [plan(0, number) for number in range(len(FAULTS) * BLOCK)]
    prompts = {one.values["prompt"] for one in plans if one.end == "failed"}
    assert prompts == {fault["prompt"] for fault, _ in FAULTS}


def test_the_figures_go_between_the_marks_and_nowhere_else(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nstale figures\n{END}\nafter\n")
    results = {
        "command": "python -m tools.soak",
        "commit": "abc",
        "started_at": "2026-01-02T03:04:05",
        "machine": {"cores": 2, "cpu": "a processor"},
        "settings": {"requests": 1000, "concurrency": 8},
        "requests": 500,
        "seconds": 120.0,
        "ended_by_kind": {"a": {"finished": 440, "failed": 10}, "b": {"cancelled": 30, "gone": 20}},
        "checks": [{"name": "memory", "holds": False, "says": "it grows"}],
        "samples": [{"requests": n, "idle": n % 10 == 0} for n in range(1000)],
    }
    publish(path, figures(results, "images/soak.png", "soak.json"))
    text = path.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "stale figures" not in text
    for part in ("**500 requests** (of 1,000 asked for", "50 given up by their clients (10%)", "10 faulty (2%)"):
        assert part in text
    assert "| memory | it grows | **does not hold** |" in text
    with pytest.raises(ValueError, match="has no part between"):
        publish(_file(tmp_path / "other.md", "nothing"), "")
    write_json(tmp_path / "soak.json", results)
    kept = json.loads((tmp_path / "soak.json").read_text())["samples"]
    assert sum(sample["idle"] for sample in kept) == 100
    assert 100 <= len(kept) - 100 <= MAX_SAMPLES


def _file(path, text):
    path.write_text(text)
    return path
