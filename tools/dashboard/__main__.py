"""`python -m tools.dashboard`: Grafana's JSON of the dashboard, and the README's picture of it under a real load."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from diffusion_backend.serve import TritonServer
from tests.support.client import Served, eventually

from .grafana import render
from .load import Load
from .picture import draw
from .prometheus import Prometheus, is_installed, write_config
from .variables import interpolate

ROOT = Path(__file__).parents[2]
SCRAPE_S = 5
CALLERS = (2, 8, 24, 6)
"""How many callers there are in each part of the load; emoji has 16 slots."""

console = Console()


def main(
    json: Annotated[Path, typer.Option(help="Where the dashboard goes.")] = ROOT
    / "deploy/grafana/dashboards/diffusion.json",
    picture: Annotated[bool, typer.Option(help="Also serve under load, scrape, and plot.")] = True,
    image: Annotated[Path, typer.Option(help="Where the picture goes.")] = ROOT / "docs/images/dashboard.png",
    minutes: Annotated[float, typer.Option(help="How long the load lasts.", min=1)] = 6,
) -> None:
    """Write the dashboard; then serve the models that ship, and plot its panels of a load with every kind of error."""
    json.write_text(render())
    console.print(f"wrote {json}")
    if not picture:
        return
    if not is_installed():
        raise typer.BadParameter("Prometheus is not installed (Debian's package: prometheus)", param_hint="--picture")
    with tempfile.TemporaryDirectory() as folder, TritonServer(ROOT / "model_repository") as server:
        server.wait_ready(strict=True)
        _plot(server, Path(folder), image, 60 * minutes)
    console.print(f"wrote {image}")


def _plot(server: TritonServer, folder: Path, image: Path, seconds: float) -> None:
    """Load the server for so long, with Prometheus watching, and draw what it saw."""
    served = Served.of(server)
    config = write_config(folder, served.metrics_url, SCRAPE_S)
    with Prometheus(config, folder / "data") as prometheus:
        eventually(lambda: prometheus.query("up == 1"), "a first scrape")
        start = time.time()
        with Load(served, "emoji", 0) as load:
            for callers in CALLERS:
                console.print(f"{callers} callers for {seconds / len(CALLERS):.0f} s")
                load.set_callers(callers)
                time.sleep(seconds / len(CALLERS))
            end = time.time()
        served.close()
        step = SCRAPE_S
        variables = {"model": ["emoji"], "instance": [served.metrics_url]}
        parts = ", then ".join(map(str, CALLERS))
        caption = (
            f"The emoji model on {os.cpu_count()} CPU cores; {parts} callers, some of whom cancel or send what fails"
        )
        draw(
            lambda expr: prometheus.query_range(
                interpolate(expr, variables, step_s=step, scrape_s=SCRAPE_S), start, end, step
            ),
            start,
            end,
            image,
            caption,
        )


if __name__ == "__main__":
    typer.run(main)
