"""Pictures to bytes, through Pillow."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import InvalidArgumentError, did_you_mean
from ..request import DiffusionOutput

_IMAGE_FORMATS: dict[str, dict[str, object]] = {
    "png": {"format": "PNG", "compress_level": 6},
    "jpeg": {"format": "JPEG", "quality": 95, "subsampling": 0},
    "webp": {"format": "WEBP", "quality": 90, "method": 4},
}
FORMATS = ("raw", *_IMAGE_FORMATS)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How outputs are handed out: `raw` tensors, or encoded files, as bytes or as base64 text (for JSON).

    Written as `png` or, like in a data URL, `png;base64`.
    """

    name: str = "raw"
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
        name = "jpeg" if name == "jpg" else name
        if name not in FORMATS or encoding not in ("", "base64") or (name == "raw" and encoding):
            raise InvalidArgumentError(
                "output_format",
                f"{text!r} is not one of {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}; "
                "append ';base64' to an encoded one for text that fits into JSON",
            )
        return cls(name, encoding == "base64")

    @property
    def is_raw(self) -> bool:
        """Whether outputs stay tensors."""
        return self.name == "raw"

    def encode_images(self, images: NDArray[np.uint8]) -> list[bytes]:
        """Return each picture of uint8 (n, H, W, 3) as an encoded file."""
        return [self._as_text(_encode_image(image, _IMAGE_FORMATS[self.name])) for image in images]

    def encode(self, output: DiffusionOutput) -> list[bytes]:
        """Return each output as an encoded file.

        Raises:
            InvalidArgumentError: there is nothing that the format can hold.
        """
        if output.images is None:
            raise InvalidArgumentError("output_format", f"{self.name!r} is for images; leave it out, or give 'raw'")
        return self.encode_images(output.images)

    def _as_text(self, data: bytes) -> bytes:
        return base64.b64encode(data) if self.base64 else data


def _encode_image(image: NDArray[np.uint8], options: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, **options)  # type: ignore[arg-type]
    return buffer.getvalue()
