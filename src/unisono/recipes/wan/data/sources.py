"""Finds the samples of a dataset folder: videos and images, their captions, and precomputed latents and embeddings.

Either a file lists the samples (see `metadata`), or each video and image has a text file of the same name, also in
subfolders: `cats/a.mp4` and `cats/a.txt`. `a.latent.safetensors` holds the latent of `a`, and `a.safetensors` the
embedding of its caption. A sample with a latent needs no video, and a sample with an embedding needs no caption.
`a.mask.png` or `a.mask.mp4` determines which parts of `a` count in the loss.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import splitext
from pathlib import Path

from unisono.errors import ConfigError
from unisono.recipes.common.streams import VIDEO_SUFFIXES
from unisono.recipes.common.tree import Outside, Tree, one_line
from unisono.recipes.wan.checks import is_unicode
from unisono.recipes.wan.data.decode import IMAGES
from unisono.recipes.wan.data.metadata import CAPTION_LISTS, MEDIA_LISTS, TABLES, rows_of, rows_of_lists
from unisono.recipes.wan.data.shards import PackedMedia

LATENT, EMBEDDING = ".latent.safetensors", ".safetensors"
MASKS = (".mask.png", ".mask.mp4")
FIRST, LAST = ".first", ".last"
"""Name endings of the pictures that replace a sample's first and last frame: a.first.png for a.mp4."""
_MEDIA = (*VIDEO_SUFFIXES, *IMAGES)
_MOST_CHARACTERS = 65_536  # maximum caption length; a model uses only 512 tokens
_NO_CAPTION = "has no caption"


@dataclass(frozen=True)
class Source:
    """One sample of a dataset folder: its image or video, its caption, and precomputed tensors."""

    name: str
    """The path in the folder without its suffix, or a longer name if that is not unique."""
    media: Path | None
    """The image or video; None if the sample has only a latent."""
    caption: str | None
    """The caption; None if the sample has only an embedding. A sample with an empty caption is trained without text."""
    latent: Path | None = None
    embedding: Path | None = None
    mask: Path | None = None
    first: Path | None = None
    """A picture that an image-to-video model is given instead of the first frame."""
    last: Path | None = None
    """A picture that an image-to-video model is given instead of the last frame."""
    packed: PackedMedia | None = None
    """The image or video if it is in a tar shard; `media` is then None."""

    @property
    def suffix(self) -> str:
        """The suffix of the image or video, in lower case; empty if the sample has only a latent."""
        if self.packed is not None:
            return self.packed.suffix
        return "" if self.media is None else self.media.suffix.lower()


@dataclass(frozen=True)
class _Bad:
    sample: str
    problem: str
    fix: str


@dataclass
class _Samples:
    """The usable samples (named by their full path in the folder), the unusable samples, and notes for the user."""

    sources: list[Source] = field(default_factory=list)
    bad: list[_Bad] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_sources(
    folder: Path, *, leave_out_bad: bool = False, report: Callable[[str], None] = lambda text: None
) -> list[Source]:
    """Returns the samples of a folder, or of a file that lists samples, always in the same order.

    Raises ConfigError for a sample without a file or a caption, or skips it with `leave_out_bad`. Calls `report` with
    each note for the user.
    """
    try:
        samples = _samples_of(folder, leave_out_bad)
    except ConfigError as error:
        raise ConfigError(one_line(str(error))) from None
    for remark in samples.remarks:
        report(one_line(remark))
    return _with_unique_names(samples.sources)


def _samples_of(folder: Path, leave_out_bad: bool) -> _Samples:
    if folder.is_file():
        tree = Tree(folder.parent)
        lists = _lists_of(tree, folder.name)
    elif folder.is_dir():
        tree = Tree(folder)
        lists = _lists_in(tree)
    else:
        raise ConfigError(f"{folder}: no such folder; expected videos or images and their captions")
    samples = _listed(tree, lists) if lists else _side_by_side(tree)
    if not samples.sources:
        _refuse_empty(samples, folder, "" if lists else _nested_list(tree))
    _report_bad(samples, leave_out_bad)
    return samples


def _lists_of(tree: Tree, name: str) -> tuple[str, ...]:
    if name.lower().endswith((".csv", ".jsonl", ".json")):
        return (name,)
    for own_names, other_names in ((MEDIA_LISTS, CAPTION_LISTS), (CAPTION_LISTS, MEDIA_LISTS)):
        others = [other for other in other_names if other in tree]
        if name in own_names and len(others) == 1:
            return (name, others[0]) if own_names is MEDIA_LISTS else (others[0], name)
    raise ConfigError(
        f"{tree.path(name)}: expected a folder, a list of samples (.csv, .jsonl, .json), or "
        f"{MEDIA_LISTS[0]} next to {CAPTION_LISTS[0]}"
    )


def _lists_in(tree: Tree) -> tuple[str, ...]:
    """Returns the names of the file, or the two files, that list a folder's samples; empty if there are none."""

    def is_list(name: str) -> bool:  # False for a caption: prompt.txt is one if prompt.mp4 exists
        return name in tree and not any(name.removesuffix(".txt") + suffix in tree for suffix in _MEDIA)

    media, captions = ([name for name in names if is_list(name)] for names in (MEDIA_LISTS, CAPTION_LISTS))
    lists = [*((name,) for name in TABLES if name in tree), *((one, other) for one in media for other in captions)]
    if len(lists) > 1:
        names = " and ".join(dict.fromkeys(name for names in lists for name in names))
        raise ConfigError(
            f"{tree.folder}: {names} all list its samples; "
            "move away all but one, or pass the file to use instead of the folder"
        )
    return lists[0] if lists else ()


def _listed(tree: Tree, lists: tuple[str, ...]) -> _Samples:
    """Returns the samples that a metadata file lists, in its order."""
    samples, num_several = _Samples(), 0
    for row in rows_of(tree, lists[0]) if len(lists) == 1 else rows_of_lists(tree, lists[0], lists[1]):
        try:
            path = tree.relative(row.media)
            stem, suffix = splitext(path)
            stems = (stem, f"videos/{stem}")
            media = next((each + suffix for each in stems if each + suffix in tree), None)
            with_latent = next((each for each in stems if each + LATENT in tree), None)
            if suffix.lower() not in _MEDIA:
                samples.bad.append(
                    _Bad(row.where, f"{row.media} is not a video or image", f"supported are {' '.join(_MEDIA)}")
                )
            elif media:
                _add(samples, tree, row.where, media.removesuffix(suffix), media, row.caption)
            elif with_latent:
                _add(samples, tree, row.where, with_latent, None, row.caption)
            else:
                samples.bad.append(_Bad(row.where, f"no such file: {tree.path(path)}", "correct the list"))
        except Outside as outside:
            raise ConfigError(f"{row.where}: {outside}") from None
        num_several += row.num_captions > 1
    if num_several:
        samples.remarks.append(f"{num_several} samples have more than one caption; the first of each is used")
    return samples


def _side_by_side(tree: Tree) -> _Samples:
    """Pairs every video, image and latent of the folder with the text file of the same name; sorted by name."""
    samples = _Samples()
    media: dict[str, list[str]] = defaultdict(list)
    texts: dict[str, str] = {}
    for path in sorted(tree.walk()):
        stem, suffix = splitext(path)
        suffix = suffix.lower()
        if suffix in _MEDIA:
            media[stem].append(path)
        elif path.endswith(LATENT):
            media[path.removesuffix(LATENT)] += []
        elif suffix == ".txt":
            texts[stem] = path
    for path in _beside_samples(media):
        media[splitext(path)[0]].remove(path)
    for stem in [stem for stem in media if stem not in texts and _owner_of(stem) in media]:
        media[stem] = [path for path in media[stem] if not path.lower().endswith(IMAGES)]
        if not media[stem]:
            del media[stem]
    for stem, paths in sorted(media.items()):
        if len(paths) > 1 and stem + LATENT in tree:
            raise ConfigError(f"{tree.path(stem + LATENT)} could belong to {' or '.join(paths)}; rename one of them")
        try:
            caption = _read_caption(tree, texts[stem]) if stem in texts else None
        except Outside:
            raise
        except ConfigError as error:
            samples.bad.append(_Bad(f"{tree.folder}/{stem}", str(error), ""))
            continue
        for path in paths:
            if path in tree:  # raises ConfigError for a link out of the folder
                _add(samples, tree, f"{tree.folder}/{path}", stem, path, caption)
        if not paths and stem + LATENT in tree:
            _add(samples, tree, f"{tree.folder}/{stem}{LATENT}", stem, None, caption)
    if tree.not_followed:
        samples.remarks.append(f"skipped links to folders: {_few(tree.not_followed)}")
    return samples


def _beside_samples(media: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the images and videos whose names show that they are masks of samples rather than samples."""
    return [
        stem + suffix
        for stem in media
        for suffix in MASKS
        for path in media.get(stem + splitext(suffix)[0], ())
        if path == stem + suffix
    ]


def _read_caption(tree: Tree, path: str) -> str:
    if path not in tree:  # raises ConfigError for a link out of the folder
        raise ConfigError(f"{tree.path(path)} is not a file")
    return "\n".join(line for _, line in tree.lines(path, 4 * _MOST_CHARACTERS)).strip()


def _add(samples: _Samples, tree: Tree, where: str, stem: str, media: str | None, caption: str | None) -> None:
    """Adds a sample with its latent and embedding, or records the problem with it."""
    latent, embedding = (tree.path(stem + kind) if stem + kind in tree else None for kind in (LATENT, EMBEDDING))
    masks = [tree.path(stem + kind) for kind in MASKS if stem + kind in tree]
    if caption is None and embedding is None:
        samples.bad.append(_Bad(where, _NO_CAPTION, f"write one, for instance into {stem}.txt"))
    elif len(caption or "") > _MOST_CHARACTERS:
        samples.bad.append(_Bad(where, f"its caption has more than {_MOST_CHARACTERS:,} characters", "shorten it"))
    elif not is_unicode(stem) or not is_unicode(caption or ""):
        samples.bad.append(_Bad(where, "its name or caption is not valid Unicode", "correct it"))
    elif len(masks) > 1:
        samples.bad.append(_Bad(where, f"it has two masks, {masks[0].name} and {masks[1].name}", "remove one of them"))
    else:
        path = None if media is None else tree.path(media)
        mask = masks[0] if masks else None
        first, last = (_picture(tree, stem + end) for end in (FIRST, LAST))
        samples.sources.append(Source(media or stem + LATENT, path, caption, latent, embedding, mask, first, last))


def _picture(tree: Tree, stem: str) -> Path | None:
    """Returns the picture with this name and any supported suffix."""
    paths = [stem + suffix for suffix in IMAGES if stem + suffix in tree]
    if len(paths) > 1:
        raise ConfigError(f"{tree.path(paths[0])} and {paths[1]} are both given frames of one sample; remove one")
    return tree.path(paths[0]) if paths else None


def _owner_of(stem: str) -> str | None:
    """Returns the name of the sample whose given frame the picture `stem` is; None for other names."""
    return next((stem.removesuffix(end) for end in (FIRST, LAST) if stem.endswith(end)), None)


def _refuse_empty(samples: _Samples, folder: Path, hint: str) -> None:
    if not samples.bad:
        raise ConfigError(f"{folder} contains no video or image ({' '.join(_MEDIA)}){hint}")
    if all(each.problem == _NO_CAPTION for each in samples.bad):
        raise ConfigError(
            f"{folder}: none of {len(samples.bad)} samples has a caption; expected a.txt next to a.mp4, "
            f"or one of {', '.join(TABLES)}{hint}"
        )


def _report_bad(samples: _Samples, leave_out_bad: bool) -> None:
    """Raises ConfigError if there are bad samples or, with `leave_out_bad`, adds a remark that they are skipped."""
    good, bad = len(samples.sources), samples.bad
    if bad and not (good and leave_out_bad):
        others = f" ({len(bad) - 1} more of {good + len(bad)} samples are bad)" if len(bad) > 1 else ""
        fix = f"; {bad[0].fix}" if bad[0].fix else ""
        remedy = ", or skip it with --leave_out_bad" if good else ""
        raise ConfigError(f"{bad[0].sample}: {bad[0].problem}{others}{fix}{remedy}")
    if bad:
        names = _few([f"{each.sample} ({each.problem})" for each in bad])
        samples.remarks.append(f"skipped {len(bad)} of {good + len(bad)} samples: {names}")
    if empty := sum(source.caption == "" for source in samples.sources):
        samples.remarks.append(f"{empty} of {good} captions are empty; these samples are trained without text")


def _few(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def _nested_list(tree: Tree) -> str:
    """Returns a hint for the user if a subfolder contains a list of samples; empty otherwise."""
    nested = next((path for path in sorted(tree.walk()) if path.rpartition("/")[2] in TABLES), None)
    return f"; {tree.path(nested)} exists: pass its folder instead" if nested else ""


def _with_unique_names(sources: list[Source]) -> list[Source]:
    """Shortens the name a.mp4 to a, unless there is also an a.png. The second listing of a.mp4 is named a#2."""

    def short(path: str) -> str:
        return path.removesuffix(LATENT) if path.endswith(LATENT) else splitext(path)[0]

    like = Counter(short(path) for path in {source.name for source in sources})
    taken: Counter[str] = Counter()
    named = []
    for source in sources:
        name = short(source.name) if like[short(source.name)] == 1 else source.name
        taken[name] += 1
        while taken[name] > 1 and taken[f"{name}#{taken[name]}"]:
            taken[name] += 1
        if taken[name] > 1:
            name = f"{name}#{taken[name]}"
            taken[name] += 1
        named.append(replace(source, name=name))
    return named
