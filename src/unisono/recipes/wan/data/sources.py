"""The samples of a data folder: films and pictures, their captions, and what was computed from them before.

Either a file lists the samples (see `metadata`), or each film and picture has a text file of its name beside it, also
in subfolders: `cats/a.mp4` and `cats/a.txt`. `a.latent.safetensors` beside them holds the latent of `a`, and
`a.safetensors` the embedding of its caption; what has these needs no film, or no caption, any more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from os.path import splitext
from pathlib import Path

from unisono.errors import ConfigError
from unisono.recipes.common.streams import FILMS
from unisono.recipes.common.tree import Outside, Tree, one_line
from unisono.recipes.wan.data.decode import PICTURES
from unisono.recipes.wan.data.metadata import CAPTION_LISTS, MEDIA_LISTS, TABLES, rows_of, rows_of_lists

LATENT, EMBEDDING = ".latent.safetensors", ".safetensors"
_MEDIA = (*FILMS, *PICTURES)
_LONGEST = 65_536  # characters of a caption; a model takes 512 tokens
_NO_CAPTION = "has no caption"


@dataclass(frozen=True)
class Source:
    """One sample of a data folder: a picture or film, its caption, and what was computed from them before."""

    name: str
    """Unique in the folder: its path without the suffix, and with more where that is not unique."""
    media: Path | None
    """None where only a latent is there."""
    caption: str | None
    """None where only an embedding is there. An empty caption is a caption: the unconditional one."""
    latent: Path | None = None
    embedding: Path | None = None


@dataclass(frozen=True)
class _Bad:
    sample: str
    wrong: str
    fix: str


@dataclass
class _Found:
    """Samples whose name is still the whole path in the folder, and those that cannot be used."""

    sources: list[Source] = field(default_factory=list)
    bad: list[_Bad] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_sources(
    folder: Path, *, leave_out_bad: bool = False, said: Callable[[str], None] = lambda text: None
) -> list[Source]:
    """The samples of a folder, or of the file that lists them, always in the same order.

    A sample without its file or its caption is an error, or with `leave_out_bad` left out; `said` is told that once,
    and what else the user should know.
    """
    try:
        found = _found(folder, leave_out_bad)
    except ConfigError as error:
        raise ConfigError(one_line(str(error))) from None
    for remark in found.remarks:
        said(one_line(remark))
    return _with_unique_names(found.sources)


def _found(folder: Path, leave_out_bad: bool) -> _Found:
    if folder.is_file():
        tree = Tree(folder.parent)
        lists = _lists_of(tree, folder.name)
    elif folder.is_dir():
        tree = Tree(folder)
        lists = _lists_in(tree)
    else:
        raise ConfigError(f"{folder}: there is no such folder; expected one with films or pictures and their captions")
    found = _listed(tree, lists) if lists else _side_by_side(tree)
    if not found.sources:
        _refuse_for_nothing(found, folder, "" if lists else _nested_list(tree))
    _judge(found, leave_out_bad)
    return found


def _lists_of(tree: Tree, name: str) -> tuple[str, ...]:
    if name.lower().endswith((".csv", ".jsonl", ".json")):
        return (name,)
    for these, those in ((MEDIA_LISTS, CAPTION_LISTS), (CAPTION_LISTS, MEDIA_LISTS)):
        partners = [other for other in those if other in tree]
        if name in these and len(partners) == 1:
            return (name, partners[0]) if these is MEDIA_LISTS else (partners[0], name)
    raise ConfigError(
        f"{tree.path(name)}: expected a folder, a list of samples (.csv, .jsonl, .json), or "
        f"{MEDIA_LISTS[0]} with {CAPTION_LISTS[0]} beside it"
    )


def _lists_in(tree: Tree) -> tuple[str, ...]:
    """The file, or the two files, that list the samples of a folder; nothing where there is none."""

    def is_list(name: str) -> bool:  # prompt.txt is the caption of prompt.mp4, if that is there
        return name in tree and not any(name.removesuffix(".txt") + suffix in tree for suffix in _MEDIA)

    media, captions = ([name for name in names if is_list(name)] for names in (MEDIA_LISTS, CAPTION_LISTS))
    lists = [*((name,) for name in TABLES if name in tree), *((one, other) for one in media for other in captions)]
    if len(lists) > 1:
        names = " and ".join(dict.fromkeys(name for names in lists for name in names))
        raise ConfigError(
            f"{tree.folder}: {names} list its samples, each in its own way; "
            "move away what is not meant, or give the file to use in place of the folder"
        )
    return lists[0] if lists else ()


def _listed(tree: Tree, lists: tuple[str, ...]) -> _Found:
    """The samples that a metadata file lists, in its order."""
    found, num_several = _Found(), 0
    for row in rows_of(tree, lists[0]) if len(lists) == 1 else rows_of_lists(tree, lists[0], lists[1]):
        try:
            path = tree.relative(row.media)
            stem, suffix = splitext(path)
            stems = (stem, f"videos/{stem}")
            media = next((each + suffix for each in stems if each + suffix in tree), None)
            computed = next((each for each in stems if each + LATENT in tree), None)
            if suffix.lower() not in _MEDIA:
                found.bad.append(_Bad(row.where, f"{row.media} is no film or picture", f"known are {' '.join(_MEDIA)}"))
            elif media:
                _add(found, tree, row.where, media.removesuffix(suffix), media, row.caption)
            elif computed:
                _add(found, tree, row.where, computed, None, row.caption)
            else:
                found.bad.append(_Bad(row.where, f"there is no file {tree.path(path)}", "correct the list"))
        except Outside as outside:
            raise ConfigError(f"{row.where}: {outside}") from None
        num_several += row.num_captions > 1
    if num_several:
        found.remarks.append(f"samples with more than one caption: {num_several}; the first of each is used")
    return found


def _side_by_side(tree: Tree) -> _Found:
    """Every film, picture and latent of the folder with the text file of its name, in the order of their names."""
    found = _Found()
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
    for stem, paths in sorted(media.items()):
        if len(paths) > 1 and stem + LATENT in tree:
            raise ConfigError(f"{tree.path(stem + LATENT)}: is it of {' or of '.join(paths)}? Rename one of them")
        try:
            caption = _read_caption(tree, texts[stem]) if stem in texts else None
        except Outside:
            raise
        except ConfigError as error:
            found.bad.append(_Bad(f"{tree.folder}/{stem}", str(error), ""))
            continue
        for path in paths:
            if path in tree:  # or it says that it leads out
                _add(found, tree, f"{tree.folder}/{path}", stem, path, caption)
        if not paths:
            _add(found, tree, f"{tree.folder}/{stem}{LATENT}", stem, None, caption)
    if tree.not_followed:
        found.remarks.append(f"links to folders are not followed: {_few(tree.not_followed)}")
    return found


def _read_caption(tree: Tree, path: str) -> str:
    if path not in tree:  # says so where it leads out
        raise ConfigError(f"{tree.path(path)} is no file")
    return "\n".join(line for _, line in tree.lines(path, 4 * _LONGEST)).strip()


def _add(found: _Found, tree: Tree, where: str, stem: str, media: str | None, caption: str | None) -> None:
    """Takes in a sample with what lies beside it, or says what is wrong with it."""
    latent, embedding = (tree.path(stem + kind) if stem + kind in tree else None for kind in (LATENT, EMBEDDING))
    if caption is None and embedding is None:
        found.bad.append(_Bad(where, _NO_CAPTION, f"write one, for instance into {stem}.txt"))
    elif len(caption or "") > _LONGEST:
        found.bad.append(_Bad(where, f"its caption has more than {_LONGEST:,} characters", "shorten it"))
    elif not _is_proper(stem) or not _is_proper(caption or ""):
        found.bad.append(_Bad(where, "its name or caption is not proper Unicode", "correct it"))
    else:
        path = None if media is None else tree.path(media)
        found.sources.append(Source(media or stem + LATENT, path, caption, latent, embedding))


def _is_proper(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character: of a file name in another encoding, or written into JSON
        return False
    return True


def _refuse_for_nothing(found: _Found, folder: Path, hint: str) -> None:
    if not found.bad:
        raise ConfigError(f"{folder}: there is no film or picture in it ({' '.join(_MEDIA)}){hint}")
    if all(each.wrong == _NO_CAPTION for each in found.bad):
        raise ConfigError(
            f"{folder}: not one of {len(found.bad)} samples has a caption; expected a.txt beside a.mp4, "
            f"or one of {', '.join(TABLES)}{hint}"
        )


def _judge(found: _Found, leave_out_bad: bool) -> None:
    """Refuses bad samples, or notes that they are left out."""
    good, bad = len(found.sources), found.bad
    if bad and not (good and leave_out_bad):
        others = f" ({len(bad) - 1} more of {good + len(bad)} samples are bad)" if len(bad) > 1 else ""
        fix = f"; {bad[0].fix}" if bad[0].fix else ""
        way_out = ", or go on without it by --leave_out_bad" if good else ""
        raise ConfigError(f"{bad[0].sample}: {bad[0].wrong}{others}{fix}{way_out}")
    if bad:
        told = _few([f"{each.sample} ({each.wrong})" for each in bad])
        found.remarks.append(f"{len(bad)} of {good + len(bad)} samples are left out: {told}")
    if empty := sum(source.caption == "" for source in found.sources):
        found.remarks.append(f"{empty} of {good} captions are empty; these samples are learned without text")


def _few(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def _nested_list(tree: Tree) -> str:
    """A hint, where the list of samples lies deeper than expected."""
    nested = next((path for path in sorted(tree.walk()) if path.rpartition("/")[2] in TABLES), None)
    return f"; there is {tree.path(nested)}: give the folder it is in" if nested else ""


def _with_unique_names(sources: list[Source]) -> list[Source]:
    """Names as short as they can be: a.mp4 is called a, unless there is an a.png; listed again it is a#2."""

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
