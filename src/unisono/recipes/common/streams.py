"""Opens videos from untrusted sources.

An unreadable file is a BadMedia error that names it, never a crash or a hang, and FFmpeg reads no other file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.recipes.common.bad_files import BadMedia, as_bad_media, check_file

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm")

MAX_PIXELS = 2**27  # per frame; a small file can claim any size
# A playlist that is called video.mp4 would make FFmpeg open any file or address that it lists.
_FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg"


@contextmanager
def open_media(path: Path, kind: str = "video") -> Iterator[InputContainer]:
    """Opens a file; every exception in the block becomes a BadMedia."""
    import av

    check_file(path)
    # An absolute path, because FFmpeg would take a file called `http:video.mp4` for an address.
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}
    # Metadata in an invalid encoding is an error before PyAV 19.
    lenient: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    with as_bad_media(path, kind), av.open(str(path.absolute()), mode="r", options=options, **lenient) as container:
        yield container


def video_stream(path: Path, container: InputContainer) -> VideoStream | None:
    """Returns the first video stream, ready to decode; None if there is none, or only a cover image."""
    from av.stream import Disposition

    videos = (each for each in container.streams.video if Disposition.attached_pic not in each.disposition)
    stream = next(videos, None)
    if stream is None:
        return None
    if stream.codec_context is None:
        raise BadMedia(path, "this installation of PyAV has no decoder for its video")
    if stream.width * stream.height > MAX_PIXELS:
        raise BadMedia(path, f"{stream.height}×{stream.width} is more than {MAX_PIXELS:,} pixels")
    stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}  # frames may be larger than announced
    stream.thread_type = "AUTO"
    stream.thread_count = min(4, torch.get_num_threads())  # a loader worker has one torch thread
    return stream


def audio_stream(container: InputContainer) -> AudioStream | None:
    """Returns the first audio stream that can be decoded; None if there is none."""
    return next((stream for stream in container.streams.audio if stream.codec_context is not None), None)
