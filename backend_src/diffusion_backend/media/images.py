"""Pictures to files and, from callers who may send anything, files to pictures, through Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from ..errors import InvalidArgumentError

_OPTIONS: dict[str, dict[str, object]] = {
    "png": {"format": "PNG", "compress_level": 6},
    "jpeg": {"format": "JPEG", "quality": 95, "subsampling": 0},
    "webp": {"format": "WEBP", "quality": 90, "method": 4},
}
_MAX_SIDE = {"jpeg": 65_500, "webp": 16_383}  # pixels; libjpeg's JPEG_MAX_DIMENSION, libwebp's WEBP_MAX_DIMENSION

# The only decoders that what callers send can reach.
_DECODERS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_READABLE = "PNG, JPEG, WebP, GIF and BMP"
_ARRAYS = "uint8 (H, W, 3), (H, W, 4), (H, W, 1) or (H, W)"

# A progressive JPEG has some ten scans. Each costs a pass over all pixels, however few bytes it has: a file of 100 kB
# can keep a decoder busy for seconds, one of 30 MB for hours.
_MAX_SCANS = 50
_START_OF_SCAN = b"\xff\xda"  # within the data of a scan, 0xff is followed by other bytes

# What undoes each value of EXIF's tag Orientation (CIPA DC-008, 4.6.4); 1 is upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def encode_image(image: NDArray[np.uint8], name: str) -> bytes:
    """Return a picture as a file. A pure function.

    Args:
        image: uint8 (H, W, 3).
        name: `png`, `jpeg` or `webp`.

    Raises:
        InvalidArgumentError: the format cannot hold a picture of this size.
    """
    height, width = image.shape[:2]
    limit = _MAX_SIDE.get(name)
    if limit is not None and max(height, width) > limit:
        raise InvalidArgumentError(
            "output_format", f"{name!r} holds at most {limit} pixels a side, not {width}×{height}; give 'png' or 'raw'"
        )
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, **_OPTIONS[name])  # type: ignore[arg-type]
    return buffer.getvalue()


def decode_image(data: bytes | NDArray[np.uint8], *, max_pixels: int, field: str = "image") -> Image.Image:
    """Return the picture that a caller sent, in mode RGB, upright and without metadata. A pure function.

    A file is decoded as a viewer shows it: its first frame, turned as EXIF says, over white where it is transparent.
    Colours are taken as sRGB: a colour profile is not applied. 16 bits become 8: grey by rounding, colours by their
    upper byte. The size is checked before any pixel is decoded.

    Args:
        data: a PNG, JPEG, WebP, GIF or BMP file; or uint8 (H, W, 3), (H, W, 4) with alpha, (H, W, 1) or (H, W).
        max_pixels: the largest H × W.
        field: the name of the input, for errors.

    Raises:
        InvalidArgumentError: it is no such picture, is damaged or cut short, or has too many pixels.
    """
    if isinstance(data, np.ndarray):
        return _from_array(data, max_pixels, field)
    if not isinstance(data, bytes):
        raise InvalidArgumentError(
            field, f"{type(data).__name__} is no picture; it must be the bytes of a file, or {_ARRAYS}"
        )
    return _from_file(data, max_pixels, field)


def decode_mask(data: bytes | NDArray[np.uint8], *, max_pixels: int, field: str = "mask_image") -> Image.Image:
    """Return the mask that a caller sent, in mode L: white where a pipeline is to paint, as in `diffusers`.

    As `decode_image`, then grey by ITU-R 601; what is transparent is white. A pure function.
    """
    return decode_image(data, max_pixels=max_pixels, field=field).convert("L")


def _from_array(array: NDArray[Any], max_pixels: int, field: str) -> Image.Image:
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise InvalidArgumentError(
            field, f"an array {array.dtype} {array.shape} is no picture; it must be {_ARRAYS}, or the bytes of a file"
        )
    if array.size == 0:
        raise InvalidArgumentError(field, f"an array of the shape {array.shape} has no pixels")
    _check_size(array.shape[1], array.shape[0], max_pixels, field)
    return _flat(Image.fromarray(array[..., 0] if array.ndim == 3 and channels == 1 else array))


def _from_file(data: bytes, max_pixels: int, field: str) -> Image.Image:
    if not data:
        raise InvalidArgumentError(field, f"it has zero bytes; it must be a picture: {_READABLE} can be read")
    try:
        with Image.open(io.BytesIO(data), formats=_DECODERS) as image:
            _check_size(image.width, image.height, max_pixels, field)
            if image.format in ("JPEG", "MPO") and data.count(_START_OF_SCAN) > _MAX_SCANS:
                raise InvalidArgumentError(
                    field, f"it is a JPEG of more than {_MAX_SCANS} scans; send it as a baseline JPEG, or as PNG"
                )
            image.load()
            turn = _UPRIGHT.get(_orientation(image))
            flat = _flat(image)
    except (InvalidArgumentError, MemoryError):  # the latter is no fault of the caller's
        raise
    except UnidentifiedImageError:
        raise InvalidArgumentError(
            field, f"its {len(data)} bytes are no picture, or their beginning is damaged; {_READABLE} can be read"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        # Pillow's own limit, which it checks first; some 179 million.
        limit = min(max_pixels, 2 * (Image.MAX_IMAGE_PIXELS or max_pixels))
        raise InvalidArgumentError(
            field, f"its pixels are more than the {limit} allowed; send a smaller picture"
        ) from None
    except Exception:  # Pillow's decoders raise whatever happens to them: OSError, SyntaxError, ValueError, KeyError, …
        raise InvalidArgumentError(
            field, f"its {len(data)} bytes are a picture that is damaged or cut short; send it again"
        ) from None
    return flat if turn is None else flat.transpose(turn)


def _check_size(width: int, height: int, max_pixels: int, field: str) -> None:
    if width * height > max_pixels:
        raise InvalidArgumentError(
            field, f"{width}×{height} pixels are more than the {max_pixels} allowed; send a smaller picture"
        )


def _orientation(image: Image.Image) -> int:
    """Return EXIF's Orientation; 1, upright, if there is none or the metadata are damaged."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # as above; a picture with damaged metadata is still a picture
        return 1
    return value if isinstance(value, int) else 1


def _flat(image: Image.Image) -> Image.Image:
    """Return a new picture in mode RGB, over white where it is transparent, without metadata."""
    transparent = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        image = _grey8(image, transparent if isinstance(transparent, int) else None)
    elif transparent is not None and _in_8_bits(transparent):
        image = image.convert("RGBA")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA"):
        image = image.convert("RGBA")
        flat = Image.new("RGB", image.size, "white")
        flat.paste(image, mask=image.getchannel("A"))
    else:
        flat = image.convert("RGB")
    flat.info.clear()
    return flat


def _grey8(image: Image.Image, transparent: int | None) -> Image.Image:
    """Return 16-bit grey as 8-bit grey, white at the transparent value; Pillow would cut it off above 255."""
    deep = np.asarray(image).astype(np.uint32)
    grey = ((deep * 255 + 32_767) // 65_535).astype(np.uint8)
    if transparent is not None:
        grey[deep == transparent] = 255
    return Image.fromarray(grey)


def _in_8_bits(transparent: Any) -> bool:
    """Return whether a transparent colour can be told apart: not one of 16 bits, whose picture Pillow reads as 8."""
    return not isinstance(transparent, tuple) or max(transparent) <= 255
