"""Opening a video that comes from anywhere: its streams, ready to be decoded.

What cannot be read is a BadMedia that names the file, never a crash, a hang or a read of anything but the file itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.recipes.common.bad_files import BadMedia, check_file, faults

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

FILMS = (".mp4", ".avi", ".mov", ".mkv", ".webm")

MOST_PIXELS = 2**27  # of one picture; a small file can claim any size
# A playlist or a script that is called film.mp4 would make FFmpeg open whatever it names, also over the network.
_FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg"


@contextmanager
def opened(path: Path, kind: str = "video") -> Iterator[InputContainer]:
    """The file, opened; whatever goes wrong with it meanwhile is a BadMedia."""
    import av

    check_file(path)
    # An absolute path: `http:film.mp4` is a file here, and an address to FFmpeg.
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}
    # Titles in odd encodings are no reason to refuse a video; from PyAV 19 on they never are.
    lenient: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    with faults(path, kind), av.open(str(path.absolute()), mode="r", options=options, **lenient) as container:
        yield container


def video_of(path: Path, container: InputContainer) -> VideoStream | None:
    """The first video of a file, ready to be decoded; None where there is none, or only a cover."""
    from av.stream import Disposition

    films = [each for each in container.streams.video if Disposition.attached_pic not in each.disposition]
    if not films:
        return None
    stream = films[0]
    if stream.codec_context is None:
        raise BadMedia(path, "this installation of PyAV has no decoder for its video")
    if stream.width * stream.height > MOST_PIXELS:
        raise BadMedia(path, f"{stream.height}×{stream.width} is more than {MOST_PIXELS:,} pixels")
    stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}  # frames may be larger than announced
    stream.thread_type = "AUTO"
    stream.thread_count = min(4, torch.get_num_threads())  # one in a loader's worker; each decodes ahead
    return stream


def sound_of(container: InputContainer) -> AudioStream | None:
    """The first sound of a file; None where there is none that can be decoded."""
    return next((stream for stream in container.streams.audio if stream.codec_context is not None), None)
