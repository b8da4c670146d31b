"""Pictures, sound and video to and from files.

    formats   which format was asked for, and whether an output can have it
    images    png, jpeg and webp out; png, jpeg, webp, gif and bmp in
    audio     wav and flac out
    video     mp4 out, with its sound

Everything here is a pure function of its arguments, and any thread may call it.
"""

from .formats import FORMATS, OutputFormat
from .images import decode_image, decode_mask

__all__ = ["FORMATS", "OutputFormat", "decode_image", "decode_mask"]
