"""Memory after many requests is what it was after a few: of the server, of its models, and what they share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.server.conftest import pending, rounds
from tests.support.client import eventually
from tools.soak.watch import Watch

SIDES = (16, 32, 48, 64, 96)


def look(triton, served) -> tuple[dict[str, int], int]:
    """Return the own memory of each process of the idle server in KiB, and the shared memory."""
    eventually(lambda: pending(served) == {}, "idle")
    sample = Watch(triton, lambda: 0).take(idle=True)
    return {name: usage.own_kib for name, usage in sample.processes.items()}, sample.shm_kib


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, str]:
    """Return the processes that have grown by more than 5 %, or 8 MiB where that is more."""
    return {
        name: f"{before[name]} to {after[name]} KiB"
        for name in before
        if after[name] > max(1.05 * before[name], before[name] + 8 * 1024)
    }


def test_mixed_sizes_reach_a_plateau_43(triton, served):
    """Case 43: the same mix of sizes again and again: what the second round needed is enough for the third."""
    count = rounds(40, 170)
    sent = [
        {"num_inference_steps": 1 + k % 2, "height": SIDES[k % 5], "width": SIDES[k // 5 % 5], "guidance_scale": 1.0}
        for k in range(count)
    ]

    def draw_all() -> tuple[dict[str, int], int]:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda values: served.infer(prompt="a", **values), sent))
        assert [answer.images.shape[1:3] for answer in answers] == [(v["height"], v["width"]) for v in sent]
        return look(triton, served)

    draw_all()
    (second, shared_before), (third, shared_after) = draw_all(), draw_all()
    assert grown(second, third) == {}
    assert shared_after <= shared_before


def test_after_the_largest_request_nothing_grows_45(triton, served, rng):
    """Case 45: the largest request that a model allows five times, each size once, then random sizes."""
    largest = {"height": 48, "width": 48, "num_outputs_per_prompt": 2}
    sides = (16, 32, 48)
    each = [
        {"height": height, "width": width, "num_outputs_per_prompt": count}
        for height in sides
        for width in sides
        for count in (1, 2)
    ]

    def draw_all(sent) -> tuple[dict[str, int], int]:
        for values in sent:
            images = served.infer("other_name", prompt="a", num_inference_steps=1, **values).images
            assert images.shape == (values["num_outputs_per_prompt"], values["height"], values["width"], 3)
        return look(triton, served)

    before, shared_before = draw_all([*[largest] * 5, *each, *each])
    after, shared_after = draw_all(rng.choices(each, k=rounds(40, 300)))
    assert grown(before, after) == {}
    assert shared_after <= shared_before


def test_cancelled_large_requests_give_their_memory_back_32(triton, served):
    """Case 32: large requests, cancelled while they run or wait; what they needed at first is enough for ever."""
    large = {"num_inference_steps": 900, "height": 192, "width": 192}

    def give_up(count: int, num_running: int = 1) -> None:
        calls = [served.stream(prompt="a", **large) for _ in range(count)]
        for call in calls[:num_running]:
            call.wait_step()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda call: call.cancel(), calls))
        eventually(lambda: pending(served) == {}, "idle")

    def most(count: int) -> tuple[dict[str, int], int]:
        """Return the most that the idle processes had after each of so many rounds: the heap is left in two shapes."""
        looks = []
        for _ in range(count):
            give_up(8)
            looks.append(look(triton, served))
        return {name: max(own[name] for own, _ in looks) for name in looks[0][0]}, max(shm for _, shm in looks)

    for _ in range(2):
        give_up(8, num_running=8)  # all in one forward: the most that they can need
    before, shared_before = most(12)
    after, shared_after = most(rounds(6, 60))
    assert grown(before, after) == {}
    assert shared_after <= shared_before
