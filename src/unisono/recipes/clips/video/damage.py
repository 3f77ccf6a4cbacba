"""What of a video could not be decoded: counted while it is read, and said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.stream import Stream

_UNHEARD = 0.1  # seconds of sound that may be missing before it is worth a word: a packet or two at the ends


@dataclass
class Faults:
    """Packets of a stream that could not be decoded."""

    first: str = ""
    """What the decoder said of the first one."""
    number: int = 0
    seconds: float = 0.0
    """How long they last together."""
    any_frame: bool = False
    """Whether frames were decoded from data with errors; how many differs from one decoder to another."""


def decoded(container: InputContainer, stream: Stream | None, faults: Faults) -> Iterator[Any]:
    """What a stream holds; packets that cannot be decoded are counted and passed over."""
    import av

    for packet in container.demux(stream) if stream is not None else ():
        try:
            frames = packet.decode()
        except av.error.MemoryError:
            raise
        # Given wrong data, decoders say nearly anything: that of AAC says that it is not permitted.
        except (av.error.FFmpegError, UnicodeDecodeError) as error:
            faults.first = faults.first or str(getattr(error, "strerror", None) or error)
            faults.number += 1
            faults.seconds += float((packet.duration or 0) * (packet.time_base or 0))
            continue
        for frame in frames:
            faults.any_frame |= bool(getattr(frame, "is_corrupt", False))
            yield frame


@dataclass(frozen=True)
class Damage:
    """What is missing of a video; the rest of it was used."""

    why: str
    """What the decoder said; empty where the file just ends too soon."""
    seconds_read: float
    seconds_told: float
    """As the file says; equal to what was read where it goes on to the end."""
    frames_missing: int = 0
    """That could not be decoded."""
    has_faulty_frames: bool = False
    """Whether some were decoded, but from data with errors."""
    num_frames: int = 0
    """Of the whole video, as the file says; 0 where it does not."""
    sound_seconds_missing: float = 0.0
    sound_seconds: float = 0.0
    """Of the whole sound, as the file says; 0 where it does not."""

    def __bool__(self) -> bool:
        lost = self.frames_missing or self.has_faulty_frames or self.sound_seconds_missing >= _UNHEARD
        return bool(lost or self.seconds_read < self.seconds_told)

    def __str__(self) -> str:
        parts = []
        if self.seconds_read < self.seconds_told:
            parts.append(f"{self.seconds_read:.1f} s of {self.seconds_told:.1f} s can be read, and are used")
        lost = []
        if self.frames_missing:
            frames = "frame" if (self.num_frames or self.frames_missing) == 1 else "frames"
            lost.append(f"{_part(f'{self.frames_missing:,}', f'{self.num_frames:,}', self.num_frames)} {frames}")
        if self.sound_seconds_missing >= _UNHEARD:
            missing, whole = f"{self.sound_seconds_missing:.1f} s", f"{self.sound_seconds:.1f} s"
            lost.append(f"{_part(missing, whole, self.sound_seconds)} of sound")
        if lost:
            parts.append(f"{' and '.join(lost)} cannot be decoded")
        if self.has_faulty_frames:
            parts.append("other frames have errors" if self.frames_missing else "some frames have errors")
        if self.seconds_read >= self.seconds_told:
            parts.append("the rest is used")
        why = f"damaged ({self.why})" if self.why else "damaged" if lost or self.has_faulty_frames else "cut off"
        return f"{why}: {'; '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """As it stands in clips.json; null: not known."""
        return {
            "why": self.why,
            "seconds_read": round(self.seconds_read, 3),
            "seconds_told": round(self.seconds_told, 3),
            "frames_not_decoded": self.frames_missing,
            "frames": self.num_frames or None,
            "sound_seconds_not_decoded": round(self.sound_seconds_missing, 3),
            "sound_seconds": round(self.sound_seconds, 3) or None,
        }


def _part(missing: str, whole: str, known: float) -> str:
    return f"{missing} of {whole}" if known else missing
