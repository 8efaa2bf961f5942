"""The folder of an evaluation: one at a time in it, gone on with or moved aside, never overwritten.

protocol.json    while an evaluation is unfinished: what its answers depend on (``record.py``)
result.json      when it is finished: the figures, and the same under "protocol"
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from vlm_pg.errors import ConfigError
from vlm_pg.eval.record import differences, read_record
from vlm_pg.files import write_json_atomic
from vlm_pg.observe.run_folder import free_name
from vlm_pg.observe.run_lock import LOCK, RunLock

PROTOCOL, RESULT = "protocol.json", "result.json"
_MOST_DIFFERENCES = 6
# A checkpoint lies at RUN/checkpoints/NAME; weights may lie one folder below that.
_MAX_PARENTS = 3


@dataclass(frozen=True)
class OpenedFolder:
    """``path``: the folder. ``machines_before``: those that began this evaluation, if it goes on (``record.py``).
    ``lock_holder``: the process that holds the folder's lock, and gives it back on ``close``."""

    path: Path
    machines_before: list[dict[str, Any]]
    lock_holder: int

    def close(self) -> None:
        """Give the lock back; nothing in processes that do not hold it."""
        if os.getpid() == self.lock_holder and (lock := _locks.pop(self.path, None)) is not None:
            lock.release()


_locks: dict[Path, RunLock] = {}


def run_above(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in; None: it lies in none."""
    # As it was given first, so that messages name the folder as the user does.
    for parent in [*list(checkpoint.parents)[:_MAX_PARENTS], *list(checkpoint.resolve().parents)[:_MAX_PARENTS]]:
        if (parent / "config.yaml").is_file() and (parent / "checkpoints").is_dir():
            return parent
    return None


def open_folder(
    folder: Path, record: dict[str, Any], resume: Literal["auto", "never"], announce: Callable[[str], None]
) -> OpenedFolder:
    """Make the folder ready for an evaluation with this record, and lock it.

    A finished evaluation in it is moved aside, an unfinished one of the same protocol gone on with.

    Raises:
        ConfigError: another process evaluates there, or an unfinished evaluation had another protocol.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock.take(folder, announce)
    try:
        before = _begun(folder, record, resume)
        if before is None and any(entry.name != LOCK for entry in folder.iterdir()):
            move_aside(folder, [entry for entry in folder.iterdir() if entry.name != LOCK], announce)
        machines = [] if before is None else _machines(before, record, announce)
        write_json_atomic(folder / PROTOCOL, record | {"machines_before": machines})
    except BaseException:
        lock.release()
        raise
    _locks[folder] = lock
    return OpenedFolder(folder, machines, os.getpid())


def move_aside(folder: Path, entries: Iterable[Path], announce: Callable[[str], None]) -> None:
    """Move what an earlier evaluation left in ``folder`` to a folder of its own beside it, and say so."""
    aside = free_name(folder, datetime.now().strftime("%Y%m%d-%H%M%S"))
    aside.mkdir()
    for entry in sorted(entries):
        entry.rename(aside / entry.name)
    announce(f"{folder} holds an earlier evaluation: moved it to {aside}")


def _machines(before: dict[str, Any], record: dict[str, Any], announce: Callable[[str], None]) -> list[dict[str, Any]]:
    """Those that answered before this one; what differs between the last of them and this one is said."""
    for line in differences(before["machine"], record["machine"]):
        announce(f"answers so far were given on another machine, which may round otherwise: {line}")
    machines = [*before.get("machines_before", []), before["machine"]]
    return [one for place, one in enumerate(machines) if one != record["machine"] and one not in machines[:place]]


def _begun(folder: Path, record: dict[str, Any], resume: Literal["auto", "never"]) -> dict[str, Any] | None:
    """The record of the unfinished evaluation to go on with; None: there is none."""
    if resume == "never" or not (folder / PROTOCOL).exists() or (folder / RESULT).exists():
        return None
    if not any(folder.glob("answers_*")):  # refused or killed before the first answer
        for name in (PROTOCOL, "bad_samples.jsonl"):
            (folder / name).unlink(missing_ok=True)
        return None
    before = read_record(folder / PROTOCOL)
    found = differences(before["decides"], record["decides"])
    if not found:
        return before
    shown = "; ".join(found[:_MOST_DIFFERENCES])
    further = f" and {len(found) - _MOST_DIFFERENCES} more" if len(found) > _MOST_DIFFERENCES else ""
    raise ConfigError(
        f"{folder} holds an unfinished evaluation with another protocol: {shown}{further}. "
        "Answers under different protocols are not put together. Repeat it as it was, or set eval.resume=never, which "
        "moves it aside."
    )
