"""Start, watch and stop the Triton server that comes with the ``nvidia-pytriton`` wheel.

``python -m diffusion_backend.serve`` serves a model repository until Ctrl-C; ``TritonServer`` does the same for tests
and benchmarks. Nothing here runs inside the server.

    layout     where the server's parts lie; checks of this machine
    command    the server's command line
    ports      are the ports free
    keeper     the process between launcher and server that cleans up
    access     which endpoints need a key, and the key
    tls        certificates for gRPC
    process    the server's process: its keeper, its log, its end
    server     the server as an object
    endpoints  what a running server says of itself
    log        the server's log, made readable
    watch      notices when a model's process dies
    drain      ends a server after its requests
    restarts   whether a server that died is started again
    hint       a command to try
    app        the command line of the launcher
"""

from diffusion_backend.serve.access import Access
from diffusion_backend.serve.endpoints import ModelState
from diffusion_backend.serve.errors import (
    ArgumentError,
    LoadError,
    PortError,
    ReadyTimeoutError,
    RepositoryError,
    ServeError,
    ServerExitError,
    SetupError,
)
from diffusion_backend.serve.server import TritonServer
from diffusion_backend.serve.tls import GrpcTls

__all__ = [
    "Access",
    "ArgumentError",
    "GrpcTls",
    "LoadError",
    "ModelState",
    "PortError",
    "ReadyTimeoutError",
    "RepositoryError",
    "ServeError",
    "ServerExitError",
    "SetupError",
    "TritonServer",
]
