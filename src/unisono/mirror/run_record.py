"""Reads the run.json of a run in object storage, and compares it with the local run.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.errors import UserError
from unisono.observe.folder import RUN
from unisono.observe.side_process.child import GiveUp
from unisono.plain_files import parse_json
from unisono.storage.store import Store


def read_record(store: Store) -> dict[str, Any] | None:
    """Returns the content of run.json in the store; None if it does not exist."""
    content = store.read(RUN)
    if content is None:
        return None
    try:
        record = parse_json(content)
    except ValueError as error:
        raise UserError(f"{store.address}/{RUN} is damaged ({error}); restore it or choose another address") from None
    if not isinstance(record, dict) or not isinstance(record.get("recipe"), str):
        raise UserError(f"{store.address}/{RUN} does not describe a run; choose another address")
    return record


def continues(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Returns whether our record contains all starts in theirs; if not, the run was continued from another folder."""
    known, starts = ours.get("starts"), theirs.get("starts")
    return isinstance(known, list) and isinstance(starts, list) and known[: len(starts)] == starts


def other_run(store: Store) -> GiveUp:
    """Returns the error to raise if the store holds another run."""
    return GiveUp(f"{store.address} holds another run; choose another address for the copy of this run")
