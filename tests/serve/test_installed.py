"""A server that is installed on the machine, as in NVIDIA's images, in place of the one of the wheel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diffusion_backend.serve import SetupError, TritonServer, layout
from tests.serve.conftest import Repository


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The wheel's server, laid out as in NVIDIA's images."""
    package = layout.find_wheel()
    root = tmp_path / "tritonserver"
    backend = root / "backends" / "python"
    backend.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin" / "tritonserver").symlink_to(package / "tritonserver" / "bin" / "tritonserver")
    for source in (package / "tritonserver" / "backends" / "python").glob("*.*"):
        (backend / source.name).symlink_to(source)
    (backend / layout.STUB_NAME).symlink_to(layout.find_stub(package, layout.python_minor()))
    return root


def test_it_is_used_without_the_wheel_and_its_checks(installed, monkeypatch):
    def missing() -> Path:
        raise AssertionError("the wheel was looked for")

    monkeypatch.setattr(layout, "find_wheel", missing)
    monkeypatch.setattr(layout, "find_libpython", missing)
    monkeypatch.setattr(layout.importlib.metadata, "version", lambda name: "2.1.0")
    made = layout.make_layout(str(installed))
    made.remove()
    assert made.binary == installed / "bin" / "tritonserver"
    assert made.backend_dir == installed / "backends"
    assert made.environment({"LD_LIBRARY_PATH": "/cuda"}, grpc_endpoint="h:1")["LD_LIBRARY_PATH"] == "/cuda"


def test_it_serves(installed, tmp_path):
    repository = Repository(tmp_path / "repository")
    repository.add_echo()
    # In NVIDIA's images the libraries are where the loader finds them; here the launcher would have found this one.
    env = os.environ | {
        layout.SERVER_DIR_VARIABLE: str(installed),
        "LD_LIBRARY_PATH": str(layout.find_libpython().parent),
    }
    with TritonServer(repository.path, env=env) as server:
        assert [model.is_ready for model in server.wait_ready()] == [True]
        command = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
        assert command[0] == str(installed / "bin" / "tritonserver")
        assert f"--backend-directory={installed / 'backends'}" in command
        assert server.drain()


@pytest.mark.parametrize("part", ["bin/tritonserver", f"backends/python/{layout.STUB_NAME}"])
def test_a_folder_without_a_part_is_refused_by_name(installed, part):
    (installed / part).unlink()
    with pytest.raises(SetupError, match=rf"TRITON_SERVER_DIR is {installed}, but there is no {installed / part}\."):
        layout.make_layout(str(installed))


def test_a_stub_for_another_python_is_refused(installed):
    other = "3.12" if layout.python_minor() == "3.11" else "3.11"
    stub = installed / "backends" / "python" / layout.STUB_NAME
    stub.unlink()
    stub.symlink_to(layout.find_stub(layout.find_wheel(), other))
    with pytest.raises(SetupError, match=rf"is built for Python {other}, and this is {layout.python_minor()} "):
        layout.make_layout(str(installed))
