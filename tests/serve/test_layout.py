"""Laying out the server, and what is said where a machine cannot run it."""

from __future__ import annotations

import os
import sys

import pytest

from diffusion_backend.serve import SetupError, layout


def test_layout_brings_backend_and_stub_together_and_is_removed():
    made = layout.make_layout()
    try:
        backend = made.backend_dir / "python"
        for name in ("libtriton_python.so", "triton_python_backend_utils.py", layout.STUB_NAME):
            assert (backend / name).is_file()
        assert layout.python_minor() in os.fspath((backend / layout.STUB_NAME).resolve())
        assert os.access(made.binary, os.X_OK)
        assert all(folder.is_dir() for folder in made.library_dirs)
        assert [path.name for path in made.library_dirs[1].iterdir()] == [f"libpython{layout.python_minor()}.so.1.0"]
    finally:
        made.remove()
    assert not made.root.exists()
    made.remove()


def test_a_folder_that_cannot_be_made_is_told_and_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(SetupError, match=r"Cannot make a temporary folder.* Set TMPDIR"):
        layout.make_layout()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def refuse(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("os.mkfifo", refuse)
    with pytest.raises(SetupError, match="Operation not permitted"):
        layout.make_layout()
    assert list(tmp_path.iterdir()) == []


def test_environment_puts_search_paths_in_front_and_keeps_the_rest():
    made = layout.make_layout()
    made.remove()
    env = made.environment(
        {"PATH": "/bin", "LD_LIBRARY_PATH": "/cuda", "HF_HOME": "/models"}, grpc_endpoint="127.0.0.1:9"
    )
    assert env["PATH"] == f"{os.path.dirname(sys.executable)}:/bin"
    assert env["LD_LIBRARY_PATH"] == ":".join([*map(str, made.library_dirs), "/cuda"])
    assert env["HF_HOME"] == "/models"
    assert made.environment({}, grpc_endpoint="h:1")["LD_LIBRARY_PATH"] == ":".join(map(str, made.library_dirs))


def test_missing_libpython_names_the_package_of_each_distribution(tmp_path):
    with pytest.raises(SetupError) as caught:
        layout.find_libpython([tmp_path])
    minor = layout.python_minor()
    for remedy in (f"apt-get install libpython{minor}\n", "--enable-shared", "uv python install", str(tmp_path)):
        assert remedy in str(caught.value)


def test_libpython_is_looked_for_in_order(tmp_path):
    name = f"libpython{layout.python_minor()}.so.1.0"
    for folder in ("b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    assert layout.find_libpython(tmp_path / folder for folder in "abc") == tmp_path / "b" / name


def test_missing_libpython_stops_the_layout(monkeypatch, tmp_path):
    monkeypatch.setattr(layout, "libpython_folders", lambda: [tmp_path])
    with pytest.raises(SetupError, match="was built without its shared library"):
        layout.make_layout()


@pytest.mark.parametrize(
    ("version", "complaint"),
    [(None, "needs Linux with glibc"), ((2, 31), r"glibc 2\.31 is too old"), ((2, 4), r"glibc 2\.4 is too old")],
)
def test_unfit_c_library_is_refused(version, complaint):
    with pytest.raises(SetupError, match=complaint):
        layout.check_glibc(version)


def test_fit_c_library_and_numpy_pass():
    layout.check_glibc((2, 35))
    layout.check_glibc((3, 0))
    layout.check_numpy("1.26.4")


def test_numpy_2_is_refused():
    with pytest.raises(SetupError, match=r"numpy 2\.1\.0 .*crash"):
        layout.check_numpy("2.1.0")


def test_python_without_a_stub_is_told_which_have_one(tmp_path):
    for minor in ("3.9", "3.10"):
        folder = tmp_path / "tritonserver" / "python_backend_stubs" / minor
        folder.mkdir(parents=True)
        (folder / layout.STUB_NAME).touch()
    with pytest.raises(SetupError, match=r"no stub for Python 3\.99; it has them for 3\.9, 3\.10\."):
        layout.find_stub(tmp_path, "3.99")
    assert layout.find_stub(tmp_path, "3.9").parent.name == "3.9"


def test_missing_wheel_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"nvidia-pytriton.*make setup"):
        layout.find_wheel()
