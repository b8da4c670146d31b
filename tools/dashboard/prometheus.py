"""A Prometheus of this machine's, and its answers: to run the dashboard's queries, in tests and for the picture."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from diffusion_backend.serve.ports import free_ports

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
"""What Prometheus is given in deployment."""

_READY_S = 60.0


@dataclass(frozen=True)
class Series:
    """The values of one series.

    Attributes:
        labels: without the name of the metric.
        times: seconds since the epoch.
    """

    labels: Mapping[str, str]
    times: list[float]
    values: list[float]


def is_installed() -> bool:
    """Whether this machine has Prometheus and its promtool (Debian's package `prometheus`)."""
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None


def write_config(folder: Path, target: str, interval_s: int, job_name: str = "triton") -> Path:
    """Write the configuration of the deployment into an empty `folder`, but for one target, scraped more often.

    Args:
        target: `host:port` of the metrics.
        job_name: the job whose only target it becomes; there is no other job.
    """
    shutil.copytree(FOLDER / "rules", folder / "rules")
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    interval = f"{interval_s}s"
    config["global"] |= {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == job_name)
    config["scrape_configs"] = [job]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [target]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


class Prometheus:
    """A running Prometheus on a free port of the loopback; `with` starts and ends it.

    Args:
        config: its configuration file.
        data: a folder for what it stores.
    """

    def __init__(self, config: Path, data: Path) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        self.url = f"http://127.0.0.1:{port}"
        self._log = data.with_suffix(".log")
        self._command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={data}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _wait_ready(self) -> None:
        assert self._process is not None
        pause = threading.Event()
        deadline = time.monotonic() + _READY_S
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"Prometheus ended: {self._log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            pause.wait(0.1)

    def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # -- questions ----------------------------------------------------------------------------------------------

    def query(self, expr: str, at: float | None = None) -> list[Series]:
        """Return the value of each series of a vector now, or at a time.

        Raises:
            ValueError: Prometheus refuses the query; with its reason.
        """
        result = self._ask("query", query=expr, **({} if at is None else {"time": at}))
        return _series([(found["metric"], [found["value"]]) for found in result["result"]])

    def query_range(self, expr: str, start: float, end: float, step_s: float) -> list[Series]:
        """Return the values of each series from `start` to `end`, seconds since the epoch.

        Raises:
            ValueError: Prometheus refuses the query; with its reason.
        """
        result = self._ask("query_range", query=expr, start=start, end=end, step=step_s)
        return _series([(found["metric"], found["values"]) for found in result["result"]])

    def label_values(self, label: str, match: str) -> list[str]:
        """Return the values of a label among the series that match."""
        return list(self._ask(f"label/{label}/values", **{"match[]": match}))

    def rule_groups(self) -> list[dict[str, Any]]:
        """Return the groups of rules with how their last evaluation went."""
        return list(self._ask("rules")["groups"])

    def _ask(self, what: str, **arguments: Any) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(json.load(error)["error"]) from None


def _series(found: list[tuple[Mapping[str, str], list[list[Any]]]]) -> list[Series]:
    return [
        Series(
            {name: value for name, value in labels.items() if name != "__name__"},
            [float(at) for at, _ in samples],
            [float(value) for _, value in samples],
        )
        for labels, samples in found
    ]
