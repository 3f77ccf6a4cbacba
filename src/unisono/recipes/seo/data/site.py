"""The pages of a site: a folder of HTML files, a sitemap, or a list of files.

Only files in the folder (or next to the sitemap or list) are read. The URLs of a sitemap are looked up there by their
path, in the layout of `wget --mirror` and of static site generators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.common.tree import Outside, Tree, one_line
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.lines import lines_of, plain_suffix, read_start

if TYPE_CHECKING:
    from lxml.etree import _Element as Element

PAGES = (".html", ".htm", ".xhtml")

_MAX_BYTES = 2**26  # the sitemap protocol allows 50 MB
_MAX_SITEMAPS = 1000
_ADDRESS = re.compile(r"https?://", re.IGNORECASE)


def pages_of(
    path: str | Path, *, leave_out_bad: bool = False, remark: Callable[[str], None] = lambda text: None
) -> list[tuple[str, Path]]:
    """Returns the pages of a site with their names: the path in the folder, or the entry of the sitemap or list.

    A listed page that does not exist raises an error; with `leave_out_bad`, it is skipped with a remark.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        tree = Tree(place)
        names = sorted(name for name in tree.walk() if name.lower().endswith(PAGES) and name in tree)
        if not names:
            raise ConfigError(one_line(f"{place}: it has no pages; expected files {' '.join(PAGES)}"))
        return [(name, tree.path(name)) for name in names]
    bad, tree = BadRows(leave_out_bad), Tree(place.parent)
    pages: dict[str, Path] = {}
    for where, name in _listed(place):
        try:
            file = _file_of(name, tree)
        except Outside as outside:
            raise ConfigError(one_line(f"{where}: {outside}")) from None
        if file is None:
            bad.add(where, f"{shown(name)} does not exist in {place.parent}")
        else:
            pages.setdefault(name, file)
    bad.report(remark, len(pages), "page", place)
    return list(pages.items())


def addresses_in(path: str | Path) -> list[str]:
    """Returns the entries of a sitemap or a list: URLs or file names."""
    return list(dict.fromkeys(name for _, name in _listed(Path(path).expanduser())))


def _listed(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the location and name of every entry."""
    if not path.is_file():
        raise ConfigError(one_line(f"{path}: expected a folder of pages, a sitemap (.xml) or a list of files (.txt)"))
    if plain_suffix(path) == ".xml":
        yield from _sitemap(path)
    elif plain_suffix(path) in (".txt", ".list", ".urls", ""):
        length = 0
        for number, line in lines_of(path):
            length += len(line)
            if length > _MAX_BYTES:
                raise ConfigError(one_line(f"{path}: longer than {_MAX_BYTES // 2**20} MiB; expected a list of files"))
            if line.strip() and not line.lstrip().startswith("#"):
                yield f"{path}, line {number}", line.strip()
    else:
        raise ConfigError(one_line(f"{path}: expected a folder of pages, a sitemap (.xml) or a list of files (.txt)"))


def _sitemap(top: Path) -> Iterator[tuple[str, str]]:
    tree, waiting, sitemaps = Tree(top.parent), [top], {top}
    while waiting:
        path = waiting.pop(0)
        kind, locations = _locations(path)
        for location in locations:
            if kind == "urlset":
                yield str(path), location
                continue
            # A sitemap index: its sitemaps must be in the same folder, whatever their URLs are.
            file = _file_of(location, tree) or _file_of(location.rpartition("/")[2], tree)
            if file is None:
                raise ConfigError(
                    one_line(f"{path} lists the sitemap {shown(location)}, which is missing; put it in the same folder")
                )
            if file not in sitemaps and len(sitemaps) < _MAX_SITEMAPS:
                sitemaps.add(file)
                waiting.append(file)


def _locations(path: Path) -> tuple[str, list[str]]:
    from lxml import etree

    content = read_start(path, _MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ConfigError(one_line(f"{path}: larger than {_MAX_BYTES // 2**20} MiB; a sitemap is 50 MB at most"))
    root = sitemap_root(content, path)
    kind = etree.QName(root).localname
    return kind, [text for each in root.iter("{*}loc") if _is_entry(each) and (text := (each.text or "").strip())]


def sitemap_root(content: bytes, where: object) -> Element:
    """Returns the root of a sitemap, <urlset> or <sitemapindex>; `where` names it in errors."""
    from lxml import etree

    # The file is not trusted, so entities, network access and external documents are disabled.
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    try:
        root = etree.fromstring(content, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise ConfigError(one_line(f"{where}: not valid XML ({error})")) from None
    kind = etree.QName(root).localname
    if kind not in ("urlset", "sitemapindex"):
        raise ConfigError(one_line(f"{where}: expected a sitemap, <urlset> or <sitemapindex>, found <{kind}>"))
    return root


def _is_entry(loc: Element) -> bool:
    """Returns whether an element is the <loc> of a page; <image:loc> and <video:loc> are nested deeper."""
    from lxml import etree

    parent = loc.getparent()
    return parent is not None and etree.QName(parent).localname in ("url", "sitemap")


def _file_of(name: str, tree: Tree) -> Path | None:
    """Returns the file of a name or URL; None if it does not exist."""
    if _ADDRESS.match(name):
        host, _, inside = re.split("[?#]", _ADDRESS.sub("", name), maxsplit=1)[0].partition("/")
        inside = unquote(inside).lstrip("/")
        starts = [f"{host}/{inside}", inside]  # wget creates a folder for the host
    else:
        starts = [unquote(name), name] if "%" in name else [name]
    for start in starts:
        if "\0" in start:
            continue
        relative = tree.relative(start) if start else "."
        base = "" if relative == "." else relative
        for ending in ("", ".html", "/index.html", "/index.htm", ".htm"):
            candidate = f"{base}{ending}".lstrip("/")
            if candidate and candidate in tree:
                return tree.path(candidate)
    return None
