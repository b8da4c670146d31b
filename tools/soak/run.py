"""The run: a server of its own, sections of requests, and between them an idle server to look at."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusion_backend.faults import ALLOW_VARIABLE
from diffusion_backend.serve import TritonServer
from tests.support.client import Served

from .books import Line, balance
from .calls import Caller, Told
from .checks import Check, check_answers, check_books, check_flat
from .mix import FAULTS, REDRAW, TEXT, plan
from .watch import Sample, Watch

ROOT = Path(__file__).resolve().parents[2]
READY_S = 600.0
IDLE_S = 120.0
"""How long the server may take to become idle after the last answer of a section."""

GAUGES = ("diffusion_requests_running", "diffusion_requests_waiting", "nv_inference_pending_request_count")
MODELS = (TEXT, REDRAW)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run.

    Attributes:
        requests: how many to send.
        seed: of the requests.
        concurrency: clients that send at once.
        sections: parts of the run; after each the server is left to become idle and looked at.
        minutes: no new section is begun after so long, or None.
    """

    requests: int = 10_000
    seed: int = 0
    concurrency: int = 8
    sections: int = 20
    minutes: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        seconds: of the load, the pauses included.
        checks: all that must hold.
    """

    settings: Settings
    seconds: float
    told: list[Told]
    samples: list[Sample]
    books: list[Line]
    checks: list[Check]

    @property
    def holds(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.checks)


Progress = Callable[[int, str], None]
"""Called by any thread with the requests that have ended, and what is going on."""


def soak(settings: Settings, progress: Progress, log_file: Path | None = None) -> Outcome:
    """Start a server, send the requests, and judge.

    Args:
        log_file: where the server's log goes, or None.

    Raises:
        ServeError: the server does not start.
    """
    progress(0, "loading the models")
    with serving(log_file) as server:
        served = Served.of(server)
        run = _Run(settings, server, served, progress)
        try:
            run.send_all()
        finally:
            served.close()
        progress(len(run.told), "draining")
        drained = server.drain()
    left = [name for name in os.listdir("/dev/shm") if name.startswith(server.shm_prefix)]
    ends = [
        Check("the server drained", drained, "no request was cut off" if drained else server.describe_exit()),
        Check("nothing is left behind", not left, f"{len(left)} shared memory regions"),
    ]
    checks = check_answers(run.told) + check_flat(run.watch.samples) + run.idle_checks + check_books(run.books) + ends
    return Outcome(settings, run.seconds, run.told, run.watch.samples, run.books, checks)


class _Run:
    """The state of one run."""

    def __init__(self, settings: Settings, server: TritonServer, served: Served, progress: Progress) -> None:
        self.told: list[Told] = []
        self.books: list[Line] = []
        self.idle_checks: list[Check] = []
        self.seconds = 0.0
        self.watch = Watch(server, lambda: len(self.told))
        self._settings = settings
        self._server = server
        self._served = served
        self._progress = progress

    def send_all(self) -> None:
        """Send section after section."""
        settings = self._settings
        self._progress(0, "asking the idle server")
        call = Caller.prepare(self._served)
        self._settle("the beginning")
        before = self._served.metrics()
        begin = time.monotonic()
        with self.watch, ThreadPoolExecutor(settings.concurrency, thread_name_prefix="soak") as pool:
            self.watch.take(idle=True)
            for section in range(settings.sections):
                first = settings.requests * section // settings.sections
                last = settings.requests * (section + 1) // settings.sections
                if settings.minutes is not None and time.monotonic() - begin > settings.minutes * 60:
                    break
                self._send(pool, call, range(first, last))
                self._settle(f"request {last}")
                self.watch.take(idle=True)
                if not self._server.is_running:
                    self.idle_checks.append(Check("the server lives", False, self._server.describe_exit()))
                    return
        self.seconds = time.monotonic() - begin
        self.books = balance(self.told, self._served.metrics() - before)

    def _send(self, pool: ThreadPoolExecutor, call: Caller, numbers: range) -> None:
        """Send some requests, as many at once as there are threads, and wait for all of them."""
        pending: set[Future[Told]] = {pool.submit(call, plan(self._settings.seed, number)) for number in numbers}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            self.told += [future.result() for future in done]
            self._progress(len(self.told), f"sending {numbers.start + 1} to {numbers.stop}")

    def _settle(self, when: str) -> None:
        """Wait until nothing is in flight; a gauge that does not go back to 0 is a fault."""
        pause, deadline = threading.Event(), time.monotonic() + IDLE_S
        while self._server.is_running and (busy := self._busy()):
            if time.monotonic() > deadline:
                self.idle_checks.append(Check(f"idle after {when}", False, f"not within {IDLE_S:.0f} s: {busy}"))
                return
            pause.wait(0.1)

    def _busy(self) -> dict[str, float]:
        metrics = self._served.metrics()
        found = {f"{gauge} of {model}": metrics.get(gauge, model) for model in MODELS for gauge in GAUGES}
        return {name: value for name, value in found.items() if value}


@contextmanager
def serving(log_file: Path | None) -> Iterator[TritonServer]:
    """Serve the shipped model, the same as image-to-image, and their twins."""
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        repository = Path(folder) / "repository"
        weights = ROOT / "models" / "emoji"
        for name in (TEXT, f"{TEXT}_unary"):
            shutil.copytree(
                ROOT / "model_repository" / name, repository / name, ignore=shutil.ignore_patterns("__pycache__")
            )
            config = repository / name / "config.pbtxt"
            text = config.read_text().replace('"../../models/emoji"', f'"{weights}"')
            config.write_text(
                text + (_entry("faults", json.dumps([fault for fault, _ in FAULTS])) if name == TEXT else "")
            )
        parameters = {
            "model": str(weights),
            "pipeline_class": "StableDiffusionImg2ImgPipeline",
            "warmup_sizes": "64x64",
            "default_guidance_scale": "3",
        }
        _add_model(repository, REDRAW, "StreamingModel", parameters)
        _add_model(repository, f"{REDRAW}_unary", "UnaryModel", {})
        env = os.environ | {"HF_HUB_OFFLINE": "1", ALLOW_VARIABLE: "1"}
        with TritonServer(repository, log_file=log_file, env=env) as server:
            server.wait_ready(READY_S, strict=True)
            yield server


def _add_model(repository: Path, name: str, kind: str, parameters: dict[str, str]) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(f"from diffusion_backend.triton import {kind} as TritonPythonModel\n")
    entries = "".join(_entry(key, value) for key, value in parameters.items())
    (repository / name / "config.pbtxt").write_text(f'backend: "python"\n{entries}')


def _entry(key: str, value: str) -> str:
    """Return one parameter of a config.pbtxt; the texts of JSON and of protobuf are quoted alike."""
    return f"parameters: {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(value)} }} }}\n"


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return what is kept of a run."""
    kinds: dict[str, dict[str, int]] = {}
    for one in outcome.told:
        ended = kinds.setdefault(one.plan.kind, {})
        ended[one.ended] = ended.get(one.ended, 0) + 1
    return {
        "settings": asdict(outcome.settings),
        "requests": len(outcome.told),
        "seconds": round(outcome.seconds, 1),
        "ended_by_kind": {kind: kinds[kind] for kind in sorted(kinds)},
        "problems": [f"request {one.plan.number}: {one.problem}" for one in outcome.told if one.problem][:50],
        "checks": [asdict(check) for check in outcome.checks],
        "samples": [sample.as_dict() for sample in outcome.samples],
    }
