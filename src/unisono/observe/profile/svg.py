"""Writes a picture as one SVG file that needs no network and follows the reader's light or dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unisono.formatting import printable, shorten

COLOURS = 8
_STYLE = """
svg { background: #fff; font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
text { fill: #16191f; } .soft { fill: #5b6472; } .title { font-size: 14px; font-weight: 600; }
.right { text-anchor: end; } .rule { stroke: #d5dae2; } .area { fill: #2f6fed; fill-opacity: .16; }
.line { fill: none; stroke: #2f6fed; stroke-width: 1.6; stroke-linejoin: round; } .peak { fill: #c0262d; }
.f0 { fill: #2f6fed; } .f1 { fill: #e0700d; } .f2 { fill: #12885a; } .f3 { fill: #a23fd0; }
.f4 { fill: #d1365b; } .f5 { fill: #0d8fa8; } .f6 { fill: #b39b00; } .f7 { fill: #9aa4b3; }
@media (prefers-color-scheme: dark) {
  svg { background: #181c23; } text { fill: #e8ebf0; } .soft { fill: #9aa4b3; } .rule { stroke: #39414d; }
  .area { fill: #7aa7ff; } .line { stroke: #7aa7ff; } .peak { fill: #ff7b7f; }
  .f0 { fill: #7aa7ff; } .f1 { fill: #ff9f4a; } .f2 { fill: #4fcf9b; } .f3 { fill: #d08bf5; }
  .f4 { fill: #ff7f9d; } .f5 { fill: #4cc9e0; } .f6 { fill: #d6c24a; } .f7 { fill: #7d8796; }
}
"""


def text(x: float, y: float, content: str, kind: str = "", longest: int = 120) -> str:
    """Returns the SVG of a text at a position."""
    of_class = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of_class}>{_plain(content, longest)}</text>'


def rectangle(x: float, y: float, width: float, height: float, colour: int, tip: str = "") -> str:
    """Returns the SVG of a rectangle in one of the colours; `tip` appears when the pointer is over it."""
    title = f"<title>{_plain(tip, 300)}</title>" if tip else ""
    place = f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.0):.2f}" height="{height:.1f}"'
    return f'<rect class="f{colour % COLOURS}" {place}>{title}</rect>'


def rule(x1: float, y1: float, x2: float, y2: float) -> str:
    """Returns the SVG of a thin line."""
    return f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def legend(x: float, y: float, names: Sequence[tuple[str, int]], width: float) -> tuple[list[str], float]:
    """Returns the SVG parts of a legend of (name, colour) pairs, and the y coordinate below it."""
    parts, left = [], x
    for name, colour in names:
        needed = 22 + 6.6 * len(name)
        if left + needed > width and left > x:
            left, y = x, y + 18
        parts += [rectangle(left, y - 9, 11, 11, colour), text(left + 16, y, name, "soft")]
        left += needed + 8
    return parts, y + 18


def picture(width: float, height: float, parts: Sequence[str], description: str) -> str:
    """Returns the content of the SVG file."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    label = f'role="img" aria-label="{_plain(description, 300)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>'
    return f"{head}\n<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"


def _plain(content: str, longest: int) -> str:
    return escape(shorten(printable(content), longest), quote=True)
