"""Draws requests that are wrong in every way that a caller can be wrong, and some that are right."""

from __future__ import annotations

import base64
import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TYPES = {
    "prompt": "BYTES",
    "negative_prompt": "BYTES",
    "num_inference_steps": "INT32",
    "guidance_scale": "FP32",
    "height": "INT32",
    "width": "INT32",
    "num_frames": "INT32",
    "strength": "FP32",
    "frame_rate": "FP32",
    "duration_s": "FP32",
    "image": "UINT8",
    "image_file": "BYTES",
    "mask_image": "UINT8",
    "mask_image_file": "BYTES",
    "control_image": "UINT8",
    "control_image_file": "BYTES",
    "num_outputs_per_prompt": "INT32",
    "seed": "INT64",
    "output_format": "BYTES",
    "lora": "BYTES",
    "extra_args": "BYTES",
    "preview_interval": "INT32",
    "progress": "BOOL",
}
"""The inputs and their types."""

PACK = {
    "BOOL": "?",
    "UINT8": "B",
    "INT8": "b",
    "INT16": "h",
    "UINT16": "H",
    "INT32": "i",
    "UINT32": "I",
    "INT64": "q",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}

NUMBERS = (0, 1, 2, 3, -1, -8, 7, 16, 17, 65, 1001, 5000, 2**31 - 1, -(2**31))
FLOATS = (0.0, 0.5, 1.0, 3.0, -1.0, 1001.0, 1e30, -1e30, float("nan"), float("inf"), float("-inf"), 1e-45)
TEXTS = (b"", b" ", b"\0", b"a" * 17_000, b"\xff\xfe", "🍎".encode(), b"../../etc/passwd", b"%s%n", b"</s><pad>" * 50)
FORMATS = (b"png", b"jpeg;base64", b"raw", b"mp4", b"wav", b"PNG", b"pgn", b";base64", b"png;", b"")
ARGUMENTS = (
    "eta",
    "guidance_rescale",
    "clip_skip",
    "timesteps",
    "sigmas",
    "cross_attention_kwargs",
    "scheduler",
    "latents",
    "prompt_embeds",
    "generator",
    "output_type",
    "return_dict",
    "callback_on_step_end",
    "ip_adapter_image",
    "prompt",
    "strength",
    "__class__",
    "self",
    "",
)


@dataclass(frozen=True)
class Sent:
    """One input as it travels.

    Attributes:
        raw: its bytes, in Triton's form.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True)
class Case:
    """One request: how it is sent and what is in it.

    Attributes:
        body: of an HTTP request, where it is no list of inputs.
    """

    way: str
    model: str
    inputs: tuple[Sent, ...] = ()
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        inputs = ", ".join(f"{s.name}:{s.datatype}{list(s.shape)}={s.raw[:40]!r}" for s in self.inputs)
        return f"{self.way} {self.model} {inputs}{self.body[:300]!r} {self.headers} {self.parameters}"


def draw(seed: int, number: int) -> Case:
    """Return the `number`-th case of a seed."""
    rng = random.Random(f"{seed}:{number}")
    way = rng.choice(("stream", "stream", "infer", "infer", "http", "http_binary", "generate", "generate_stream"))
    model = rng.choice(("emoji", "emoji", "emoji", "redraw"))
    if way in ("generate", "generate_stream"):
        return Case(way, _twin(rng, model, way), body=_generate_body(rng))
    inputs = _inputs(rng, model)
    parameters = _parameters(rng) if rng.random() < 0.15 else {}
    if way in ("http", "http_binary"):
        return _http(rng, way, _twin(rng, model, way), inputs, parameters)
    return Case(way, _twin(rng, model, way), tuple(inputs), parameters=parameters)


def _twin(rng: random.Random, model: str, way: str) -> str:
    if rng.random() < 0.01:
        return "no_such_model"
    streams = way in ("stream", "generate_stream") or rng.random() < 0.03
    return model if streams else f"{model}_unary"


# -- tensors ------------------------------------------------------------------------------------------------------


def _inputs(rng: random.Random, model: str) -> list[Sent]:
    """Return a small right request with a few things wrong in it."""
    rows = rng.choice((1, 1, 1, 1, 2, 3))
    right: dict[str, Any] = {
        "prompt": b"red apple",
        "num_inference_steps": 4 if model == "redraw" else rng.randint(1, 3),
        "guidance_scale": 1.0,
    }
    if model == "emoji":
        right |= {"height": 16, "width": 16}
    inputs = [_tensor(name, TYPES[name], (rows, 1), [value] * rows) for name, value in right.items()]
    if model == "redraw":
        pixels = bytes(rng.randrange(256) for _ in range(rows * 16 * 16 * 3))
        inputs.append(Sent("image", "UINT8", (rows, 16, 16, 3), pixels))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        name = rng.choice(list(TYPES))
        wrong = _spoil(rng, _fresh(rng, name, rows))
        inputs = [sent for sent in inputs if sent.name != name]
        if rng.random() > 0.05:  # else it is missing
            inputs.append(wrong)
        if rng.random() < 0.03:
            inputs.append(wrong)  # twice
    if rng.random() < 0.03:
        inputs.append(_tensor("num_inference_step", "INT32", (rows, 1), [2] * rows))
    rng.shuffle(inputs)
    return inputs


def _fresh(rng: random.Random, name: str, rows: int) -> Sent:
    """Return an input with a value of its type that may be wrong in itself."""
    kind = TYPES[name]
    if kind == "UINT8":
        sides = rng.choice(((16, 16), (1, 1), (7, 9), (0, 16), (300, 2)))
        shape = (rows, *sides, rng.choice((3, 3, 1, 4, 2, 0)))
        size = shape[0] * shape[1] * shape[2] * shape[3]
        return Sent(name, kind, shape, bytes(rng.randrange(256) for _ in range(min(size, 4096))).ljust(size, b"\0"))
    draw_value: Callable[[], Any]
    if name.endswith("_file"):
        draw_value = lambda: _file(rng)  # noqa: E731
    elif name == "output_format":
        draw_value = lambda: rng.choice(FORMATS)  # noqa: E731
    elif name == "extra_args":
        draw_value = lambda: _json(rng).encode("utf-8", "surrogatepass")  # noqa: E731
    elif name == "lora":
        draw_value = lambda: rng.choice((b"a:b", b"x:1e400", b",", b"a", b":", *TEXTS))  # noqa: E731
    elif kind == "BYTES":
        draw_value = lambda: rng.choice(TEXTS)  # noqa: E731
    elif kind == "FP32":
        draw_value = lambda: rng.choice(FLOATS)  # noqa: E731
    elif kind == "BOOL":
        draw_value = lambda: rng.random() < 0.5  # noqa: E731
    else:
        # Not hundreds of steps: what is right must be done soon.
        numbers = [n for n in NUMBERS if name != "num_inference_steps" or not 4 < n < 1000]
        draw_value = lambda: rng.choice(numbers)  # noqa: E731
    value = draw_value()
    values = [value if rng.random() < 0.8 else draw_value() for _ in range(rows)]
    return _tensor(name, kind, (rows, 1), values)


def _spoil(rng: random.Random, sent: Sent) -> Sent:
    """Return it as it is, or with another type, rank, size or bytes."""
    way = rng.random()
    if way < 0.5:
        return sent
    if way < 0.62:
        datatype = rng.choice([*PACK, "BYTES"])
        count = max(1, sent.shape[0])
        raw = (
            _bytes_of([b"x"] * count) if datatype == "BYTES" else struct.pack(f"<{count}{PACK[datatype]}", *[1] * count)
        )
        return Sent(sent.name, datatype, (count, 1), raw)
    if way < 0.74:
        shape = rng.choice(
            ((1,), (), (1, 1, 1), (2, 1), (17, 1), (0, 1), (1, 0), (1, 2), (-1, 1), (2**40, 1), (1, 2**31))
        )
        return Sent(sent.name, sent.datatype, shape, sent.raw)
    if way < 0.87:
        cut = rng.randrange(len(sent.raw) + 1)
        raw = rng.choice((sent.raw[:cut], sent.raw + bytes(rng.randrange(1, 9)), b""))
        return Sent(sent.name, sent.datatype, sent.shape, raw)
    garbage = bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 8, len(sent.raw)))))
    return Sent(sent.name, rng.choice((sent.datatype, "FLOAT", "", "BF16")), sent.shape, garbage)


def _tensor(name: str, datatype: str, shape: tuple[int, ...], values: list[Any]) -> Sent:
    raw = _bytes_of(values) if datatype == "BYTES" else struct.pack(f"<{len(values)}{PACK[datatype]}", *values)
    return Sent(name, datatype, shape, raw)


def _bytes_of(values: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def _file(rng: random.Random) -> bytes:
    png = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    damaged = bytearray(png)
    damaged[rng.randrange(len(png))] ^= 1 << rng.randrange(8)
    return rng.choice(
        (png, bytes(damaged), png[: rng.randrange(len(png))], base64.b64encode(png), b"GIF89a", b"====", b"")
    )


def _json(rng: random.Random) -> str:
    """Return what is meant as `extra_args`: objects of known and unknown names, or no JSON at all."""
    if rng.random() < 0.2:
        return rng.choice(
            ("{", "[]", "null", "1e999", "[" * 5000, '{"eta": NaN}', '{"a": 1, "a": 2}', '"x"', "{'eta': 1}")
        )
    names = rng.sample(ARGUMENTS, rng.randint(1, 2))
    return json.dumps({name: _value(rng, 2) for name in names})


def _value(rng: random.Random, depth: int) -> Any:
    kinds = [None, True, False, 0, -1, 3, 2**70, 0.5, -1e308, "", "x", "DDPMScheduler", "🍎", "latent"]
    if depth and rng.random() < 0.4:
        values = [_value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
        return values if rng.random() < 0.6 else {str(value)[:10]: value for value in values}
    return rng.choice(kinds)


def _parameters(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {"error_codes": True},
            {"error_codes": "x"},
            {"num_inference_steps": 3},
            {"timeout": -5},
            {"timeout": "soon"},
            {"priority": 99},
            {"sequence_id": 7},
            {"": 1},
            {"a" * 1000: "b" * 1000},
        )
    )


# -- HTTP ---------------------------------------------------------------------------------------------------------


def _generate_body(rng: random.Random) -> bytes:
    body: dict[str, Any] = {"prompt": "red apple", "num_inference_steps": 2, "height": 16, "width": 16}
    for _ in range(rng.randint(0, 3)):
        name = rng.choice([*TYPES, "num_inference_step", "timeout", "priority", "id", "parameters"])
        body[name] = rng.choice((*NUMBERS, 0.5, None, True, "x", "png;base64", [], [1, 2], {}, {"a": 1}, _json(rng)))
    return _cut(rng, json.dumps(body).encode())


def _http(rng: random.Random, way: str, model: str, inputs: list[Sent], parameters: dict[str, Any]) -> Case:
    """Return an `infer` request; with `http_binary` the tensors follow the JSON as bytes."""
    entries, tail = [], b""
    if way == "http":  # the server makes room for a shape's size before it reads any data: see docs/limits.md
        inputs = [sent for sent in inputs if abs(math.prod(sent.shape)) < 2**20]
    for sent in inputs:
        entry: dict[str, Any] = {"name": sent.name, "datatype": sent.datatype, "shape": list(sent.shape)}
        if way == "http_binary":
            size = len(sent.raw) if rng.random() < 0.95 else rng.choice((0, -1, 10**12, "4"))
            entry["parameters"] = {"binary_data_size": size}
            tail += sent.raw
        else:
            entry["data"] = _as_json(rng, sent)
        entries.append(entry)
    head: dict[str, Any] = {"inputs": entries}
    if parameters:
        head["parameters"] = parameters
    if rng.random() < 0.05:
        head["outputs"] = [{"name": rng.choice(("images", "no_such_output", ""))}]
    text = _cut(rng, json.dumps(head).encode())
    length = len(text) if rng.random() < 0.97 else rng.choice((0, len(text) + 7, -1))
    headers = {"Inference-Header-Content-Length": str(length)} if way == "http_binary" else {}
    return Case(way, model, body=text + tail, headers=headers)


def _as_json(rng: random.Random, sent: Sent) -> Any:
    """Return the data of an input as JSON; the wrong kind of thing now and then."""
    if rng.random() < 0.1:
        return rng.choice(("x", 1, None, {}, [[1, [2]]], [None]))
    if sent.datatype == "BYTES":
        return [sent.raw[4:].decode("latin-1")]
    code = PACK.get(sent.datatype)
    size = struct.calcsize(f"<{code}") if code else 0
    if not size or len(sent.raw) % size:
        return list(sent.raw)
    return list(struct.unpack(f"<{len(sent.raw) // size}{code}", sent.raw))


def _cut(rng: random.Random, text: bytes) -> bytes:
    """Return JSON, damaged now and then."""
    if rng.random() > 0.08:
        return text
    at = rng.randrange(len(text))
    return rng.choice((text[:at], text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :], b"", b"[]", b"null"))
