"""Writes the schemas in this folder from custom resource definitions:

    python tests/schemas/trim.py jobset.x-k8s.io_jobsets.yaml jobset.json "kubernetes-sigs/jobset COMMIT"

It drops descriptions and the status, and forbids unknown fields, as an API server does with `--validate=strict`. The
CEL rules (`x-kubernetes-validations`) are dropped too: JSON Schema cannot express them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

NOTICE = "Copyright of its authors, under the Apache License 2.0; trimmed by tests/schemas/trim.py."


def trimmed(node: Any, *, is_schema: bool = True) -> Any:
    """The schema without what validation does not need; names of properties are not keywords."""
    if isinstance(node, list):
        return [trimmed(each) for each in node]
    if not isinstance(node, dict):
        return node
    if not is_schema:
        return {name: trimmed(each) for name, each in node.items()}
    kept = {
        key: trimmed(value, is_schema=key != "properties")
        for key, value in node.items()
        if key not in ("description", "default", "format") and not key.startswith("x-kubernetes-")
    }
    open_ended = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
    if "properties" in node and not open_ended:
        kept["additionalProperties"] = False
    return kept


def main(source: Path, target: Path, origin: str) -> None:
    definition = yaml.safe_load(source.read_text())
    [version] = [each for each in definition["spec"]["versions"] if each["storage"]]
    schema = trimmed(version["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    group, kind = definition["spec"]["group"], definition["spec"]["names"]["kind"]
    schema["properties"]["apiVersion"] = {"const": f"{group}/{version['name']}"}
    schema["properties"]["kind"] = {"const": kind}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    document = {"$comment": f"{kind} from {origin}. {NOTICE}", **schema}
    target.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
