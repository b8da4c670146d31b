"""Draw one prompt from nothing: start the server, draw, show where the time went, stop the server.

`make demo PROMPT="red apple"` runs `python -m diffusion_backend.demo`. Everything goes the way that a client's request
goes: over gRPC to a real Triton server on free ports of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import sys
import textwrap
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from diffusion_backend.serve import ServeError, TritonServer
from diffusion_backend.serve.command import default_repository
from diffusion_backend.timing import PHASES

READY_S = 900.0
SILENCE_S = 600.0
"""Longest wait for the next event of a request; one step of a large model on a slow machine may take minutes."""

_OUTPUTS = ("event", "step", "num_steps", "encoded", "seeds", "metrics")
_PHASE_TEXTS = {
    "queue": "waiting for a slot",
    "preprocess": "reading the prompt",
    "execute": "denoising",
    "postprocess": "decoding and encoding",
}
_SLUG_LENGTH = 60
_SHOWN_LENGTH = 40

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class DemoError(Exception):
    """The picture could not be drawn; the message says why."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a request gave.

    Attributes:
        files: the encoded pictures.
        seeds: one for each picture.
        metrics: the record of the `metrics` output.
    """

    files: list[bytes]
    seeds: list[int]
    metrics: dict[str, Any]


def slug(prompt: str) -> str:
    """Return a file name (without suffix) for any prompt: lower-case ASCII letters, digits and hyphens, never empty.

    Letters lose their accents; characters without an ASCII form are named by Unicode, so that a prompt of one emoji
    has a name, too.
    """
    words = []
    for character in unicodedata.normalize("NFKD", prompt):
        if character.isascii():
            words.append(character.lower())
        elif not unicodedata.combining(character):
            words.append(f" {unicodedata.name(character, '').lower()} ")
    text = re.sub(r"[^a-z0-9]+", "-", "".join(words)).strip("-")
    return text[:_SLUG_LENGTH].strip("-") or "picture"


def make_inputs(
    prompt: str, *, steps: int | None, guidance: float | None, seed: int | None, num_outputs: int
) -> list[Any]:
    """Return the inputs of a request for one prompt, for `tritonclient.grpc`; what is None is left to the model."""
    import tritonclient.grpc as triton

    values: list[tuple[str, str, Any]] = [
        ("prompt", "BYTES", np.array([[prompt.encode()]], dtype=np.object_)),
        ("output_format", "BYTES", np.array([[b"png"]], dtype=np.object_)),
        ("num_outputs_per_prompt", "INT32", np.array([[num_outputs]], dtype=np.int32)),
    ]
    if steps is not None:
        values.append(("num_inference_steps", "INT32", np.array([[steps]], dtype=np.int32)))
    if guidance is not None:
        values.append(("guidance_scale", "FP32", np.array([[guidance]], dtype=np.float32)))
    if seed is not None:
        values.append(("seed", "INT64", np.array([[seed]], dtype=np.int64)))
    inputs = []
    for name, datatype, value in values:
        tensor = triton.InferInput(name, list(value.shape), datatype)
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


def check_streams(url: str, model: str) -> None:
    """Make sure that the model tells its steps.

    Raises:
        DemoError: it answers once, as a unary twin does.
    """
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(url) as client:
        outputs = [output.name for output in client.get_model_metadata(model).outputs]
    if "event" not in outputs:
        raise DemoError(f"--model: {model!r} tells no steps; name a streaming model, not its unary twin")


def stream(url: str, model: str, inputs: list[Any]) -> Iterator[tuple[str, Any]]:
    """Send one request; yield the kind and the response of each event, to the one of the finished picture.

    Raises:
        DemoError: the request ended with an error, or the server fell silent.
    """
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        try:
            outputs = [triton.InferRequestedOutput(name) for name in _OUTPUTS]
            client.async_stream_infer(model, inputs, outputs=outputs)
            kind = ""
            while kind != "finished":
                result, error = responses.get(timeout=SILENCE_S)
                if error is not None:
                    raise error
                kind = result.as_numpy("event")[0].decode()
                yield kind, result
        except InferenceServerException as error:
            raise DemoError(error.message()) from None
        except queue.Empty:
            raise DemoError(f"the server has sent nothing for {SILENCE_S:.0f} s") from None
        finally:
            client.stop_stream(cancel_requests=True)


def draw(console: Console, url: str, model: str, prompt: str, inputs: list[Any]) -> Drawing:
    """Send the request and show its steps; return what it gave.

    Raises:
        DemoError: see `stream`.
    """
    result = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        shown = textwrap.shorten(prompt, _SHOWN_LENGTH, placeholder="…")
        bar = progress.add_task(f"drawing {escape(shown)}", total=None)
        for kind, result in stream(url, model, inputs):
            if kind == "step":
                step, total = (int(result.as_numpy(name)[0]) for name in ("step", "num_steps"))
                progress.update(bar, completed=step, total=total)
    assert result is not None
    return Drawing(
        files=list(result.as_numpy("encoded")),
        seeds=[int(seed) for seed in result.as_numpy("seeds")],
        metrics=json.loads(result.as_numpy("metrics")[0]),
    )


def save(drawing: Drawing, folder: Path, name: str) -> list[Path]:
    """Write the pictures as `name.png`, or as `name-1.png`, `name-2.png`, … if they are several."""
    folder.mkdir(parents=True, exist_ok=True)
    several = len(drawing.files) > 1
    paths = []
    for number, file in enumerate(drawing.files, start=1):
        paths.append(folder / (f"{name}-{number}.png" if several else f"{name}.png"))
        paths[-1].write_bytes(file)
    return paths


def times_table(metrics: dict[str, Any], seen_ms: float) -> Table:
    """Return where the time went, as the engine tells and as the client saw it.

    Args:
        metrics: the record of the `metrics` output.
        seen_ms: milliseconds from sending the request to having the picture.
    """
    total = float(metrics["time_total_ms"])
    table = Table(title="where the milliseconds went", title_justify="left", title_style="bold")
    table.add_column("phase")
    table.add_column("what")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for phase in PHASES:
        value = float(metrics[f"time_{phase}_ms"])
        table.add_row(phase, _PHASE_TEXTS[phase], f"{value:.1f}", f"{value / seen_ms:.0%}")
    table.add_row("", "Triton, gRPC and this client", f"{seen_ms - total:.1f}", f"{1 - total / seen_ms:.0%}")
    table.add_section()
    table.add_row("", "as the client saw it", f"{seen_ms:.1f}", "100%", style="bold")
    return table


@contextlib.contextmanager
def serving(console: Console, repository: Path, model: str) -> Iterator[TritonServer]:
    """Start a server on free ports and wait until the model takes requests; at the end stop it cleanly.

    Raises:
        DemoError: the repository has no such model, or it did not load.
        ServeError: the server could not be started.
    """
    begin = time.monotonic()
    with TritonServer(repository) as server:
        with console.status("starting the server") as status:
            models = server.wait_ready(
                READY_S,
                on_progress=lambda loading, _: status.update(
                    f"loading {escape(', '.join(loading))}" if loading else ""
                ),
            )
        ready = [state.name for state in models if state.is_ready]
        if model not in ready:
            reason = next((f": {state.reason}" for state in models if state.name == model and state.reason), "")
            raise DemoError(f"the model {model!r} is not served{reason}; there are: {', '.join(ready)}")
        console.print(f"[green]ready[/] after {time.monotonic() - begin:.1f} s")
        yield server
        with console.status("stopping the server"):
            server.drain()
    console.print("[green]stopped[/]")


@app.command()
def main(
    prompt: Annotated[str, typer.Option(envvar="PROMPT", help="What to draw; any text.")] = "red apple",
    steps: Annotated[int | None, typer.Option(help="Denoising steps; the model's default unless given.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; the model's default unless given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the same picture again; random unless given.")] = None,
    num_outputs: Annotated[int, typer.Option(help="Pictures to draw.")] = 1,
    model: Annotated[str, typer.Option(help="A streaming model of the repository.")] = "emoji",
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("out"),
    model_repository: Annotated[
        Path | None,
        typer.Option(envvar="MODEL_REPOSITORY", help="Folder of the models; ./model_repository unless given."),
    ] = None,
) -> None:
    """Start the server, draw one prompt into a PNG file, show where the time went, and stop the server.

    Exits with 0 if the picture was drawn, else with 1 and the reason in one line.
    """
    console = Console(highlight=False)
    prompt = prompt.encode(errors="replace").decode()  # an argument that is not UTF-8 can be neither sent nor shown
    # gRPC logs to stderr what it notices itself, such as the end of the server; errors still come as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        with serving(console, model_repository or default_repository(), model) as server:
            check_streams(server.url_grpc, model)
            inputs = make_inputs(prompt, steps=steps, guidance=guidance, seed=seed, num_outputs=num_outputs)
            begin = time.monotonic()
            drawing = draw(console, server.url_grpc, model, prompt, inputs)
            seen_ms = (time.monotonic() - begin) * 1e3
            for path, used in zip(save(drawing, out, slug(prompt)), drawing.seeds, strict=True):
                console.print(f"[bold]{escape(str(path))}[/]  seed {used}", soft_wrap=True)
            console.print(times_table(drawing.metrics, seen_ms))
    except (DemoError, ServeError) as error:
        console.print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    app(prog_name="python -m diffusion_backend.demo")
