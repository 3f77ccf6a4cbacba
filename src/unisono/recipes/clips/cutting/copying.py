"""A moment of a video as it is, from a key frame on: instant, and nothing is lost."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UserError
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.cutting.mp4 import writing
from unisono.recipes.clips.video.footage import Footage
from unisono.recipes.common.streams import audio_stream, open_media, video_stream

if TYPE_CHECKING:
    from av.container import OutputContainer


def copy(footage: Footage, moment: Moment, to: Path) -> tuple[float, float]:
    """Copies the streams as they are; what came out, in seconds of the video."""
    import av

    entry = footage.key_frame(moment.start)
    if entry is None:
        raise UserError(f"{footage.path} cannot be entered before {moment.start:.1f} s (no key frame); use --exact")
    origin, leads_there = entry
    last, refused = origin, None
    with open_media(footage.path) as source:
        film, sound = video_stream(footage.path, source), audio_stream(source)
        assert film is not None
        streams = [film] if sound is None else [film, sound]
        footage.seek(source, film, leads_there)
        try:
            with writing(to) as output:
                copies = {stream.index: output.add_stream_from_template(stream) for stream in streams}
                copying = _Copy(output, film.index, copies, footage.begin + origin, footage.begin + moment.end)
                for packet in source.demux(streams):
                    if not copying.add(packet):
                        break
                last = copying.last - footage.begin
        except (ValueError, OSError, av.error.FFmpegError) as error:
            refused = error  # raised outside: in here it would be taken for a fault of the source
    if isinstance(refused, OSError):
        raise refused
    if refused is not None:
        raise UserError(f"{footage.path}: what is in it cannot be copied into an MP4 file as it is; use --exact")
    return origin, last


def can_copy(footage: Footage) -> str:
    """Empty where the streams of a video fit into an MP4 file as they are; otherwise what does not, in words."""
    import av

    with open_media(footage.path) as source:
        film, sound = video_stream(footage.path, source), audio_stream(source)
        streams = [stream for stream in (film, sound) if stream is not None]
        try:
            with av.open(io.BytesIO(), "w", format="mp4") as output:
                for stream in streams:
                    output.add_stream_from_template(stream)
                output.start_encoding()
        except (ValueError, OSError, av.error.FFmpegError):
            kinds = " and ".join(stream.codec_context.name for stream in streams)
            return f"an MP4 file cannot hold what is in it ({kinds})"
    return ""


class _Copy:
    """Packets on their way from one file to another, from a key frame on; times are those of the file."""

    def __init__(self, output: OutputContainer, film: int, copies: dict[int, Any], origin: float, end: float) -> None:
        self._output, self._film, self._copies = output, film, copies
        self._origin, self._end = origin, end
        self._begun = False
        self._over: set[int] = set()
        self._early: list[Any] = []  # sound that stands in the file before the picture it belongs to
        self.last = origin
        """When the last picture ends."""

    def add(self, packet: Any) -> bool:
        """Copies a packet if it belongs to the cut; whether any is wanted after it."""
        if packet.dts is None or packet.pts is None or packet.stream_index in self._over:
            return True
        tick = float(packet.time_base)
        is_film = packet.stream_index == self._film
        if is_film and not self._begun:
            if not packet.is_keyframe or abs(packet.pts * tick - self._origin) > 1e-3:
                return True
            self._begun = True
            self._write(packet)
            for early in self._early:
                self._write(early)
            return True
        # In the order of decoding, what still belongs to the moment may stand behind what does not: a picture that is
        # shown later comes first where others are made from it. So it ends only before the next such picture.
        if packet.dts * tick >= self._end and (not is_film or packet.pts * tick > self.last - 1e-6):
            self._over.add(packet.stream_index)
            return len(self._over) < len(self._copies)
        if self._begun:
            self._write(packet)
        elif packet.pts * tick >= self._origin - 1e-3:
            self._early.append(packet)
        return True

    def _write(self, packet: Any) -> None:
        tick = float(packet.time_base)
        # Pictures shown before the key frame they come after are made from what was before it.
        if packet.pts * tick < self._origin - 1e-3:
            return
        if packet.stream_index == self._film:
            self.last = max(self.last, (packet.pts + (packet.duration or 0)) * tick)
        shift = round(self._origin / tick)
        packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
        packet.stream = self._copies[packet.stream_index]
        self._output.mux(packet)
