"""The `output_format` of a request: what it may be, and what becomes of an output in it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgumentError, did_you_mean
from ..request import DiffusionOutput
from .audio import encode_audio
from .images import encode_image
from .video import encode_video

RAW = "raw"
# What each encoded format holds, as in `DiffusionOutput.modalities`; mp4 takes the sound along.
_MODALITY = {"png": "image", "jpeg": "image", "webp": "image", "wav": "audio", "flac": "audio", "mp4": "video"}
FORMATS = (RAW, *_MODALITY)
_PREVIEW = "png"  # of a request whose result is a sound or a video
_ALIASES = {"jpg": "jpeg"}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How outputs are handed out: `raw` tensors, or encoded files, as bytes or as base64 text (for JSON).

    Written as `png` or, like in a data URL, `png;base64`.
    """

    name: str = RAW
    base64: bool = False

    @classmethod
    def parse(cls, text: str | None) -> OutputFormat:
        """Read an `output_format` input; None is `raw`.

        Raises:
            InvalidArgumentError: the format is unknown.
        """
        if text is None:
            return cls()
        name, _, encoding = text.strip().lower().partition(";")
        name = _ALIASES.get(name, name)
        if name not in FORMATS or encoding not in ("", "base64") or (name == RAW and encoding):
            raise InvalidArgumentError(
                "output_format",
                f"{text!r} is not one of {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}; "
                "append ';base64' to an encoded one for text that fits into JSON",
            )
        return cls(name, encoding == "base64")

    @property
    def is_raw(self) -> bool:
        """Whether outputs stay tensors."""
        return self.name == RAW

    def check(self, modalities: tuple[str, ...]) -> None:
        """Refuse a format that outputs cannot have; called before a request is queued, and again by `encode`.

        Args:
            modalities: those of `image`, `video`, `audio` that the outputs have.

        Raises:
            InvalidArgumentError: none of them fits into the format; says which formats they fit into.
        """
        if self.is_raw or _MODALITY[self.name] in modalities:
            return
        possible = [name for name in FORMATS if name == RAW or _MODALITY[name] in modalities]
        raise InvalidArgumentError(
            "output_format",
            f"{self.name!r} is for {_MODALITY[self.name]}, but the output is {' and '.join(modalities) or 'empty'}; "
            f"it can be {' or '.join(possible)}",
        )

    def encode(self, output: DiffusionOutput) -> list[bytes]:
        """Return a file for each output; called where the output is postprocessed. Not for `raw`.

        Of an output of several modalities the file holds the one that the format is for, and an mp4 its sound too.

        Raises:
            InvalidArgumentError: the format cannot hold this output (see `check`), or not at this size or rate.
        """
        assert not self.is_raw, "raw outputs are not encoded"
        self.check(output.modalities)
        return [self._as_text(data) for data in _files(self.name, output)]

    def encode_images(self, images: NDArray[np.uint8]) -> list[bytes]:
        """Return each picture of uint8 (n, H, W, 3) as a file; called for previews. Not for `raw`.

        Previews of a sound or a video are PNG, as its own format cannot hold them.
        """
        name = self.name if _MODALITY[self.name] == "image" else _PREVIEW
        return [self._as_text(encode_image(image, name)) for image in images]

    def _as_text(self, data: bytes) -> bytes:
        return base64.b64encode(data) if self.base64 else data


def _files(name: str, output: DiffusionOutput) -> Iterator[bytes]:
    match _MODALITY[name]:
        case "image":
            assert output.images is not None
            yield from (encode_image(image, name) for image in output.images)
        case "audio":
            assert output.audio is not None
            yield from (encode_audio(sound, output.sample_rate, name) for sound in output.audio)
        case _:
            assert output.video is not None
            sounds = [None] * len(output.video) if output.audio is None else output.audio
            for frames, sound in zip(output.video, sounds, strict=True):
                yield encode_video(frames, output.frame_rate, sound, output.sample_rate)
