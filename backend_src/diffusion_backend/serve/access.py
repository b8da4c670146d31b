"""Which endpoints of the server need a key, and how the key gets to the server without being shown on the way.

Everyone who reaches the server may ask for its health and its models' metadata, and may send requests. The other
endpoints (`RESTRICTABLE`) change the server or tell how it is set up; they are refused without the administrator's key.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diffusion_backend.errors import did_you_mean
from diffusion_backend.serve.errors import ArgumentError

RESTRICTABLE = ("shared-memory", "model-config", "model-repository", "statistics", "trace", "logging")
"""Triton's names of the endpoints that a key can be asked for, and is, unless told otherwise."""

HEADER = "admin-key"
"""The HTTP header that carries the key."""

GRPC_HEADER = f"triton-grpc-protocol-{HEADER}"
"""The gRPC metadata that carries the key; Triton puts the prefix in front."""

KEY_VARIABLE = "ADMIN_KEY"
"""The launcher's environment variable for the key."""

MIN_KEY_LENGTH = 16

_KEY = re.compile(r"[A-Za-z0-9_.~+/-]+")  # without what Triton's command line would take for an end of it: , : =
_ARG_START, _ARG_END = 48, 49  # proc(5): the fields of /proc/PID/stat, the first one being 1


@dataclass(frozen=True)
class Access:
    """The endpoints that need the key, and the key; a random one that only this process knows unless one is given.

    Raises:
        ArgumentError: the key is too short or has characters that Triton cannot take; the text does not hold it.
    """

    apis: tuple[str, ...] = RESTRICTABLE
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def __post_init__(self) -> None:
        _check_key(self.key, "The administrator's key")

    @property
    def http_headers(self) -> dict[str, str]:
        """What an HTTP request needs to reach the restricted endpoints."""
        return {HEADER: self.key}

    @property
    def grpc_metadata(self) -> dict[str, str]:
        """What a gRPC call needs to reach them; `headers` of `tritonclient.grpc`."""
        return {GRPC_HEADER: self.key}

    def arguments(self) -> list[str]:
        """Return the server's arguments."""
        if not self.apis:
            return []
        rule = f"{','.join(self.apis)}:{HEADER}={self.key}"
        return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]


def parse_apis(text: str) -> tuple[str, ...]:
    """Read a list of endpoints such as `statistics,trace`, or `none`.

    Raises:
        ArgumentError: naming what is no such endpoint.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return ()
    for name in names:
        if name not in RESTRICTABLE:
            raise ArgumentError(
                f"{name!r} cannot be restricted{did_you_mean(name, RESTRICTABLE)}. RESTRICTED_APIS can be "
                f"{','.join(RESTRICTABLE)} or some of them, or none"
            )
    return tuple(dict.fromkeys(names)) or RESTRICTABLE


def read_key(environment: Mapping[str, str], key_file: Path | None) -> str | None:
    """Return the key from a file or, where none is given, from the environment; None if neither has one.

    Raises:
        ArgumentError: the file cannot be read, is empty, or can be read by others than its owner and group; or the key
            is none that `Access` takes. The text names the file or the variable.
    """
    if key_file is None:
        if key := environment.get(KEY_VARIABLE, ""):
            _check_key(key, f"The key in {KEY_VARIABLE}")
        return key or None
    try:
        mode = key_file.stat().st_mode
        key = key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"The key's file {key_file} cannot be read: {error}") from None
    if mode & 0o007:
        raise ArgumentError(f"Everyone on this machine can read the key's file {key_file}. Run: chmod o= {key_file}")
    if not key:
        raise ArgumentError(f"The key's file {key_file} is empty. Make a key: openssl rand -hex 32 > {key_file}")
    _check_key(key, f"The key in the file {key_file}")
    return key


def _check_key(key: str, what: str) -> None:
    """Raise ``ArgumentError`` if a key is too short, or has characters that Triton cannot take.

    Args:
        what: what the key is called where it was set.
    """
    if len(key) < MIN_KEY_LENGTH or not _KEY.fullmatch(key):
        raise ArgumentError(
            f"{what} must be at least {MIN_KEY_LENGTH} characters of A-Z a-z 0-9 _ . ~ + / -. "
            "Make one: openssl rand -hex 32"
        )


def hide(pid: int, secret: str) -> bool:
    """Overwrite a secret in the command line that the system shows of a process; return whether none is left there.

    Triton takes the key from its command line only, which everyone on the machine can read. To be called once the
    process has read its arguments. The caller must be an ancestor of the process, of the same user.
    """
    needle = secret.encode()
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_END))
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            arguments = os.pread(memory.fileno(), end - start, start)
            os.pwrite(memory.fileno(), arguments.replace(needle, b"*" * len(needle)), start)
    with contextlib.suppress(OSError):
        return needle not in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
