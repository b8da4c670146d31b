"""Video with its sound to files, through FFmpeg."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgumentError
from .audio import known_sample_rate

if TYPE_CHECKING:  # at run time only where a video is encoded: servers of pictures do without its 20 MB
    import av
    from av.audio.stream import AudioStream
    from av.video.stream import VideoStream

DEFAULT_FRAME_RATE = 10.0  # frames a second, where the pipeline has none: as `diffusers.utils.export_to_video`
_FRAME_RATES = (0.001, 1000.0)
_MAX_SIDE = 16384  # pixels; the largest of H.264's levels and of libx264

# Options by encoder; the first that this FFmpeg has is used. A constant rate factor of 18 is as good as lossless to the
# eye (https://trac.ffmpeg.org/wiki/Encode/H.264). MPEG-4 part 2 is for builds without libx264; all have it.
_ENCODERS: dict[str, dict[str, str]] = {
    "libx264": {"crf": "18", "preset": "fast"},
    "mpeg4": {"flags": "+qscale", "global_quality": str(2 * 118)},  # a quantizer of 2 (of 1 to 31), FF_QP2LAMBDA = 118
}
# A fixed number, so that the same video gives the same file on every machine, and one with many cores stays usable.
_ENCODER_THREADS = 4
_BT709 = 1  # primaries, transfer and matrix (ITU-T H.273, tables 2 to 4): what players expect of untagged video, too
_LIMITED_RANGE = 1  # AVCOL_RANGE_MPEG

_SOUND_BITS = 96_000  # a second and channel; half as much again as FFmpeg's default
_LAYOUTS = {1: "mono", 2: "stereo", 3: "3.0", 4: "4.0", 5: "5.0", 6: "5.1"}  # channels
# Sampling frequencies of AAC, in Hz (ISO/IEC 14496-3, table 1.18); a sound of another rate is resampled to the last.
_SOUND_RATES = (96000, 88200, 64000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350, 48000)


def encode_video(
    frames: NDArray[np.uint8],
    frame_rate: float | None,
    sound: NDArray[np.float32] | None = None,
    sample_rate: int | None = None,
    *,
    encoder: str | None = None,
) -> bytes:
    """Return a video as an mp4 file: H.264 in 4:2:0, and AAC if there is a sound. A pure function.

    The colours of 4:2:0 need even sides: an odd one gets its last row or column twice. The sound is cut, or continued
    with silence, to the length of the frames.

    Args:
        frames: uint8 (F, H, W, 3), at least one.
        frame_rate: in frames a second; None for `DEFAULT_FRAME_RATE`.
        sound: float32 (channels, samples) in [-1, 1].
        sample_rate: in Hz; needed with a sound.
        encoder: FFmpeg's name of the video encoder; None for the first of `_ENCODERS` that is there.

    Raises:
        InvalidArgumentError: mp4 has no room for this size, rate or number of channels.
    """
    import av

    rate = _exact(DEFAULT_FRAME_RATE if frame_rate is None else frame_rate)
    _check_size(frames)
    if sound is not None:
        _check_sound(sound, sample_rate)
    encoder = encoder or next(name for name in _ENCODERS if name in av.codecs_available)
    buffer = io.BytesIO()
    # The header's clock: 1/90,000 s, as 1/1000 s would round the lengths of the tracks.
    with av.open(buffer, "w", format="mp4", options={"movie_timescale": "90000"}) as container:
        pictures = _video_stream(container, encoder, rate, height=frames.shape[1], width=frames.shape[2])
        track = None if sound is None else _Track(container, sound, known_sample_rate(sample_rate, "mp4"))
        for index, frame in enumerate(frames):
            container.mux(pictures.encode(_video_frame(frame, index, rate)))
            if track is not None:  # frame by frame, so that the file is interleaved as it is played
                container.mux(track.encode_until((index + 1) / rate))
        container.mux(pictures.encode(None))
        if track is not None:
            container.mux(track.flush())
    return buffer.getvalue()


class _Track:
    """The sound of a video on its way into the container."""

    def __init__(self, container: av.container.OutputContainer, sound: NDArray[np.float32], rate: int) -> None:
        self._sound = np.nan_to_num(sound.clip(-1.0, 1.0))
        self._rate = rate
        self._layout = _LAYOUTS[sound.shape[0]]
        self._done = 0
        coded_rate = rate if rate in _SOUND_RATES else _SOUND_RATES[-1]
        self._stream: AudioStream = container.add_stream("aac", rate=coded_rate, layout=self._layout)
        self._stream.bit_rate = _SOUND_BITS * sound.shape[0]

    def encode_until(self, end_s: Fraction) -> list[Any]:
        """Encode what sounds before `end_s`, in seconds from the start; silence if there is nothing more."""
        import av

        end = round(end_s * self._rate)
        if end == self._done:
            return []
        piece = self._sound[:, self._done : end]
        piece = np.pad(piece, ((0, 0), (0, end - self._done - piece.shape[1])))
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(piece), format="fltp", layout=self._layout)
        frame.sample_rate = self._rate
        frame.time_base = Fraction(1, self._rate)
        frame.pts = self._done
        self._done = end
        return self._stream.encode(frame)

    def flush(self) -> list[Any]:
        """Encode what the encoder holds back."""
        return self._stream.encode(None)


def _video_stream(
    container: av.container.OutputContainer, encoder: str, rate: Fraction, *, height: int, width: int
) -> VideoStream:
    stream: VideoStream = container.add_stream(encoder, rate=rate, options=_ENCODERS[encoder])  # type: ignore[assignment]
    stream.height, stream.width, stream.pix_fmt = height + height % 2, width + width % 2, "yuv420p"
    context = stream.codec_context
    context.thread_count = _ENCODER_THREADS
    context.color_primaries = context.color_trc = context.colorspace = _BT709
    context.color_range = _LIMITED_RANGE
    return stream


def _video_frame(frame: NDArray[np.uint8], index: int, rate: Fraction) -> av.VideoFrame:
    import av
    from av.video.reformatter import Colorspace

    height, width = frame.shape[:2]
    even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    rgb = av.VideoFrame.from_ndarray(even, format="rgb24")
    coded = rgb.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=_LIMITED_RANGE)
    coded.time_base = 1 / rate
    coded.pts = index
    return coded


def _exact(frame_rate: float) -> Fraction:
    """Return the rate as a fraction: 24000/1001 for 23.976024."""
    lowest, highest = _FRAME_RATES
    if not lowest <= frame_rate <= highest:  # nor no number at all
        raise InvalidArgumentError(
            "frame_rate", f"{frame_rate:g} is not allowed in a file; it must be from {lowest:g} to {highest:g}"
        )
    return Fraction(frame_rate).limit_denominator(1001)


def _check_size(frames: NDArray[np.uint8]) -> None:
    height, width = frames.shape[1:3]
    if max(height, width) > _MAX_SIDE:
        raise InvalidArgumentError(
            "output_format",
            f"'mp4' holds at most {_MAX_SIDE} pixels a side, not {width}×{height}; give 'raw'",
        )


def _check_sound(sound: NDArray[np.float32], sample_rate: int | None) -> None:
    known_sample_rate(sample_rate, "mp4")
    if sound.shape[0] not in _LAYOUTS:
        raise InvalidArgumentError(
            "output_format",
            f"'mp4' holds sounds of {', '.join(map(str, _LAYOUTS))} channels, not {sound.shape[0]}; give 'raw'",
        )
