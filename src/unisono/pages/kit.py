"""Renders a Jinja2 template to one HTML file that needs no network.

A page is a template `NAME.html` that extends `base.html`. If the same folder contains a style sheet `NAME.css` or a
script `NAME.js`, these are added to the common ones. Templates escape all text that is not `Markup`.
"""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from unisono.formatting import printable

_HERE = Path(__file__).parent


def render(
    template: Path,
    *,
    kind: str,
    title: str,
    media: str = "data:",
    charts: bool = False,
    shares: Path | None = None,
    connects: bool = False,
    **context: Any,
) -> str:
    """Returns the page as HTML.

    `kind` is the name of the command that writes the page, by which the command later recognises its own pages
    (`generator`). `media` is the allowed source of audio and video. `charts` adds the script that shows a chart's
    values under the pointer. `shares` is another page's template, whose style and folder this page uses too.
    `connects` lets the page request updates from its own server. `context` contains the template's variables.
    """
    style = _read(_HERE / "style.css") + (_read(shares.with_suffix(".css")) if shares else "")
    style += _read(template.with_suffix(".css"))
    script = (_read(_HERE / "chart.js") if charts else "") + _read(template.with_suffix(".js"))
    # The policy allows only the page's own style and script, and no requests, whatever the data contains.
    own_server = "connect-src 'self'; " if connects else ""
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; {own_server}img-src data:; "
        f"media-src {media}; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )
    own = {"policy": Markup(policy), "style": Markup(style), "script": Markup(script)}
    folders = (template.parent, *([shares.parent] if shares else []))
    return _environment(folders).get_template(template.name).render(kind=kind, title=title, **own, **context)


def render_part(template: Path, macro: str, *arguments: Any, shares: Path | None = None) -> Markup:
    """Returns a part of a page, which a macro of a template draws."""
    folders = (template.parent, *([shares.parent] if shares else []))
    return Markup(getattr(_environment(folders).get_template(template.name).module, macro)(*arguments))


@cache
def _environment(folders: tuple[Path, ...]) -> Environment:
    return Environment(
        loader=FileSystemLoader([*folders, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def generator(kind: str) -> str:
    """Returns the HTML element by which unisono recognises its own pages; it is near the start of a page."""
    return f'<meta name="generator" content="unisono {kind}">'


def relative_link(path: Path, folder: Path) -> str:
    """Returns the URL of a file relative to the page's folder, with special characters escaped."""
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    return "./" + quote(os.fsencode(relative.replace(os.sep, "/")), safe="/")


def web_link(address: str) -> str:
    """Returns a web address for use in a link; empty if it is neither http nor https."""
    is_web = address.lower().startswith(("http://", "https://"))
    return quote(address, safe="%/:=&?~+!$,;@()*[]#") if is_web else ""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _digest(text: str) -> str:
    """Returns the hash of a style or script for the content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
