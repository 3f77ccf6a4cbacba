"""The report's section about profiles: where the step waits, the operators and kernels that take most time, memory.

Reads files that may be damaged or that somebody else has put there. Pictures are drawn again from the numbers, so the
page never contains a picture from the run folder.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from unisono.formatting import format_count, format_number, shorten
from unisono.observe.profile.files import FOLDER, folders_of, steps_text
from unisono.observe.profile.pictures import memory_picture, memory_title, waits_picture
from unisono.observe.profile.read import Profile, read_memory, read_profile
from unisono.observe.profile.summary import block_cells, kernel_cells, operator_cells, operator_heads

MOST_PROFILES, MOST_ROWS = 5, 12
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError)


def profile_section(run_folder: Path) -> dict[str, Any]:
    """Returns what the report shows about the profiles in a run folder, newest first."""
    shown: list[dict[str, Any]] = []
    omitted: list[str] = []
    for folder in reversed(folders_of(run_folder, "steps")[-MOST_PROFILES:]):
        try:
            shown.append(_profile(read_profile(folder)))
        except _DAMAGED:
            omitted.append(f"{shorten(folder.name, 60)}: its summary is missing or damaged")
    return {"profiles": shown, "profiles_not_shown": omitted}


def _profile(profile: Profile) -> dict[str, Any]:
    content, folder = profile.summary, profile.folder
    ranks, memory = content["ranks"][:1000], read_memory(folder, 0)
    title = steps_text(int(content["first_step"]), int(content["last_step"])).capitalize()
    return {
        "title": title,
        "folder": f"{FOLDER}/{folder.name}",
        "facts": _facts(content),
        "notes": [shorten(str(note), 400) for note in content["notes"][:20]],
        "waits": _as_image(waits_picture(ranks)),
        "kernels": kernel_cells(content, MOST_ROWS),
        "operator_heads": operator_heads(content),
        "operators": operator_cells(content, MOST_ROWS),
        "memory": _as_image(memory_picture(memory, memory_title(0, str(content["device"])))) if memory else "",
        "blocks": block_cells(content["memory"], MOST_ROWS) if content["memory"] else [],
    }


def _facts(content: dict[str, Any]) -> str:
    ranks = content["ranks"]
    times = [rank["step_ms"] for rank in ranks]
    text = f"{format_count(int(content['world']), 'rank')}, {shorten(str(content['device']), 80)}. "
    text += f"Mean step {format_number(max(times), 3)} ms"
    if len(times) > 1:
        slowest = ranks[times.index(max(times))]["rank"]
        text += f" on rank {int(slowest)}, {format_number(min(times), 3)} ms on the fastest rank"
    before = content["unprofiled_step_ms"]
    return text + (f"; {format_number(before, 3)} ms without the profiler." if before else ".")


def _as_image(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
