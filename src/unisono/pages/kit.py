"""Renders a page: a Jinja2 template in the common skeleton, as one HTML file that needs no network.

A page is a template `NAME.html` that extends `base.html`. A style sheet `NAME.css` and a script `NAME.js` beside it are
added to the common ones. Everything that a template inserts is escaped, unless the code has made it `Markup`.
"""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_HERE = Path(__file__).parent


def render(template: Path, *, kind: str, title: str, media: str = "data:", charts: bool = False, **context: Any) -> str:
    """The page as HTML.

    `kind` names the command that writes it; by this name a later run recognises its own pages (`generator`). `media`
    says where audio and video may come from. `charts` adds the script that shows a chart's values under the pointer.
    """
    style = _read(_HERE / "style.css") + _read(template.with_suffix(".css"))
    script = (_read(_HERE / "chart.js") if charts else "") + _read(template.with_suffix(".js"))
    # Only our own style and script apply, whatever the shown data contains, and the page fetches nothing.
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"media-src {media}; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )
    environment = Environment(
        loader=FileSystemLoader([template.parent, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    own = {"policy": Markup(policy), "style": Markup(style), "script": Markup(script)}
    return environment.get_template(template.name).render(kind=kind, title=title, **own, **context)


def generator(kind: str) -> str:
    """The element near the beginning of a page by which unisono recognises its own pages."""
    return f'<meta name="generator" content="unisono {kind}">'


def relative_link(path: Path, folder: Path) -> str:
    """The URL of a file relative to the page's folder; whatever characters the name has, the result is only a path."""
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    return "./" + quote(os.fsencode(relative.replace(os.sep, "/")), safe="/")


def web_link(address: str) -> str:
    """A web address for a link; empty for anything but http and https."""
    is_web = address.lower().startswith(("http://", "https://"))
    return quote(address, safe="%/:=&?~+!$,;@()*[]#") if is_web else ""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _digest(text: str) -> str:
    """A style or script as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _printable(value: Any) -> Any:
    """Replaces characters that cannot be printed: file names and titles may contain terminal or bidi controls."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(sign if sign.isprintable() else " " if sign.isspace() else "�" for sign in value)
