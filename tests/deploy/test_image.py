"""What is in the image, and what is not."""

from __future__ import annotations

import json

import pytest

from tests.deploy.stack import ROOT, docker


@pytest.fixture(scope="module")
def image(images: dict[str, str]) -> str:
    return images["DIFFUSION_IMAGE"]


def in_image(image: str, program: str, script: str) -> str:
    """Run a script of `sh` or `python3` in a container of the image, as its user."""
    return docker("run", "--rm", "--network", "none", "--entrypoint", program, image, "-c", script)


def test_it_runs_the_base_images_server_with_its_own_packages(image):
    script = "from diffusion_backend.serve.layout import make_layout; print(make_layout('/opt/tritonserver').binary)"
    assert in_image(image, "python3", script).strip() == "/opt/tritonserver/bin/tritonserver"
    assert in_image(image, "sh", "command -v python3").strip() == "/opt/venv/bin/python3"


def test_versions_are_those_of_the_lock(image):
    locked = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        name, equals, version = line.partition("#")[0].strip().partition("==")
        if equals:
            locked[_canonical(name.partition("[")[0])] = version
    script = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    )
    found = json.loads(in_image(image, "python3", script))
    installed = {_canonical(name): version.partition("+")[0] for name, version in found.items()}
    del installed["diffusion-backend"]
    assert {name: locked.get(name) for name in installed} == installed


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def test_nothing_is_in_it_that_the_server_does_not_need(image):
    folders = "/opt/venv/lib/python3*/site-packages /opt/diffusion /opt/diffusion/model_repository"
    names = in_image(image, "sh", f"ls {folders}").split()
    assert {"diffusion_backend", "torch", "health.py", "models", "model_repository", "emoji", "emoji_unary"} <= set(
        names
    )
    assert {"pytriton", "pytest", "mypy", "ruff", "hypothesis", "tests", "tools", "benchmarks"} & set(names) == set()
    left = in_image(image, "sh", "find /wheelhouse /src /dist -type f -size +0 2>/dev/null || true")
    assert left.split() == []


def test_it_runs_as_a_user_that_can_write_only_to_the_cache(image):
    assert in_image(image, "sh", "id -u; id -g").split() == ["1000", "1000"]
    elsewhere = " ".join(f"-not -path '{path}*'" for path in ("/proc", "/dev", "/tmp", "/var/tmp", "/run/lock"))
    writable = in_image(image, "sh", f"find / -xdev -type d -writable {elsewhere} 2>/dev/null || true")
    assert writable.split() == ["/var/cache/diffusion"]


def test_no_secret_is_in_it(image):
    """No variable, label or step of the build holds a key, and no file that came with the sources does."""
    shown = docker("inspect", image) + docker("history", "--no-trunc", image)
    for word in ("HF_TOKEN", "ADMIN_KEY=", "PASSWORD", "PRIVATE KEY"):
        assert word not in shown
    script = "find /opt/diffusion /src /tmp /root -name '*.pem' -o -name '.git' -o -name '.env' 2>/dev/null || true"
    assert in_image(image, "sh", script).strip() == ""
