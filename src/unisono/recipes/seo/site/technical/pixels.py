"""Estimates how wide a text is in search results, which truncate titles and descriptions by pixels.

Search engines use a font with the character widths of Helvetica (Arial, Liberation Sans). The widths are from the
standard fonts of PDF.
"""

from __future__ import annotations

import unicodedata

TITLE_FONT, DESCRIPTION_FONT = 20, 14
"""Font sizes in pixels."""
MAX_TITLE, MAX_DESCRIPTION = 600, 960
"""Widths in pixels at which results on a desktop are truncated."""

# Width -> characters, in thousandths of the font size.
_WIDTHS = {
    191: "'",
    222: "ijl‘’‚",
    260: "|",
    278: " !,./:;I[\\]ft",
    333: "()-`r“”„",
    334: "{}",
    355: '"',
    350: "•",
    389: "*",
    469: "^",
    500: "Jckszvxy",
    556: "#$0123456789?L_abdeghnopqu–€",
    584: "+<=>~",
    611: "FTZ",
    667: "&ABEKPSVXY",
    722: "CDHNRUw",
    778: "GOQ",
    833: "Mm",
    889: "%",
    944: "W",
    1000: "—…",
    1015: "@",
}
_WIDTH_OF = {letter: width for width, letters in _WIDTHS.items() for letter in letters}
_WIDE, _USUAL = 1000, 556


def pixels(text: str, font_size: int) -> int:
    """Returns the width of a text in pixels; a letter of a non-Latin script counts as an average or a wide letter."""
    letters = unicodedata.normalize("NFD", " ".join(text.split()))
    return round(sum(_width(letter) for letter in letters) * font_size / 1000)


def _width(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    is_wide = unicodedata.east_asian_width(letter) in "WF"
    return _WIDTH_OF.get(letter, _WIDE if is_wide else _USUAL)
