"""Temporary local copies of a run in object storage, for commands that read a run folder."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.checkpoint.commit import BEST
from unisono.checkpoint.find import is_step
from unisono.errors import UserError
from unisono.mirror.download import download_file, download_newest
from unisono.mirror.local_folders import cache_folder
from unisono.mirror.remote_checkpoints import CHECKPOINTS
from unisono.mirror.run_record import read_record
from unisono.observe.folder import EVENTS, METRICS, RUN
from unisono.plain_files import read_json
from unisono.storage.addresses import check_address, is_address
from unisono.storage.store import Store, patiently


@contextmanager
def local_run(run: str, *, step: str | None = None, records: bool = False) -> Iterator[Path]:
    """Yields the folder of a run. For an address, it is a temporary copy of run.json and the newest valid checkpoint.

    `step` selects another checkpoint: its step, or "best". With `records`, the copy contains metrics, events and
    previews instead of a checkpoint.
    """
    if not is_address(run):
        yield Path(run)
        return
    store = Store(check_address("run", run))
    record = patiently(lambda: read_record(store))
    if record is None:
        raise UserError(f"{store.address} is not the folder of a run (no {RUN})")
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{cache} cannot be created ({error.strerror}); set XDG_CACHE_HOME") from None
    with tempfile.TemporaryDirectory(prefix="copy-", dir=cache) as temporary:
        folder = Path(temporary)
        files = patiently(store.files)
        wanted = [RUN, f"{CHECKPOINTS}/{BEST}"]
        if records:
            wanted += [METRICS, EVENTS, *(name for name in files if name.startswith("previews/") and ".." not in name)]
        for name in wanted:
            if name in files:
                download_file(store, name, folder / name)
        if not records:
            number = _number(step, folder / CHECKPOINTS / BEST, store.address)
            identity = {"recipe": record["recipe"], "run": record.get("id")}
            path = download_newest(store, folder / CHECKPOINTS, identity, _note, step=number)
            if path is None:
                raise UserError(f"{store.address} has no checkpoint" + ("" if number is None else f" of step {number}"))
        yield folder


def _number(step: str | None, best: Path, address: str) -> int | None:
    if step in (None, "newest"):
        return None
    assert step is not None
    if step == "best":
        try:
            return int(read_json(best)["step"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{address} has no best checkpoint; train with --best_metric, or export another step"
            ) from None
    if not is_step(step):
        raise UserError(f"--step {step}: expected a number, newest or best")
    return int(step)


def _note(line: str) -> None:
    print(f"unisono: {line}", file=sys.stderr)
