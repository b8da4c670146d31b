"""The loop that both stages of the training share: budget, learning rate, checkpoints, figures."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tools.emoji.budget import Budget, Stopwatch, learning_rate
from tools.emoji.checkpoint import load_checkpoint, save_checkpoint


@dataclass(frozen=True)
class Rhythm:
    """How often a stage saves its state and measures itself, in seconds."""

    checkpoint_seconds: float = 120.0
    measure_seconds: float = 120.0


class Stage(ABC):
    """A stage of the training: what one step is, what its state is, and how good it is."""

    name: str
    peak_learning_rate: float
    warmup_steps: int
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def step(self, step: int, progress: float) -> torch.Tensor:
        """Compute the loss of one batch and its gradients; return the loss, detached."""

    def update(self) -> None:
        """Move the weights along the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return all that a later run needs to continue."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned in an earlier run."""

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Return the quality so far, by name."""


@dataclass
class StageRecord:
    """What a stage has done: for checkpoints, the model card and the report."""

    steps: int
    seconds: float
    finished: bool
    history: list[dict[str, float]]


def run_stage(stage: Stage, budget: Budget, checkpoint: Path, rhythm: Rhythm) -> StageRecord:
    """Train a stage until its budget is used, continuing from its checkpoint where there is one.

    The state is saved at intervals, at the end, and when the run is interrupted. A finished stage
    continues when the budget has become larger.
    """
    saved = load_checkpoint(checkpoint)
    record = StageRecord(0, 0.0, False, [])
    if saved is not None:
        record = StageRecord(**saved["record"])
        record.finished = budget.progress(record.steps, record.seconds) >= 1.0
        stage.load_state(saved["stage"])
        state = "already finished" if record.finished else "resumed"
        print(f"{stage.name}: {state} at step {record.steps} ({record.seconds / 60:.1f} minutes)", flush=True)
        del saved
    if record.finished:
        return record
    print(f"{stage.name}: training for {budget}", flush=True)
    loop = _Loop(stage, budget, checkpoint, rhythm, record)
    try:
        loop.run()
    except KeyboardInterrupt:
        loop.save()
        print(f"{stage.name}: stopped at step {record.steps}; run the same command to continue", flush=True)
        raise
    return record


class _Loop:
    """One run of a stage, from where its record stands to the end of its budget."""

    def __init__(self, stage: Stage, budget: Budget, checkpoint: Path, rhythm: Rhythm, record: StageRecord) -> None:
        self._stage = stage
        self._budget = budget
        self._checkpoint = checkpoint
        self._rhythm = rhythm
        self._record = record
        self._watch = Stopwatch(record.seconds)
        self._losses: list[torch.Tensor] = []

    def run(self) -> None:
        stage, record = self._stage, self._record
        saved = measured = time.monotonic()
        interval = 0.2 if sys.stderr.isatty() else 30.0
        with tqdm(total=100.0, desc=stage.name, mininterval=interval, bar_format=_BAR) as bar:
            progress = self._budget.progress(record.steps, self._watch.seconds)
            while progress < 1.0:
                rate = learning_rate(stage.peak_learning_rate, record.steps, progress, stage.warmup_steps)
                for group in stage.optimizer.param_groups:
                    group["lr"] = rate
                self._losses.append(stage.step(record.steps, progress))
                stage.update()
                record.steps += 1
                record.seconds = self._watch.seconds
                progress = self._budget.progress(record.steps, record.seconds)
                bar.set_postfix_str(f"step {record.steps}", refresh=False)
                bar.update(100.0 * progress - bar.n)
                now = time.monotonic()
                if now - measured >= self._rhythm.measure_seconds or record.steps == 1:
                    self._measure()
                    measured = time.monotonic()
                if now - saved >= self._rhythm.checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
        self._measure()
        record.finished = True
        self.save()

    def save(self) -> None:
        """Write the checkpoint."""
        self._record.seconds = self._watch.seconds
        save_checkpoint(self._checkpoint, {"record": vars(self._record), "stage": self._stage.state()})
        tqdm.write(f"{self._stage.name}: saved at step {self._record.steps}", file=sys.stdout)
        sys.stdout.flush()

    def _measure(self) -> None:
        """Print and keep the mean loss since the last time and the quality so far."""
        if not self._losses:
            return
        loss = torch.stack(self._losses).mean().item()
        self._losses.clear()
        minutes = round(self._watch.seconds / 60, 2)
        row = {"step": self._record.steps, "minutes": minutes, "loss": loss, **self._stage.measure()}
        self._record.history.append(row)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
        tqdm.write(f"{self._stage.name}: {figures}", file=sys.stdout)
        sys.stdout.flush()


_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} {postfix}"
