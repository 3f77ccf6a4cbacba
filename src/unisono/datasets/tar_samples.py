"""Groups the members of a tar file into samples, as WebDataset does.

Consecutive members whose names are equal up to the first dot of the file name form a sample: `train/17.jpg` and
`train/17.cls.json` are the fields `jpg` and `cls.json` of the sample `train/17`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from unisono.datasets.tar_members import Member, TarError, members


@dataclass
class TarSample:
    """The members of a sample, by field."""

    key: str
    fields: dict[str, Member] = field(default_factory=dict)

    @property
    def start(self) -> int:
        """The offset of the sample's first header."""
        return next(iter(self.fields.values())).header

    @property
    def end(self) -> int:
        """The offset after the sample's last member."""
        return next(reversed(self.fields.values())).end


def samples(read: Callable[[int, int], bytes], size: int, *, whole: bool = True) -> Iterator[TarSample]:
    """Yields the samples of a tar file of `size` bytes, or of a section of it if `whole` is False.

    Members without a key, without an extension, or with an unsafe name belong to no sample.
    """
    keys: set[str] = set()
    sample: TarSample | None = None
    for member in members(read, size, whole=whole):
        if (parts := split_name(member.name)) is None:
            continue
        key, name = parts
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            if key in keys:
                raise TarError(f"the files of the sample {key[:80]!r} are not adjacent; write them one after another")
            keys.add(key)
            sample = TarSample(key)
        if name in sample.fields:
            raise TarError(f"the sample {key[:80]!r} has two files with the extension .{name[:40]}")
        sample.fields[name] = member
    if sample is not None:
        yield sample


def split_name(name: str) -> tuple[str, str] | None:
    """Returns the key and the field of a member; None if it belongs to no sample."""
    name = name.removeprefix("./")
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    parts = folder.split("/")
    is_unsafe = name.startswith("/") or ".." in parts
    is_metadata = any(part.startswith("__") and part.endswith("__") and len(part) > 4 for part in (*parts, stem))
    if not (stem and dot and extension) or is_unsafe or is_metadata:
        return None
    return folder + slash + stem, extension.lower()
