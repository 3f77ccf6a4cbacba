"""Opens videos from untrusted sources.

An unreadable file raises BadMedia instead of causing a crash or a hang, and it cannot make FFmpeg open another file.
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

MAX_PIXELS = 2**27  # maximum per frame, because a small file may declare any frame size
# Without this list, a playlist named video.mp4 would make FFmpeg open any file or URL that it lists.
_FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg"


@contextmanager
def open_media(path: Path, kind: str = "video") -> Iterator[InputContainer]:
    """Opens a media file; any exception raised inside the `with` block becomes a BadMedia."""
    import av

    check_file(path)
    # Uses an absolute path, because FFmpeg would treat a file named `http:video.mp4` as a URL.
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}
    # Before version 19, PyAV raises an error for metadata in an invalid encoding.
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
        raise BadMedia(path, "PyAV has no decoder for this video's codec")
    if stream.width * stream.height > MAX_PIXELS:
        raise BadMedia(path, f"{stream.height}×{stream.width} is more than {MAX_PIXELS:,} pixels")
    stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}  # frames may be larger than the header declares
    stream.thread_type = "AUTO"
    stream.thread_count = min(4, torch.get_num_threads())  # 1 in a loader worker, which has one torch thread
    return stream


def audio_stream(container: InputContainer) -> AudioStream | None:
    """Returns the first audio stream that can be decoded; None if there is none."""
    return next((stream for stream in container.streams.audio if stream.codec_context is not None), None)
