"""What the compose files say, as Docker Compose reads them; needs no engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffusion_backend.serve.drain import OVERTIME_S
from tests.deploy.stack import ROOT, compose_command, run

SERVICES = ("triton", "replica", "balancer", "tls", "prometheus", "grafana")
OVERLAY = ("docker-compose.yml", "docker-compose.override.yml")


@cache
def read(*files: str, **settings: str) -> dict[str, Any]:
    """Return the services as Compose puts them together from these files."""
    command = compose_command()
    if command is None:
        pytest.skip("no Docker Compose (Debian: apt-get install docker-compose)")
    chosen = [word for name in files for word in ("--file", name)]
    return yaml.safe_load(run([*command, *chosen, "--profile", "scale", "--profile", "tls", "config"], settings))


def seconds(text: str) -> float:
    """Read a duration such as 1m30s."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text))


def test_every_service_is_locked_down():
    services = read(*OVERLAY)["services"]
    assert set(services) == set(SERVICES)
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert service["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}}, name
        assert not service.get("privileged"), name


def test_ports_are_published_on_this_machine_only_and_never_those_of_metrics():
    services = read(*OVERLAY)["services"]
    ports = {name: [_port(entry) for entry in service.get("ports", [])] for name, service in services.items()}
    assert {host for entries in ports.values() for host, _ in entries} == {"127.0.0.1"}
    assert {name: [target for _, target in entries] for name, entries in ports.items()} == {
        "triton": [8000, 8001],
        "replica": [],
        "balancer": [8080, 8081],
        "tls": [8443, 8444],
        "prometheus": [9090],
        "grafana": [3000],
    }


def _port(entry: Any) -> tuple[str, int]:
    """Return address and container's port of an entry as either version of Compose prints it."""
    if isinstance(entry, dict):
        return entry["host_ip"], int(entry["target"])
    host, _, target = entry.split(":")
    return host, int(target.removesuffix("/tcp"))


def test_the_base_publishes_nothing_and_metrics_have_a_network_without_a_way_out():
    config = read("docker-compose.yml")
    assert not [name for name, service in config["services"].items() if service.get("ports")]
    assert config["networks"]["monitoring"]["internal"] is True
    for name in ("triton", "prometheus", "grafana"):
        assert "monitoring" in config["services"][name]["networks"]


def test_requests_have_time_to_end_before_docker_ends_the_container():
    triton = read(*OVERLAY)["services"]["triton"]
    exit_timeout = float(triton["command"][triton["command"].index("--exit-timeout") + 1])
    assert seconds(triton["stop_grace_period"]) >= exit_timeout + OVERTIME_S + 10


def test_balancer_and_tls_start_only_when_asked_for():
    services = read(*OVERLAY)["services"]
    assert {name: service["profiles"] for name, service in services.items() if "profiles" in service} == {
        "replica": ["scale"],
        "balancer": ["scale"],
        "tls": ["tls"],
    }


def test_the_base_image_is_one_variable():
    triton = read(*OVERLAY)["services"]["triton"]
    assert triton["build"]["args"]["TRITON_IMAGE"] == "nvcr.io/nvidia/tritonserver:26.07-py3"
    changed = read(*OVERLAY, TRITON_IMAGE="example.org/tritonserver:1")["services"]
    assert changed["triton"]["build"]["args"]["TRITON_IMAGE"] == "example.org/tritonserver:1"
    assert changed["replica"]["build"]["args"]["TRITON_IMAGE"] == "example.org/tritonserver:1"


def test_the_gpu_overlay_reserves_devices_for_every_server():
    services = read(*OVERLAY, "docker-compose.gpu.yml", GPU_COUNT="2")["services"]
    for name in ("triton", "replica"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], int(device["count"]), device["capabilities"]) == ("nvidia", 2, ["gpu"])
    assert "resources" not in services["balancer"]["deploy"]


def test_the_folder_of_models_is_mounted_read_only(tmp_path):
    services = read(*OVERLAY, "docker-compose.models.yml", MODELS_DIR=str(tmp_path))["services"]
    for name in ("triton", "replica"):
        assert services[name]["environment"]["MODEL_REPOSITORY"] == "/models/model_repository"
        mounts = [json.dumps(volume) for volume in services[name]["volumes"] if str(tmp_path) in json.dumps(volume)]
        assert len(mounts) == 1
        assert mounts[0].endswith(':ro"') or '"read_only": true' in mounts[0]


def test_docs_name_every_setting():
    """Each variable of the compose files is, with its default, in the table of docs/deploy.md."""
    used: dict[str, str] = {}
    for path in ROOT.glob("docker-compose*.yml"):
        for name, kind, default in re.findall(r"\$\{(\w+):([-?])([^}]*)\}", path.read_text()):
            used[name] = "needed" if kind == "?" else default
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE))
    assert set(rows) == set(used)
    for name, default in used.items():
        shown = rows[name].strip().strip("`")
        assert shown == (default or "none"), name


def run_script(path: str, *arguments: str, folder: Path, **settings: str) -> None:
    """Run a script of deploy/ in a folder that is not the checkout."""
    command = [ROOT / "deploy" / path, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl (Debian: apt-get install openssl)")
def test_a_certificate_is_made_in_the_folder_that_the_caller_means(tmp_path):
    user = f"{os.getuid()}:{os.getgid()}"
    run_script("proxy/make-certificate.sh", "mine", "a.example", folder=tmp_path, PROXY_USER=user)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["ca.pem", "server.pem"]
    assert "BEGIN PRIVATE KEY" in (tmp_path / "mine" / "server.pem").read_text()


def test_wheels_are_collected_in_the_folder_that_the_caller_means(tmp_path):
    """By a Python that notes what pip is asked for, and where: no index is reached."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = - ] && exec {sys.executable} "$@"\n'
        'for last; do :; done\n{ pwd; echo "$@"; cat "$last"; } >"$NOTES"\n'
    )
    python.chmod(0o755)
    notes = tmp_path / "notes"
    run_script("docker/wheelhouse.sh", "wheels", "./python", folder=tmp_path, NOTES=str(notes))
    where, asked, *requirements = notes.read_text().splitlines()
    assert Path(where, asked.split("--dest ")[1].split()[0]) == tmp_path / "wheels"
    assert (tmp_path / "wheels").is_dir()
    assert asked.startswith("-m pip download ")
    assert "setuptools" in requirements
    assert any(line.startswith("diffusers") for line in requirements)
