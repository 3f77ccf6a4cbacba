"""Writes skypilot.json from an installed SkyPilot, whose schema is Python code:

    pip install skypilot && python tests/schemas/skypilot_task.py tests/schemas/skypilot.json

SkyPilot checks a task in several passes: the fields of the task, then its resources, then each file mount. The result
contains all three. Unknown keywords of SkyPilot's own (case_insensitive_enum) become plain ones; fields that a user may
not set (they begin with _) and descriptions are dropped.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trim import NOTICE


def plain(node: Any, *, is_schema: bool = True) -> Any:
    if isinstance(node, list):
        return [plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    if not is_schema:
        return {name: plain(each) for name, each in node.items() if not name.startswith("_")}
    kept = {
        key: plain(value, is_schema=key not in ("properties", "patternProperties"))
        for key, value in node.items()
        if key not in ("description", "$schema", "case_insensitive_enum", "case_sensitive_enum")
    }
    names = node.get("case_insensitive_enum") or node.get("case_sensitive_enum")
    return (
        {**kept, "enum": sorted({str(each) for each in names} | {str(each).lower() for each in names})}
        if names
        else kept
    )


def main(target: Path) -> None:
    from sky.utils import schemas

    task, resources, storage = map(
        plain, (schemas.get_task_schema(), schemas.get_resources_schema(), schemas.get_storage_schema())
    )
    del task["properties"]["config"]  # settings of a site, hundreds of lines
    for name in ("service", "pool", "file_mounts_mapping", "volume_mounts"):
        del task["properties"][name]
    recovery = [each for each in resources["properties"]["job_recovery"]["anyOf"] if each["type"] == "object"]
    recovery[0]["additionalProperties"] = False  # on a server without plugins
    task["properties"]["resources"] = resources
    task["properties"]["file_mounts"] = {
        "type": "object",
        "additionalProperties": {"anyOf": [{"type": "string"}, storage]},
    }
    document = {
        "$comment": f"Task of SkyPilot {version('skypilot')}. {NOTICE.replace('trim', 'skypilot_task')}",
        **task,
    }
    target.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
