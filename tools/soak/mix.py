"""What is sent: an endless list of requests, drawn from a seed, in exact shares.

Every block of `BLOCK` requests holds the same number of each kind, in an order of its own. A request depends on the
seed and its number only, so a run can be repeated whatever its concurrency.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

TEXT = "emoji"
"""The text-to-image model, and what its twin's name begins with."""

REDRAW = "redraw"
"""The same weights as an image-to-image model."""

End = Literal["finished", "failed", "late", "rejected", "refused", "cancelled", "gone"]
"""How a request is to end.

finished: with a result. failed: a fault in the pipeline. late: its time-out passes while it runs. rejected: refused by
the backend, which counts it. refused: by Triton or the twin, which do not. cancelled: after its first step was seen.
gone: its client left at once, or without knowing how far it was; the server may have counted it as cancelled, or never
seen it.
"""

Way = Literal["stream", "infer", "infer_http", "http_json", "generate", "generate_stream"]

SHARES: dict[str, int] = {
    "steps on a stream": 8,
    "picture file on a stream": 3,
    "previews": 4,
    "gRPC infer": 7,
    "picture file by gRPC infer": 3,
    "HTTP infer": 4,
    "HTTP infer, all JSON": 2,
    "generate": 3,
    "generate_stream": 2,
    "several prompts and outputs": 2,
    "picture in": 2,
    "compared with alone": 1,
    "cancelled on a stream": 2,
    "cancelled server-sent events": 1,
    "cancelled at once": 1,
    "client time-out of the twin": 1,
    "faulty": 1,
    "time-out while it runs": 1,
    "bad": 2,
}
"""How many requests of each kind are in a block: 10 % are cancelled and 2 % faulty."""

BLOCK = sum(SHARES.values())

PROMPTS = ("red apple", "blue heart", "pizza", "cat face", "rocket", "snowman", "octopus", "green book", "🍎", "")
SIZES = ((16, 16), (16, 16), (32, 32), (32, 32), (48, 32), (64, 64))
SCHEDULERS = ("DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "DDPMScheduler")
FORMATS = ("png", "jpeg", "webp")
LONG = {"num_inference_steps": 900, "height": 64, "width": 64}
"""What is given up: it never ends by itself in the time that its client has for it."""

FAULTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"fault": "raise", "phase": "preprocess", "prompt": "fault: before"}, r"the pipeline failed.*InjectedFaultError"),
    ({"fault": "raise", "step": 2, "prompt": "fault: raise"}, r"the pipeline failed.*InjectedFaultError"),
    ({"fault": "raise", "phase": "decode", "prompt": "fault: decode"}, r"the pipeline failed.*InjectedFaultError"),
    ({"fault": "nan", "step": 2, "prompt": "fault: nan"}, r"not finite"),
    ({"fault": "out_of_memory", "step": 2, "prompt": "fault: memory"}, r"out of device memory"),
)
"""The faults that the model is configured with, each for the requests whose prompt begins so, and their words."""

PROBES: tuple[dict[str, Any], ...] = tuple(
    {
        "prompt": PROMPTS[k],
        "seed": 1000 + k,
        "num_inference_steps": 2 + k % 5,
        "guidance_scale": (1.0, 3.0, 7.5)[k % 3],
        "height": (32, 48)[k % 2],
        "width": 32,
        "extra_args": {"scheduler": SCHEDULERS[k % 3]},
    }
    for k in range(8)
)
"""Requests whose pictures on the idle server are kept, to compare with those under load."""

REJECTED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"num_inference_steps": 0}, r"num_inference_steps: 0 is not allowed"),
    ({"height": 63}, r"height: 63 is not allowed; it must be a multiple of"),
    ({"guidance_scale": float("nan")}, r"guidance_scale: nan is not allowed"),
    ({"seed": -1}, r"seed: -1 is not allowed"),
    ({"output_format": "pgn"}, r"output_format: 'pgn' is not one of"),
    ({"extra_args": "{"}, r"extra_args: it is not JSON"),
    ({"extra_args": {"etta": 1}}, r"extra_args: 'etta' is not an argument"),
    ({"num_outputs_per_prompt": 10_000}, r"num_outputs_per_prompt: 10000 is not allowed"),
    ({"prompt": "a" * 20_000}, r"prompt: 20000 bytes are too many"),
)
"""What the backend refuses, and its words."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One request.

    Attributes:
        number: the how-manieth it is, from 0.
        kind: one of `SHARES`.
        way: how it is sent.
        model: the streaming model; its twin is used where the way needs one.
        end: how it is to end.
        values: the inputs.
        words: a regular expression that the text of its error must match.
        patience_s: how long its client waits before it goes away, or None.
        timeout_s: its time-out, or None.
        probe: index into `PROBES`, or None.
    """

    number: int
    kind: str
    way: Way
    model: str
    end: End
    values: dict[str, Any] = field(default_factory=dict)
    words: str = ""
    patience_s: float | None = None
    timeout_s: float | None = None
    probe: int | None = None

    @property
    def num_outputs(self) -> int:
        """Pictures that it makes if it finishes."""
        prompt = self.values.get("prompt")
        return (len(prompt) if isinstance(prompt, list) else 1) * int(self.values.get("num_outputs_per_prompt", 1))


def plan(seed: int, number: int) -> Plan:
    """Return the `number`-th request of a run with this seed."""
    kind = _block(seed, number // BLOCK)[number % BLOCK]
    rng = random.Random(f"{seed}:{number}")
    made = _special(number, kind, rng) or _good(number, kind, rng)
    assert made.kind == kind
    return made


@lru_cache(maxsize=4)
def _block(seed: int, index: int) -> list[str]:
    kinds = [kind for kind, count in SHARES.items() for _ in range(count)]
    random.Random(f"{seed}:block:{index}").shuffle(kinds)
    return kinds


def _ordinary(rng: random.Random) -> dict[str, Any]:
    height, width = rng.choice(SIZES)
    values: dict[str, Any] = {
        "prompt": rng.choice(PROMPTS),
        "num_inference_steps": rng.randint(2, 6),
        "guidance_scale": rng.choice((1.0, 1.0, 3.0, 7.5)),
        "height": height,
        "width": width,
    }
    if rng.random() < 0.5:
        values["seed"] = rng.randrange(2**63)
    if rng.random() < 0.3:
        values["extra_args"] = {"scheduler": rng.choice(SCHEDULERS)}
    if rng.random() < 0.2:
        values["num_outputs_per_prompt"] = rng.randint(2, 4)
    if rng.random() < 0.2:
        values["negative_prompt"] = rng.choice(PROMPTS)
    return values


def _good(number: int, kind: str, rng: random.Random) -> Plan:
    """Return a request that is to finish."""
    values = _ordinary(rng)
    way: Way = "stream"
    model, probe = TEXT, None
    if kind == "picture file on a stream":
        values["output_format"] = rng.choice(FORMATS)
    elif kind == "previews":
        steps = rng.randint(3, 6)  # no preview follows the last step
        values |= {"num_inference_steps": steps, "preview_interval": rng.randint(1, 2)}
        values["output_format"] = rng.choice(("raw", *FORMATS))
    elif kind == "picture file by gRPC infer":
        way = "infer"
        values["output_format"] = rng.choice(FORMATS)
    elif kind in ("generate", "generate_stream"):
        way = kind  # type: ignore[assignment]
        values["output_format"] = rng.choice(FORMATS) + ";base64"
    elif kind == "several prompts and outputs":
        way = rng.choice(("stream", "infer"))
        count = rng.randint(2, 3)
        values |= {"prompt": rng.sample(PROMPTS, count), "num_outputs_per_prompt": rng.randint(1, 2)}
        if "seed" in values:
            values["seed"] = [rng.randrange(2**63) for _ in range(count)]
    elif kind == "picture in":
        model, way = REDRAW, rng.choice(("stream", "infer", "infer_http"))
        values = {"prompt": rng.choice(PROMPTS), "num_inference_steps": rng.randint(4, 8), "strength": 0.5}
        values["picture"] = (rng.choice(("raw", "png")), rng.randrange(10), rng.choice((32, 64)))
    elif kind == "compared with alone":
        way, probe = rng.choice(("stream", "infer", "infer_http")), rng.randrange(len(PROBES))
        values = PROBES[probe]
    else:
        way = {
            "gRPC infer": "infer",
            "HTTP infer": "infer_http",
            "HTTP infer, all JSON": "http_json",
            "steps on a stream": "stream",
        }[kind]  # type: ignore[assignment]
    return Plan(number, kind, way, model, "finished", values, probe=probe)


def _special(number: int, kind: str, rng: random.Random) -> Plan | None:
    """Return a request that is to end in another way, or None for other kinds."""
    lasting = {"prompt": rng.choice(PROMPTS), **LONG}
    match kind:
        case "cancelled on a stream":
            return Plan(number, kind, "stream", TEXT, "cancelled", lasting | {"progress": True})
        case "cancelled server-sent events":
            return Plan(number, kind, "generate_stream", TEXT, "cancelled", lasting)
        case "cancelled at once":
            return Plan(number, kind, "stream", TEXT, "gone", lasting, patience_s=rng.choice((0.0, 0.02, 0.1)))
        case "client time-out of the twin":
            return Plan(number, kind, "infer", TEXT, "gone", lasting, patience_s=rng.uniform(0.05, 1.0))
        case "time-out while it runs":
            words = r"deadline exceeded: not done within the timeout"
            way: Way = rng.choice(("stream", "infer"))
            return Plan(number, kind, way, TEXT, "late", lasting, words, timeout_s=rng.uniform(0.3, 1.0))
        case "faulty":
            fault, words = FAULTS[number // BLOCK % len(FAULTS)]
            values = {**_ordinary(rng), "prompt": fault["prompt"], "num_inference_steps": 3}
            way = rng.choice(("stream", "infer", "generate"))
            return Plan(number, kind, way, TEXT, "failed", values, words)
        case "bad":
            wrong, words = rng.choice(REJECTED)
            return Plan(number, kind, rng.choice(("stream", "infer")), TEXT, "rejected", _ordinary(rng) | wrong, words)
    return None
