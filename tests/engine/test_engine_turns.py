"""What the end of one request costs the steps of the others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from diffusion_backend.engine import Group, Scheduler, WorkKind
from tests.engine.conftest import Rig
from tests.support.fakes import DEADLINE_S, make

Build = Callable[..., Rig]


class LongDecodes(Scheduler):
    """Takes a decode to last longer than a quarter of a forward, so that two of them are longer than half of one."""

    def charge(self, group: Group, seconds: float) -> None:
        super().charge(group, 0.3 if group.kind is WorkKind.DECODE else 1.0)


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("key", ["shared", "own"])
def test_no_two_long_decodes_run_without_a_forward_of_the_others_between(rig: Build, pieces: int, key: str) -> None:
    """Six requests end at the same forward, each with a decode (in pieces, as long videos have them)."""
    engine, executor, _ = rig(scheduler=LongDecodes)
    executor.gate.close()
    plug = engine.submit(make("plug", steps=1, key="plug"))  # so that the others start together
    executor.gate.wait_held()
    names = [f"ending{i}" for i in range(6)]
    ending = [engine.submit(make(i, steps=3, decode=pieces, key="x" if key == "shared" else i)) for i in names]
    going_on = engine.submit(make("going on", steps=200, key="x"))
    executor.gate.open()
    for handle in (plug, *ending, going_on):
        handle.result(DEADLINE_S)
    log = list(executor.log)
    last = max(i for i, (what, ids) in enumerate(log) if what == "forward" and "going on" in ids)
    works = [what for what, _ in log[:last] if what in ("forward", "decode")]
    assert works.count("decode") == 6 * pieces, "decodes were put off until the others ended"
    assert ("decode", "decode") not in list(pairwise(works))
    if key == "shared":  # then every forward is a step of the one that goes on, too
        assert all("going on" in ids for what, ids in log if what == "forward" and ids != ("plug",))
