"""Counts the packets of a damaged video that cannot be decoded, and reports them in one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.stream import Stream

_NEGLIGIBLE_SOUND = 0.1  # seconds; less missing sound is not reported: it is only a packet or two at the ends


@dataclass
class Faults:
    """Packets of a stream that could not be decoded."""

    first: str = ""
    """The decoder's error for the first of these packets."""
    number: int = 0
    seconds: float = 0.0
    """Total duration of these packets."""
    any_frame: bool = False
    """Whether any frame was decoded from corrupt data (their number would depend on the decoder)."""


def decoded(container: InputContainer, stream: Stream | None, faults: Faults) -> Iterator[Any]:
    """Decodes the frames of a stream; counts packets that cannot be decoded, and skips them."""
    import av

    for packet in container.demux(stream) if stream is not None else ():
        try:
            frames = packet.decode()
        except av.error.MemoryError:
            raise
        # Damaged data makes decoders raise almost any error: the AAC decoder reports "operation not permitted".
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
    """The parts of a video that cannot be decoded; the rest is used."""

    why: str
    """The decoder's error; empty if the file only ends too early."""
    seconds_read: float
    seconds_expected: float
    """Duration stated in the header; equals seconds_read if the file was read to its end."""
    frames_missing: int = 0
    """Number of frames that could not be decoded."""
    has_faulty_frames: bool = False
    """Whether any frame was decoded from corrupt data."""
    num_frames: int = 0
    """Number of frames of the whole video according to the header; 0 if unknown."""
    sound_seconds_missing: float = 0.0
    sound_seconds: float = 0.0
    """Length of the sound according to the header; 0 if unknown."""

    def __bool__(self) -> bool:
        lost = self.frames_missing or self.has_faulty_frames or self.sound_seconds_missing >= _NEGLIGIBLE_SOUND
        return bool(lost or self.seconds_read < self.seconds_expected)

    def __str__(self) -> str:
        parts = []
        if self.seconds_read < self.seconds_expected:
            parts.append(f"{self.seconds_read:.1f} of {self.seconds_expected:.1f} s can be read and are used")
        lost = []
        if self.frames_missing:
            frames = "frame" if (self.num_frames or self.frames_missing) == 1 else "frames"
            total = f" of {self.num_frames:,}" if self.num_frames else ""
            lost.append(f"{self.frames_missing:,}{total} {frames}")
        if self.sound_seconds_missing >= _NEGLIGIBLE_SOUND:
            total = f" of {self.sound_seconds:.1f}" if self.sound_seconds else ""
            lost.append(f"{self.sound_seconds_missing:.1f}{total} s of sound")
        if lost:
            parts.append(f"{' and '.join(lost)} cannot be decoded")
        if self.has_faulty_frames:
            parts.append("other frames have errors" if self.frames_missing else "some frames have errors")
        if self.seconds_read >= self.seconds_expected:
            parts.append("the rest is used")
        kind = f"damaged ({self.why})" if self.why else "damaged" if lost or self.has_faulty_frames else "truncated"
        return f"{kind}: {'; '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """Returns the entry `damage` of clips.json; None means unknown."""
        return {
            "why": self.why,
            "seconds_read": round(self.seconds_read, 3),
            "seconds_told": round(self.seconds_expected, 3),
            "frames_not_decoded": self.frames_missing,
            "frames": self.num_frames or None,
            "sound_seconds_not_decoded": round(self.sound_seconds_missing, 3),
            "sound_seconds": round(self.sound_seconds, 3) or None,
        }
