"""The engine: who runs when (`scheduler`), the loop (`engine`), what it drives (`executor`), its handles (`handle`).

Nothing here imports torch, diffusers or Triton.
"""

from .engine import DiffusionEngine, EngineConfig
from .executor import Executor, Report, Work, WorkKind
from .handle import RequestHandle
from .scheduler import Group, Scheduler
from .watchdog import EXIT_HUNG, Watchdog, WatchedExecutor

__all__ = [
    "EXIT_HUNG",
    "DiffusionEngine",
    "EngineConfig",
    "Executor",
    "Group",
    "Report",
    "RequestHandle",
    "Scheduler",
    "Watchdog",
    "WatchedExecutor",
    "Work",
    "WorkKind",
]
