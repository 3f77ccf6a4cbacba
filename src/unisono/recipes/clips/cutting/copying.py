"""Copies the streams of a moment, starting at the key frame before it, which is instant and lossless."""

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
    """Copies the streams to a new file; returns the start and end of the part of the video that the file contains."""
    import av

    key_frame = footage.key_frame(moment.start)
    if key_frame is None:
        raise UserError(
            f"{footage.path} has no key frame before {moment.start:.1f} s, so it cannot be copied; use --exact"
        )
    origin, seek_time = key_frame
    end, write_error = origin, None
    with open_media(footage.path) as source:
        video, sound = video_stream(footage.path, source), audio_stream(source)
        assert video is not None
        streams = [video] if sound is None else [video, sound]
        footage.seek(source, video, seek_time)
        try:
            with writing(to) as output:
                copies = {stream.index: output.add_stream_from_template(stream) for stream in streams}
                copying = _Copy(output, video.index, copies, footage.begin + origin, footage.begin + moment.end)
                for packet in source.demux(streams):
                    if not copying.add(packet):
                        break
                end = copying.video_end - footage.begin
        except (ValueError, OSError, av.error.FFmpegError) as error:
            write_error = error  # raised below: inside `open_media`, the message would blame the source file
    if isinstance(write_error, OSError):
        raise write_error
    if write_error is not None:
        raise UserError(f"{footage.path}: its streams cannot be copied to an MP4 file; use --exact")
    return origin, end


def obstacle_to_copy(footage: Footage) -> str:
    """Returns the reason why a video's streams cannot be copied to an MP4 file; empty if they can."""
    import av

    with open_media(footage.path) as source:
        video, sound = video_stream(footage.path, source), audio_stream(source)
        streams = [stream for stream in (video, sound) if stream is not None]
        try:
            with av.open(io.BytesIO(), "w", format="mp4") as output:
                for stream in streams:
                    output.add_stream_from_template(stream)
                output.start_encoding()
        except (ValueError, OSError, av.error.FFmpegError):
            codecs = " and ".join(stream.codec_context.name for stream in streams)
            return f"an MP4 file cannot contain its codecs ({codecs})"
    return ""


class _Copy:
    """Copies packets from one file to another, starting at a key frame; all times are timestamps of the source."""

    def __init__(self, output: OutputContainer, video: int, copies: dict[int, Any], origin: float, end: float) -> None:
        self._output, self._video, self._copies = output, video, copies
        self._origin, self._end = origin, end
        self._started = False
        self._finished: set[int] = set()
        self._early: list[Any] = []  # audio packets that the file stores before the key frame
        self.video_end = origin
        """Timestamp at which the last copied frame ends."""

    def add(self, packet: Any) -> bool:
        """Copies a packet if it belongs to the moment; returns whether more packets are needed."""
        if packet.dts is None or packet.pts is None or packet.stream_index in self._finished:
            return True
        tick = float(packet.time_base)
        is_video = packet.stream_index == self._video
        if is_video and not self._started:
            if not packet.is_keyframe or abs(packet.pts * tick - self._origin) > 1e-3:
                return True
            self._started = True
            self._write(packet)
            for early in self._early:
                self._write(early)
            return True
        # Packets are in decoding order: a reference frame comes before the B-frames that are displayed before it.
        # Copying therefore stops at the first frame that is both decoded and displayed after the end of the moment.
        if packet.dts * tick >= self._end and (not is_video or packet.pts * tick > self.video_end - 1e-6):
            self._finished.add(packet.stream_index)
            return len(self._finished) < len(self._copies)
        if self._started:
            self._write(packet)
        elif packet.pts * tick >= self._origin - 1e-3:
            self._early.append(packet)
        return True

    def _write(self, packet: Any) -> None:
        tick = float(packet.time_base)
        # Skips frames that are displayed before the first key frame, because they depend on frames that are not copied.
        if packet.pts * tick < self._origin - 1e-3:
            return
        if packet.stream_index == self._video:
            self.video_end = max(self.video_end, (packet.pts + (packet.duration or 0)) * tick)
        shift = round(self._origin / tick)
        packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
        packet.stream = self._copies[packet.stream_index]
        self._output.mux(packet)
