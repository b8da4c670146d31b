"""LoRA adapters: which a request may ask for, and which are in force in the modules that all requests share.

The active adapters are state of the shared modules. The executor therefore calls `Adapters.use` before anything of a
request runs, and puts the request's selection into the key by which calls meet: calls with different selections never
share a forward. Without adapters in force the layers call the base layers and nothing else.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import InvalidArgumentError, ModelLoadError, ServerError, did_you_mean, without_paths
from .roots import check_hub, check_path

MAX_WEIGHT = 10.0
"""Largest weight of an adapter, of either sign."""

MAX_FILES = 32
"""Adapters from under `lora_root` that are kept in memory; of more, the one not used for longest is dropped."""

_WEIGHTS = "pytorch_lora_weights.safetensors"  # what `save_lora_weights` calls its file
_SUFFIX = ".safetensors"
_SCALED = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")


class AdapterFile(NamedTuple):
    """A file under `lora_root`. One that was written anew is another adapter."""

    path: str
    mtime_ns: int
    size: int


Selection = tuple[tuple[str | AdapterFile, float], ...]
"""Adapters, by registered name or by file, and their weights; in one order, so that equal selections are equal."""


def select(
    lora: Sequence[tuple[str, float]], names: Sequence[str], root: Path | None, *, request_id: str = ""
) -> Selection:
    """Return the adapters that a request asks for; called before it queues, by any thread, and when it starts.

    Args:
        lora: names or paths (relative ones start at `root`), and weights.
        names: of the registered adapters.
        root: the folder, resolved, that paths must lie in; None where paths are not allowed.

    Raises:
        InvalidArgumentError: naming the entry and what is allowed.
    """

    def refuse(problem: str) -> InvalidArgumentError:
        return InvalidArgumentError("lora", problem, request_id=request_id)

    chosen: dict[str | AdapterFile, float] = {}
    for name, weight in lora:
        if not (math.isfinite(weight) and abs(weight) <= MAX_WEIGHT):
            raise refuse(f"the weight {weight:g} of {name!r} is not allowed; it must be from {-MAX_WEIGHT:g} to 10")
        key: str | AdapterFile
        if name in names:
            key = name
        elif not names and root is None:
            raise refuse(f"{name!r} is not allowed: this model has no adapters; leave it out")
        elif root is None:
            raise refuse(f"there is no adapter {name!r}{did_you_mean(name, names)} ({_allowed(names, root)})")
        else:
            file = _find(name, root)
            if isinstance(file, str):
                raise refuse(f"{name!r} {file}{did_you_mean(name, names)} ({_allowed(names, root)})")
            key = file
        if key in chosen:
            raise refuse(f"{name!r} is there twice; give it once, with the weight that it is to have")
        chosen[key] = float(weight)
    return tuple(sorted(chosen.items(), key=lambda item: str(item[0])))


def check_arguments(extra_args: Mapping[str, Any], *, request_id: str = "") -> None:
    """Refuse the pipelines' own scale of adapters, for a model that has some.

    It rescales the shared layers' weights and back, which leaves rounding errors, and with 0 the weight 1, to others.

    Raises:
        InvalidArgumentError: naming the argument.
    """
    for name in _SCALED:
        value = extra_args.get(name)
        if isinstance(value, dict) and "scale" in value:
            problem = f"'scale' in {name!r} is not allowed; give the adapter's weight in lora, as 'name:0.5'"
            raise InvalidArgumentError("extra_args", problem, request_id=request_id)


def _allowed(names: Sequence[str], root: Path | None) -> str:
    paths = f"the path of a {_SUFFIX} file under the model's lora_root"
    return f"allowed are {', '.join([*names, *([] if root is None else [paths])])}"


def _find(name: str, root: Path) -> AdapterFile | str:
    """Return the file that `name` stands for, or what is wrong with it."""
    try:
        path = (root / name).resolve()
        if path.is_relative_to(root) and path.is_dir():
            path = (path / _WEIGHTS).resolve()  # which may be a link again
        if not path.is_relative_to(root):
            return "is not under the folder of adapters"
        if path.suffix != _SUFFIX or not path.is_file():
            return f"is neither the name of an adapter nor a {_SUFFIX} file in the folder of adapters"
        return _identity(path)
    except (OSError, ValueError, RuntimeError):  # a name too long, a NUL in it, a loop of links
        return "is no path that can be read"


def _identity(path: Path) -> AdapterFile:
    status = path.stat()
    return AdapterFile(str(path), status.st_mtime_ns, status.st_size)


class Adapters:
    """The adapters of one loaded pipeline.

    Made, and `load_registered` called, by the thread that loads the model; everything else by the engine thread.

    Args:
        pipeline: of the kind that takes LoRA weights.
        registered: sources by name: a file or folder (relative ones start at `base`), `owner/name` of the hub, or
            `owner/name/file.safetensors`.
        root: the folder that requests may name files of; None for none.
        base: the model's folder.

    Raises:
        ModelLoadError: the pipeline takes no LoRA weights, or `root` is no folder.
    """

    def __init__(
        self, pipeline: Any, registered: Mapping[str, str], *, root: str | None = None, base: Path | None = None
    ) -> None:
        if not (hasattr(pipeline, "load_lora_weights") and hasattr(pipeline, "set_adapters")):
            raise ModelLoadError(
                f"{type(pipeline).__name__} takes no LoRA adapters; remove the parameters loras and lora_root"
            )
        self._pipeline = pipeline
        self._registered = dict(registered)
        self._base = base
        self.root = None if root is None else _local(root, base).resolve()
        if self.root is not None and not self.root.is_dir():
            raise ModelLoadError(f"lora_root: there is no folder {root!r}; a relative one starts at the model's folder")
        if self.root is not None:
            check_path(self.root, "lora_root", links=False)  # `_find` refuses those that lead out
        self._loaded: OrderedDict[str | AdapterFile, str] = OrderedDict()  # the name that each has in the modules
        self._current: Selection | None = ()  # None: not known, as something failed half-way
        self._num_loads = 0
        self._damage: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names."""
        return tuple(self._registered)

    def load_registered(self) -> None:
        """Load all registered adapters, and leave none of them in force.

        Raises:
            ModelLoadError: one cannot be loaded, with the reason.
        """
        for name, source in self._registered.items():
            where, options = _source(name, source, self._base)
            try:
                self._load(name, where, options)
            except Exception as error:
                raise ModelLoadError(
                    f"loras: cannot load the adapter {name!r} from {source!r}: {_line(error)}"
                ) from error
        self.use(())

    def select(self, lora: Sequence[tuple[str, float]], *, request_id: str = "") -> Selection:
        """Return the adapters that a request asks for; see the function of the same name."""
        return select(lora, self.names, self.root, request_id=request_id)

    def use(self, selection: Selection) -> None:
        """Put these adapters, and no others, in force; does nothing if they are. Loads files that are not loaded.

        Raises:
            InvalidArgumentError: a file does not hold an adapter for this pipeline.
        """
        if self._damage is not None:
            raise ServerError(self._damage)
        if selection == self._current:
            return
        for key, _ in selection:
            if key not in self._loaded:
                self._load_file(key)
        self._current = None
        if selection:
            self._pipeline.set_adapters([self._loaded[key] for key, _ in selection], [w for _, w in selection])
            self._pipeline.enable_lora()
            for key, _ in selection:
                self._loaded.move_to_end(key)
        elif self._num_loads:
            self._pipeline.disable_lora()
        self._current = selection
        self._drop({key for key, _ in selection})

    def _load_file(self, key: str | AdapterFile) -> None:
        assert isinstance(key, AdapterFile), "registered adapters are loaded at load"
        try:
            if _identity(Path(key.path)) != key:
                raise OSError("the file has changed since the request came; send it again")
            self._load(key, key.path, {})
        except (MemoryError, torch.OutOfMemoryError, ServerError):
            raise
        except Exception as error:
            name = Path(key.path).name
            problem = f"{name!r} does not work with {type(self._pipeline).__name__}: {without_paths(_line(error))}"
            raise InvalidArgumentError("lora", problem) from error

    def _load(self, key: str | AdapterFile, source: str, options: dict[str, str]) -> None:
        """Load an adapter into the modules; if that fails, nothing of it is left there."""
        inside = f"adapter{self._num_loads:06d}"  # the layers keep adapters by names without dots
        self._num_loads += 1
        self._current = None  # a new adapter is in force at once
        before = self._weights(inside)
        # Several adapters are what is wanted. (Not with `catch_warnings`, which is not for a process with threads.)
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute", category=UserWarning)
        try:
            self._check_weights(source, options)
            with _meeting_points_kept(self._pipeline):
                self._pipeline.load_lora_weights(source, adapter_name=inside, use_safetensors=True, **options)
            if not any(inside in names for names in self._pipeline.get_list_adapters().values()):
                raise ValueError(f"it has no weights for any of {', '.join(self._pipeline._lora_loadable_modules)}")
        except Exception:
            self._delete(inside)
            raise
        finally:
            if not _same_weights(before, self._weights(inside)):
                self._damage = "an adapter has changed the model's or others' weights; load the model again without it"
        if self._damage is not None:
            raise ServerError(self._damage)
        for module in self._modules():
            module.train(module.training)  # new layers (dropout among them) come in training mode
        self._loaded[key] = inside

    def _check_weights(self, source: str, options: dict[str, str]) -> None:
        """Refuse what would change the model itself: normalisations, biases, wider inputs, fused projections."""
        weights = self._pipeline.lora_state_dict(source, use_safetensors=True, **options)
        weights = weights[0] if isinstance(weights, tuple) else weights
        for key, weight in weights.items():
            if not ("lora" in key or key.endswith(".alpha")) or "lokr_" in key or "lora_controlnet" in key:
                raise ValueError(f"{key!r} is no LoRA weight")
            component, _, path = key.partition(".")
            path, found, _ = path.partition(".lora_A.")
            module = getattr(self._pipeline, component, None)
            if not found or not isinstance(module, torch.nn.Module):
                continue
            try:
                width = getattr(module.get_submodule(path), "in_features", None)
            except AttributeError:
                continue
            if isinstance(width, int) and weight.shape[1] > width:
                raise ValueError(f"{key!r} is for {weight.shape[1]} inputs; the model's layer has {width}")

    def _drop(self, keep: set[str | AdapterFile]) -> None:
        """Delete the files' adapters that are too many; those in force stay."""
        files = [key for key in self._loaded if isinstance(key, AdapterFile)]
        for key in [key for key in files if key not in keep][: max(0, len(files) - MAX_FILES)]:
            self._delete(self._loaded.pop(key))

    def _delete(self, inside: str) -> None:
        """Delete an adapter from the modules, as far as it is there."""
        for module in self._modules():
            for layer in module.modules():
                active = getattr(layer, "active_adapters", None)  # a list of peft's layers; transformers has a method
                if isinstance(active, list) and inside in active:
                    layer.set_adapter([])  # else peft makes another adapter active, and warns
            if inside in getattr(module, "peft_config", {}):
                self._pipeline.delete_adapters([inside])

    def _modules(self) -> list[Any]:
        found = (getattr(self._pipeline, name, None) for name in self._pipeline._lora_loadable_modules)
        return [module for module in found if isinstance(module, torch.nn.Module)]

    def _weights(self, inside: str) -> dict[int, tuple[torch.Tensor, int, torch.Size]]:
        """Return each weight but those of one adapter, its version (which every change in place raises) and shape."""
        return {
            id(weight): (weight, weight._version, weight.shape)
            for module in self._modules()
            for name, weight in module.named_parameters()
            if inside not in name
        }


def _same_weights(one: dict[int, Any], two: dict[int, Any]) -> bool:
    return one.keys() == two.keys() and all(a[1:] == b[1:] for a, b in zip(one.values(), two.values(), strict=True))


@contextmanager
def _meeting_points_kept(pipeline: Any) -> Iterator[None]:
    """Put the components' own `forward` and `decode` back: with offloading, loading takes hooks out and in again."""
    kept = [
        (component, name, vars(component)[name])
        for component in pipeline.components.values()
        if isinstance(component, torch.nn.Module)
        for name in ("forward", "decode")
        if name in vars(component)
    ]
    try:
        yield
    finally:
        for component, name, function in kept:
            setattr(component, name, function)


def _local(path: str, base: Path | None) -> Path:
    given = Path(path).expanduser()
    return base / given if base is not None and not given.is_absolute() else given


def _source(name: str, source: str, base: Path | None) -> tuple[str, dict[str, str]]:
    """Return what `load_lora_weights` takes: a file or folder that exists, or a hub id (and the file's name)."""
    path = _local(source, base)
    if path.exists():
        check_path(path, "loras")
        return str(path.resolve()), {}
    parts = source.split("/", 2)
    if source.startswith((".", "/", "~")) or len(parts) < 2 or (len(parts) == 3 and not source.endswith(_SUFFIX)):
        raise ModelLoadError(
            f"loras: the adapter {name!r} has the source {source!r}, which is neither a file or folder that exists nor "
            f"owner/name or owner/name/file{_SUFFIX} of the hub; a relative path starts at the model's folder"
        )
    check_hub(source, "loras")
    return "/".join(parts[:2]), {"weight_name": parts[2]} if len(parts) == 3 else {}


def _line(error: BaseException) -> str:
    """Return the first line of an error that says something."""
    while isinstance(error, KeyError) and error.__context__ is not None:
        error = error.__context__  # raised while diffusers cleaned up after the true cause
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}{': ' + line if line else ''}"
