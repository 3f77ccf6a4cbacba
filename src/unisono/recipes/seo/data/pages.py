"""Parses an HTML page: title, description, headings, visible text, links and images.

Invalid HTML raises no error: the parser reads as much as it can, and `problems` lists the defects. The text contains
everything that a visitor sees, because the checks count its words. A main-text extractor is no replacement: on 150
pages of documentation, trafilatura 2.3 kept 69 % of the words, lost headings on every page, and took ten times as long.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lxml.etree import _Element as Element

MAX_BYTES = 2**25
"""Maximum size of a page; longer pages are truncated."""

_MAGIC = {
    b"%PDF": "a PDF",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"RIFF": "a WebP image or a sound",
    b"PK\x03\x04": "a ZIP archive or an office document",
    b"\x1f\x8b": "compressed with gzip",
    b"\x7fELF": "a program",
    b"\xd0\xcf\x11\xe0": "an old office document",
}
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_DECLARED = re.compile(rb"""<meta[^>]{0,500}?charset\s*=\s*["']?\s*([\w.:-]{2,40})""", re.IGNORECASE)
_XML_DECLARED = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([\w.:-]{2,40})""", re.IGNORECASE)
_DECLARED_WITHIN = 4096  # bytes to search for the declaration; browsers search only 1,024 bytes
# Encodings that browsers use instead of the declared one (WHATWG's table of labels). If a declaration of UTF-16 can be
# read as ASCII, it must be wrong.
_MEANS = {"iso8859-1": "cp1252", "ascii": "cp1252", "utf-16": "utf-8", "utf-16-le": "utf-8", "utf-16-be": "utf-8"}
_NO_TEXT_CODECS = ("utf-7", "idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape", "mbcs", "oem")

_INVISIBLE = frozenset(
    ("head", "title", "script", "style", "noscript", "template", "svg", "iframe", "object", "canvas", "audio", "video")
)
_INLINE = re.compile(
    r"a|abbr|acronym|b|bdi|bdo|big|br|cite|code|data|del|dfn|em|font|i|img|ins|kbd|label|mark|q|s|samp|small|span|strike"
    r"|strong|sub|sup|time|tt|u|var|wbr"
)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_TAG = re.compile(r"<(?:!doctype|/?[a-z][a-z0-9-]*)[\s>/]", re.IGNORECASE)
_QUOTED = re.compile(r"""(?>"[^"]*"|'[^']*')""")
_WHOLE_TAG = re.compile(r"""<[a-z](?>[^<>"']++|"[^"]*"|'[^']*')*+""", re.IGNORECASE)
_MAX_ATTRIBUTES = 5_000
# Error codes of libxml2. Its other errors are ignored, because it does not know HTML 5 elements such as <nav>.
_END_TAG_ALONE, _OVER_A_LIMIT = 76, 114


@dataclass(frozen=True)
class Page:
    """The content of an HTML page."""

    name: str
    title: str | None = None
    """None if the element is missing, "" if it is empty; likewise for the description."""
    description: str | None = None
    headings: list[tuple[int, str]] = field(default_factory=list)
    """Level (1 to 6) and text of each heading, in page order."""
    text: str = ""
    """Visible text; paragraphs, headings and cells are separated by an empty line."""
    links: list[str] = field(default_factory=list)
    """URLs as they appear in the page."""
    images: list[tuple[str, str | None]] = field(default_factory=list)
    """URL and alt text of each image; None if it has no alt attribute."""
    lang: str | None = None
    canonical: str | None = None
    encoding: str | None = None
    """Encoding that the page was decoded with; None if it was passed as text."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of defects in the HTML."""

    @property
    def is_html(self) -> bool:
        """Whether the page has any content."""
        return bool(self.title or self.text or self.headings or self.links or self.images)


def parse_page(html: bytes | str, name: str, look: Callable[[Element], None] | None = None) -> Page:
    """Parses a page; `name` is its name in messages. Calls `look` with the root element if the page has elements."""
    problems: list[str] = []
    if len(html) > MAX_BYTES:
        problems.append(f"longer than {MAX_BYTES // 2**20} MiB: truncated")
        html = html[:MAX_BYTES]
    encoding = None
    if isinstance(html, bytes):
        kind = next((kind for magic, kind in _MAGIC.items() if html.lstrip()[:8].startswith(magic)), None)
        if kind:
            return Page(name, problems=[f"not HTML: it is {kind}"])
        html, encoding = _decoded(html, problems)
    if len(_CONTROL.findall(html)) > len(html) // 100:
        return Page(name, encoding=encoding, problems=[*problems, "not HTML: it is not text"])
    # Replace lone surrogates, which parsers and tokenizers cannot encode.
    html = _CONTROL.sub("", html).encode("utf-8", "replace").decode()
    if not html.strip():
        return Page(name, encoding=encoding, problems=[*problems, "empty"])
    if not _TAG.search(html):
        text = "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", html) if part.strip())
        return Page(name, text=text, encoding=encoding, problems=[*problems, "not HTML: it has no tag"])
    if _over_attributes(html):
        return Page(
            name, encoding=encoding, problems=[*problems, f"not HTML: a tag has over {_MAX_ATTRIBUTES:,} parts"]
        )
    root = _tree(html, problems)
    if root is None:
        return Page(name, encoding=encoding, problems=problems)
    if look is not None:
        look(root)
    headings = [(int(str(each.tag)[1]), " ".join(_visible_text(each).split())) for each in root.iter(*_HEADINGS)]
    page = Page(
        name,
        _title(root),
        _description(root),
        headings,
        _visible_text(root),
        [href.strip() for each in root.iter("a", "area") if (href := each.get("href")) is not None],
        [((each.get("src") or each.get("data-src") or "").strip(), each.get("alt")) for each in root.iter("img")],
        root.get("lang") or root.get("xml:lang"),
        next((each.get("href") for each in root.iter("link") if "canonical" in _words(each.get("rel"))), None),
        encoding,
        problems,
    )
    if not page.is_html:
        problems.append("it has no visible content")
    return page


def _over_attributes(html: str) -> bool:
    """Returns whether a tag has so many attributes that parsing, quadratic in their number, would take minutes."""
    for tag in _WHOLE_TAG.finditer(html):
        long = tag.end() - tag.start() > 2 * _MAX_ATTRIBUTES
        if long and len(re.split(r"[\s/=]+", _QUOTED.sub("", tag[0]))) > _MAX_ATTRIBUTES:
            return True
    return False


def _decoded(content: bytes, problems: list[str]) -> tuple[str, str]:
    """Decodes a page; returns the text and its encoding, found by byte order mark, by declaration, or by trial."""
    for bom, encoding in _BOMS.items():
        if content.startswith(bom):
            return _replaced(content[len(bom) :], encoding, problems), encoding
    start = content[:_DECLARED_WITHIN]
    if start.count(b"\0") > len(start) // 4:  # UTF-16 without byte order mark: every second byte of Latin text is zero
        encoding = "utf-16-le" if start[1::2].count(b"\0") > start[::2].count(b"\0") else "utf-16-be"
        return _replaced(content, encoding, problems), encoding
    declared = _XML_DECLARED.search(start) or _DECLARED.search(start)
    declared_codec = _codec(declared[1].decode("ascii", "replace")) if declared else None
    if declared and declared_codec is None:
        problems.append(f"declares the unknown encoding {declared[1].decode('ascii', 'replace')}")
    if declared_codec and declared_codec != "utf-8":
        return _replaced(content, declared_codec, problems), declared_codec
    try:
        return content.decode("utf-8"), "utf-8"
    except UnicodeDecodeError as error:
        if len(content) == MAX_BYTES and error.start > len(content) - 4:  # the page was truncated within a character
            return content[: error.start].decode("utf-8"), "utf-8"
        if declared_codec:
            problems.append("declared as UTF-8 but is not: read as Windows-1252")
        return content.decode("cp1252", "replace"), "cp1252"


def _replaced(content: bytes, encoding: str, problems: list[str]) -> str:
    text = content.decode(encoding, "replace")
    if number := text.count("\ufffd"):
        problems.append(f"{number:,} characters are not valid {encoding}")
    return text


def _codec(label: str) -> str | None:
    try:
        name = codecs.lookup(label).name
        "".encode(name)  # raises for codecs that are not for text
    except (LookupError, ValueError, UnicodeError):
        return None
    return None if name in _NO_TEXT_CODECS else _MEANS.get(name, name)


def _tree(html: str, problems: list[str]) -> Element | None:
    from lxml import etree
    from lxml.html import HTMLParser

    # Pass bytes, because lxml rejects text that begins with an XML declaration.
    parser = HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, no_network=True, huge_tree=True, recover=True
    )
    try:
        root = etree.fromstring(html.encode(), parser)
    except (etree.LxmlError, ValueError, AssertionError) as error:
        problems.append(f"not parsable as HTML ({' '.join(str(error).split())[:100]})")
        return None
    if root is None:
        problems.append("it has no visible content")
        return None
    alone = [entry.line for entry in parser.error_log if entry.type == _END_TAG_ALONE]
    if alone:
        problems.append(f"{len(alone):,} end tags without a start tag, the first in line {alone[0]}")
    if any(entry.type == _OVER_A_LIMIT for entry in parser.error_log):
        problems.append("elements are nested over 2,000 deep: truncated")
    return root


def _title(root: Element) -> str | None:
    for each in root.iter("title"):
        if not any(above.tag == "svg" for above in each.iterancestors()):
            return " ".join("".join(each.itertext()).split())
    return None


def _description(root: Element) -> str | None:
    for each in root.iter("meta"):
        if (each.get("name") or "").strip().lower() == "description":
            return " ".join((each.get("content") or "").split())
    return None


def _words(text: str | None) -> list[str]:
    return (text or "").lower().split()


def _visible_text(top: Element) -> str:
    """Returns the visible text inside `top`, which itself counts as visible."""
    from lxml import etree

    parts: list[str] = []
    num_hidden = 0
    for event, each in etree.iterwalk(top, events=("start", "end")):
        tag = str(each.tag)
        hides = each is not top and (tag in _INVISIBLE or "hidden" in each.attrib)
        between = "\0" if not _INLINE.fullmatch(tag) else "\1" if tag == "br" and event == "start" else ""
        if event == "start":
            num_hidden += hides
            parts += [] if num_hidden else [between, each.text or ""]
        else:
            parts += [] if num_hidden else [between]
            num_hidden -= hides
            parts += [] if num_hidden or each is top else [each.tail or ""]
    blocks = (
        "\n".join(line for line in (" ".join(line.split()) for line in block.split("\1")) if line)
        for block in "".join(parts).split("\0")
    )
    return "\n\n".join(block for block in blocks if block)
