"""Lay out what a tritonserver needs: its backend folder, libraries and environment.

The server comes with the ``nvidia-pytriton`` wheel. It looks for ``<backend directory>/python``, which must hold the
Python backend and the stub of the running Python's minor version; the wheel keeps them in two places, so a temporary
folder of links brings them together. The stub is linked against ``libpython3.x.so.1.0``, which is found here, too.

Where ``TRITON_SERVER_DIR`` names an installed server instead, such as ``/opt/tritonserver`` in NVIDIA's images, that
one runs with its own backends and its own libraries, and the wheel is not needed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diffusion_backend.serve.errors import SetupError

STUB_NAME = "triton_python_backend_stub"
"""File name of the process in which the server runs one instance of a Python model."""

SERVER_DIR_VARIABLE = "TRITON_SERVER_DIR"
"""Environment variable that names the folder of an installed server, which then takes the place of the wheel's."""

STOP_VARIABLE = "DIFFUSION_STOP_FIFO"
"""The environment variable that names `Layout.stop_fifo` to the models."""

_STOP_NAME = "stop"

MIN_GLIBC = (2, 35)
"""The server in the wheel is built against this version of the C library."""


@dataclass(frozen=True)
class Layout:
    """Where the server and its parts lie.

    Attributes:
        root: temporary folder that holds the links, empty for an installed server; whoever made the layout removes it
            after the server's end.
        binary: the tritonserver executable.
        backend_dir: folder for ``--backend-directory``.
        library_dirs: folders that the server's ``LD_LIBRARY_PATH`` must begin with.
        python_dir: folder that the server's ``PATH`` must begin with, so that the stub finds this Python.
    """

    root: Path
    binary: Path
    backend_dir: Path
    library_dirs: tuple[Path, ...]
    python_dir: Path

    @property
    def stop_fifo(self) -> Path:
        """The named pipe on which the models wait to be told that the time of their running requests is up."""
        return self.root / _STOP_NAME

    def environment(self, base: Mapping[str, str], *, grpc_endpoint: str) -> dict[str, str]:
        """Return ``base`` with what the server and its stubs need.

        Args:
            base: the environment to start from.
            grpc_endpoint: ``host:port`` at which the unary models reach this server.
        """
        env = dict(base)
        env["DIFFUSION_GRPC_ENDPOINT"] = grpc_endpoint
        env[STOP_VARIABLE] = str(self.stop_fifo)
        # Threads of PyTorch that wait for each other sleep: spinning, they starve whoever shares the processors.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        env["PATH"] = _joined([self.python_dir], base.get("PATH", os.defpath))
        env["LD_LIBRARY_PATH"] = _joined(self.library_dirs, base.get("LD_LIBRARY_PATH", ""))
        return env

    def remove(self) -> None:
        """Remove the temporary folder; may be called again."""
        shutil.rmtree(self.root, ignore_errors=True)


def make_layout(server_dir: str = "") -> Layout:
    """Check this machine and lay out the server in a new temporary folder.

    Args:
        server_dir: folder of an installed server, as ``TRITON_SERVER_DIR`` names it; "" takes the wheel's.

    Raises:
        SetupError: if something is missing here; the message names the remedy.
    """
    python_dir = Path(sys.executable).parent
    if not (python_dir / "python3").exists():
        raise SetupError(
            f"There is no 'python3' beside {sys.executable}, and the server finds this Python by that name. "
            "Make the virtual environment anew: make clean setup"
        )
    return _installed_layout(Path(server_dir), python_dir) if server_dir else _wheel_layout(python_dir)


def _installed_layout(server: Path, python_dir: Path) -> Layout:
    """Lay out an installed server, which has its libraries and all its backends in place."""
    binary = server / "bin" / "tritonserver"
    stub = server / "backends" / "python" / STUB_NAME
    for part in (binary, stub):
        if not part.is_file():
            raise SetupError(
                f"{SERVER_DIR_VARIABLE} is {server}, but there is no {part}. Name the folder of a Triton server with "
                "its Python backend (/opt/tritonserver in NVIDIA's images), or unset it for the one of nvidia-pytriton."
            )
    check_stub(stub)
    return Layout(
        root=_make_root(), binary=binary, backend_dir=server / "backends", library_dirs=(), python_dir=python_dir
    )


def _wheel_layout(python_dir: Path) -> Layout:
    """Lay out the server of the wheel."""
    check_glibc(glibc_version())
    check_numpy(importlib.metadata.version("numpy"))
    package = find_wheel()
    stub = find_stub(package, python_minor())
    libpython = find_libpython()
    root = _make_root()
    try:
        backend = root / "backends" / "python"
        backend.mkdir(parents=True)
        for source in (package / "tritonserver" / "backends" / "python").iterdir():
            (backend / source.name).symlink_to(source)
        link = backend / STUB_NAME
        link.unlink(missing_ok=True)
        link.symlink_to(stub)
        # A folder with this one library, because Python's own library folder may hold others (conda's libstdc++, say)
        # that would take the place of the ones the server was built with.
        libraries = root / "lib"
        libraries.mkdir()
        (libraries / libpython.name).symlink_to(libpython)
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise SetupError(f"Cannot lay out the server in {root}: {error}. Set TMPDIR to a writable folder.") from error
    return Layout(
        root=root,
        binary=package / "tritonserver" / "bin" / "tritonserver",
        backend_dir=root / "backends",
        library_dirs=(package.parent / "nvidia_pytriton.libs", libraries),
        python_dir=python_dir,
    )


def _make_root() -> Path:
    """Make the temporary folder, with the named pipe in it."""
    root: Path | None = None
    try:
        root = Path(tempfile.mkdtemp(prefix="diffusion_backend_"))
        os.mkfifo(root / _STOP_NAME)
    except OSError as error:
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
        raise SetupError(f"Cannot make a temporary folder: {error}. Set TMPDIR to a writable folder.") from error
    return root


def find_wheel() -> Path:
    """Return the folder of the installed ``pytriton`` package, which holds the server; does not import it."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError(
            "The package nvidia-pytriton, which brings the Triton server, is not installed in "
            f"{sys.prefix}. Install what the lock lists: make setup. Or name an installed server: "
            f"{SERVER_DIR_VARIABLE}=/opt/tritonserver"
        )
    package = Path(spec.submodule_search_locations[0])
    if not (package / "tritonserver" / "bin" / "tritonserver").is_file():
        raise SetupError(
            f"The pytriton package in {package} has no Triton server inside: only wheels for Linux bring it. "
            "Reinstall it as a wheel: pip install --force-reinstall --only-binary :all: nvidia-pytriton==0.7.0"
        )
    return package


def find_stub(package: Path, minor: str) -> Path:
    """Return the stub for Python ``minor`` (such as "3.11") in the wheel's ``package`` folder."""
    stubs = package / "tritonserver" / "python_backend_stubs"
    stub = stubs / minor / STUB_NAME
    if not stub.is_file():
        there = sorted((path.name for path in stubs.glob("3.*")), key=lambda name: int(name.split(".")[1]))
        raise SetupError(
            f"The Triton server has no stub for Python {minor}; it has them for {', '.join(there)}. "
            "Make the virtual environment with one of those: make clean setup PYTHON=python3.11"
        )
    return stub


def check_stub(stub: Path) -> None:
    """Raise ``SetupError`` if an installed server's stub is linked against another Python than the running one."""
    linked = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    minor = linked[1].decode() if linked else python_minor()
    if minor != python_minor():
        raise SetupError(
            f"The Python backend in {stub.parent} is built for Python {minor}, and this is {python_minor()} "
            f"({sys.executable}). Install this package for Python {minor}, or unset {SERVER_DIR_VARIABLE}."
        )


def find_libpython(folders: Iterable[Path] | None = None) -> Path:
    """Return the shared library of the running Python, which the stub is linked against.

    Args:
        folders: where to look; the places where builds of Python put it, unless given.
    """
    name = f"libpython{python_minor()}.so.1.0"
    places = list(libpython_folders() if folders is None else folders)
    for folder in places:
        if (folder / name).is_file():
            return folder / name
    raise SetupError(
        f"{name} was not found: this Python ({sys.executable}) was built without its shared library, which the "
        "server's Python stub needs. Install it:\n"
        f"  Debian, Ubuntu:  apt-get install libpython{python_minor()}\n"
        f"  Fedora, RHEL:    dnf install python{python_minor()}-libs\n"
        f"  pyenv:           PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force {python_minor()}\n"
        f"  uv:              uv python install {python_minor()}   (uv's builds bring it)\n"
        f"Looked in: {', '.join(str(folder) for folder in places)}"
    )


def libpython_folders() -> list[Path]:
    """Return the folders in which builds of Python put their shared library, the most fitting first."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    folders: list[Path] = []
    for variable in ("LIBDIR", "LIBPL"):
        value = sysconfig.get_config_var(variable)
        if value:
            folders += [Path(value), Path(value) / multiarch]
    folders += [Path(sys.base_prefix) / "lib", Path(sys.base_prefix) / "lib64"]
    folders += [Path("/usr/lib") / multiarch, Path("/usr/lib64"), Path("/usr/lib"), Path("/usr/local/lib")]
    return list(dict.fromkeys(folders))


def check_glibc(version: tuple[int, int] | None) -> None:
    """Raise ``SetupError`` unless the C library is new enough; ``None`` means that there is no glibc here."""
    needed = ".".join(map(str, MIN_GLIBC))
    if version is None:
        raise SetupError(
            f"The Triton server needs Linux with glibc {needed} or later (no musl, no macOS). "
            "Use a machine with it, or a container of NVIDIA's tritonserver"
        )
    if version < MIN_GLIBC:
        raise SetupError(
            f"glibc {version[0]}.{version[1]} is too old: the Triton server needs {needed} or later (Ubuntu 22.04, "
            "Debian 12, RHEL 10 or later). On this machine use a container of NVIDIA's tritonserver"
        )


def check_numpy(version: str) -> None:
    """Raise ``SetupError`` for numpy 2 or later: text inputs crash this server's stub with it."""
    if int(version.split(".")[0]) >= 2:
        raise SetupError(
            f"numpy {version} is installed, and text inputs crash this Triton server's stub with numpy 2. "
            'Install what the lock lists (make setup), or: pip install "numpy<2"'
        )


def glibc_version() -> tuple[int, int] | None:
    """Return the version of the running C library, ``None`` where it is not glibc."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, ValueError, OSError):
        return None
    if name != "glibc":
        return None
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def python_minor() -> str:
    """Return the running Python's minor version, such as "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _joined(folders: Iterable[Path], rest: str) -> str:
    return os.pathsep.join([*(str(folder) for folder in folders), *([rest] if rest else [])])
