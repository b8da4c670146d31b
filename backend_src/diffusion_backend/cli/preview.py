"""What a pipeline takes and gives, told from its class alone: no weights are loaded."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import did_you_mean
from ..request import DiffusionRequest
from .console import CommandError

_NO_ARGUMENTS = frozenset({"request_id", "seeds", "preview_interval", "priority", "timeout_s", "scheduler"})
_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(DiffusionRequest)
    if field.name not in _NO_ARGUMENTS | {"prompt", "extra_args"}
)
"""What a request can set of a pipeline's arguments."""

_OUTPUTS = {
    "images": "image",
    "image": "image",
    "frames": "video",
    "videos": "video",
    "video": "video",
    "audios": "audio",
    "audio": "audio",
}
_BY_ARGUMENT = {
    "num_images_per_prompt": "image",
    "num_videos_per_prompt": "video",
    "num_waveforms_per_prompt": "audio",
}
MODALITIES = ("image", "video", "audio")


@dataclass(frozen=True, slots=True)
class Preview:
    """What a class tells of itself.

    Attributes:
        pipeline: name of the class.
        inputs: of requests that it takes, by their names in the contract.
        further: arguments that `extra_args` may set.
        required: arguments without a default, besides the prompt.
        unfulfilled: those of `required` that no request can give: videos, embeddings and the like.
        outputs: those of `image`, `video`, `audio` that it makes; empty where that is known only once it runs.
    """

    pipeline: str
    inputs: tuple[str, ...]
    further: tuple[str, ...]
    required: tuple[str, ...]
    unfulfilled: tuple[str, ...]
    outputs: tuple[str, ...]


def preview(index: Mapping[str, Any]) -> Preview:
    """Look at the class that a model_index.json names.

    Raises:
        CommandError: the installed diffusers has no such class, or lacks what it needs.
    """
    from ..pipelines.extra_args import OUTPUTS_PER_PROMPT, carries

    cls = pipeline_class(index)
    parameters = call_parameters(cls)
    inputs = ["prompt"]
    for name in _FIELDS:
        names = OUTPUTS_PER_PROMPT if name == "num_outputs_per_prompt" else (name,)
        if parameters.keys() & set(names):
            inputs.append(name)
    inputs += ["seed", "output_format", "extra_args"]
    further = {name for name, parameter in parameters.items() if name not in inputs and carries(parameter)}
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n != "prompt"]
    return Preview(
        pipeline=cls.__name__,
        inputs=tuple(inputs),
        further=tuple(sorted(further)),
        required=tuple(required),
        unfulfilled=tuple(name for name in required if name not in inputs and name not in further),
        outputs=outputs_of(cls),
    )


def pipeline_class(index: Mapping[str, Any]) -> type:
    """Return the class of the installed diffusers that a model_index.json names; see `preview`."""
    import diffusers

    name = index["_class_name"]
    if not isinstance(name, str):
        raise CommandError(
            f"this pipeline brings code of its own ({', '.join(map(str, name))}), which is not run; "
            "only the classes of the installed diffusers are served"
        )
    try:
        cls = getattr(diffusers, name, None)
    except Exception as error:  # diffusers imports a class when it is asked for it
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CommandError(f"{name} cannot be imported from diffusers {diffusers.__version__}: {reason[0]}") from None
    if cls is None:
        version = index.get("_diffusers_version")
        made = f" (the pipeline was made with {version})" if version else ""
        raise CommandError(
            f"the installed diffusers {diffusers.__version__} has no class {name!r}{made}: install a newer one"
            + did_you_mean(name, _known())
        )
    # What diffusers puts in the place of a class whose packages are missing.
    missing = getattr(cls, "_backends", None)
    if missing and "_backends" in vars(cls):
        raise CommandError(f"{name} needs the packages {', '.join(missing)}; install what is missing of them")
    if not (inspect.isclass(cls) and issubclass(cls, diffusers.DiffusionPipeline)):
        raise CommandError(f"{name} of diffusers {diffusers.__version__} is no pipeline that can be served")
    return cls


def _known() -> Iterable[str]:
    import diffusers

    return [name for name in dir(diffusers) if name.endswith("Pipeline") and "Modular" not in name]


def call_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a class's call."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(cls.__call__).parameters
    return {name: p for name, p in parameters.items() if name != "self" and p.kind not in variadic}


def outputs_of(cls: type) -> tuple[str, ...]:
    """Return what a pipeline class makes: told by the output class that its call returns, else by its arguments."""
    from diffusers.utils import BaseOutput

    call = inspect.unwrap(cls.__call__)
    code, names = getattr(call, "__code__", None), getattr(call, "__globals__", {})
    made: set[str] = set()
    for name in code.co_names if code is not None else ():
        value = names.get(name)
        if inspect.isclass(value) and issubclass(value, BaseOutput):
            made |= {_OUTPUTS[field] for field in getattr(value, "__dataclass_fields__", {}) if field in _OUTPUTS}
    if not made:
        made = {_BY_ARGUMENT[name] for name in call_parameters(cls) if name in _BY_ARGUMENT}
    return tuple(modality for modality in MODALITIES if modality in made)
