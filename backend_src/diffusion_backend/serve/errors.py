"""What can go wrong while serving; every message says what to do about it.

ServeError
├── SetupError        this machine or this Python cannot run the server
├── RepositoryError   the model repository is missing, empty or not a folder
├── ArgumentError     an argument that cannot be used, or that the launcher itself sets
├── PortError         an address cannot be listened on
├── LoadError         no model loaded (or not every one, where every one must)
├── ServerExitError   the server ended when nobody had asked it to
└── ReadyTimeoutError the server was not ready in time
"""

from __future__ import annotations


class ServeError(RuntimeError):
    """The server cannot be started or kept; the message names the remedy."""


class SetupError(ServeError):
    """This machine or this Python cannot run the embedded server."""


class RepositoryError(ServeError):
    """The model repository is missing, empty or not a folder."""


class ArgumentError(ServeError):
    """An argument cannot be used, or collides with one that the launcher sets."""


class PortError(ServeError):
    """An address cannot be listened on."""


class LoadError(ServeError):
    """No model loaded, or not every model where every one must."""


class ServerExitError(ServeError):
    """The server ended when nobody had asked it to."""


class ReadyTimeoutError(ServeError):
    """The server was not ready within the time allowed."""
