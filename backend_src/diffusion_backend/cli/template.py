"""The texts of a model's files; the only place that knows how they look."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf import text_encoding

_STREAMING = """\
# {pipeline}, streaming. Inputs, outputs and the decoupled policy are filled in by the backend.
backend: "python"
max_batch_size: 16

{parameters}

# Requests are batched step by step in the engine. While that has a free slot, Triton hands over what comes, after a
# millisecond in which others may join; the rest waits in its queue, with priorities (1 is served first), a size limit
# and timeouts.
dynamic_batching {{
  max_queue_delay_microseconds: 1000
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: 3600000000
    allow_timeout_override: true
    max_queue_size: 1024
  }}
}}
"""

_UNARY = """\
# {pipeline}, one response a request. Everything is filled in by the backend.
backend: "python"
max_batch_size: 16
dynamic_batching {{ }}
"""

_MODEL = '''\
"""{doc}"""

from diffusion_backend.triton import {kind} as TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

FILES = ("config.pbtxt", "1/model.py")
"""The files of a model, relative to its folder."""


def streaming_files(pipeline: str, parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a streaming model, by their paths in its folder.

    Args:
        pipeline: the name of the `diffusers` class, for the comments.
        parameters: of config.pbtxt, by name.
    """
    lines = "\n".join(
        f'parameters: {{ key: "{_quoted(key)}" value: {{ string_value: "{_quoted(value)}" }} }}'
        for key, value in parameters.items()
    )
    doc = f"{pipeline}, streaming; the parameters are in config.pbtxt."
    return dict(
        zip(
            FILES,
            (
                _STREAMING.format(pipeline=pipeline, parameters=lines),
                _MODEL.format(doc=doc, kind="StreamingModel"),
            ),
            strict=True,
        )
    )


def unary_files(pipeline: str, stream_model: str) -> dict[str, str]:
    """Return the files of the unary twin of `stream_model`, by their paths in its folder."""
    doc = f"{pipeline}, one response a request; passes requests on to the model `{stream_model}`."
    return dict(zip(FILES, (_UNARY.format(pipeline=pipeline), _MODEL.format(doc=doc, kind="UnaryModel")), strict=True))


def _quoted(text: str) -> str:
    quoted: str = text_encoding.CEscape(text, as_utf8=True)
    return quoted
