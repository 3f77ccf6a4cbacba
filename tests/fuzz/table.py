"""Every reader of foreign bytes, declared once. A new reader belongs into one of these lists."""

from __future__ import annotations

from fuzz import of_data, of_media, of_runs, of_sites
from fuzz.reader import Reader

READERS: tuple[Reader, ...] = (*of_runs.READERS, *of_data.READERS, *of_media.READERS, *of_sites.READERS)
