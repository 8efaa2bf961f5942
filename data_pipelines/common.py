"""What the pipelines share: progress, states of files, the lock of a folder, and the gold check."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from vlm_pg.data.files import data_folder
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.rewards.gold import gold_faults as gold_faults

Item = TypeVar("Item")


def progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Yield the items; show a bar on a terminal, and a line for each quarter done otherwise."""
    if sys.stdout.isatty():
        from rich.progress import track

        yield from track(items, description=label, total=total)
        return
    next_line = 1
    for done, item in enumerate(items, start=1):
        yield item
        if done * 4 >= next_line * total:
            print(f"{label}: {done} of {total}", flush=True)
            next_line = done * 4 // total + 1


def state_of(path: Path, option: str, what: str = "Data file") -> dict[str, Any]:
    """A file or folder of records as a JSON value that changes when it does: by size and time of change.

    Raises:
        ConfigError: there is none; ``option`` named it, and messages call it ``what``.
    """
    folder = data_folder(path)
    if folder is not None:
        return {"path": str(path.resolve()), "files": [state_of(file, option) for file in folder.files]}
    if not path.is_file():
        raise ConfigError(
            f"{what} '{path}' does not exist. A file or folder as the data set's project publishes it is expected. "
            f"Correct {option}."
        )
    state = path.stat()
    return {"path": str(path.resolve()), "bytes": state.st_size, "changed_ns": state.st_mtime_ns}


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """As ``locked``; a second process is refused.

    Raises:
        ConfigError: another process holds the folder, or it cannot be made or written.
    """
    try:
        with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield
    except BlockingIOError as error:
        raise ConfigError(
            f"Another process is preparing '{folder}' at this moment. A folder has one at a time. Wait for it, or "
            "choose another --out."
        ) from error


@contextmanager
def locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the folder while preparing it (it is made if need be); a second process waits and then finds it complete.

    The system releases the lock when the process ends, however it ends. A folder in which nothing was written is
    removed again.

    Raises:
        ConfigError: the folder cannot be made or written.
        BlockingIOError: ``how`` is not to wait, and another process holds it.
    """
    lock, file = folder / ".lock", None
    while file is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = _taken(lock, how)
        except BlockingIOError:
            raise
        except FileExistsError:
            if not _may_be_a_folder(folder):
                raise ConfigError(
                    f"Cannot write to --out '{folder}': it is no folder. A folder that can be made and written is "
                    "needed. Choose another."
                ) from None
        except OSError as error:
            raise ConfigError(
                f"Cannot write to --out '{folder}': {error.strerror}. A folder that can be made and written is needed. "
                "Choose another."
            ) from error
    with file:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: what was written, or the lock of the next
                folder.rmdir()


def _taken(lock: Path, how: int) -> TextIO | None:
    """The lock, held and open; None where a holder has removed it, or its folder, meanwhile."""
    with suppress(FileNotFoundError), ExitStack() as stack:
        file = stack.enter_context(lock.open("w"))
        fcntl.flock(file, how)
        if os.path.samestat(lock.stat(), os.fstat(file.fileno())):
            stack.pop_all()
            return file
    # Closed by now, whatever happens next: others may be waiting for the very file that was removed.
    return None


def _may_be_a_folder(path: Path) -> bool:
    """Whether it is one, or nothing at this moment. Asked once: holders remove and make it all the time."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return not path.is_symlink()


def run(main: Callable[[], int]) -> int:
    """Run a pipeline as a script: what the user can put right is one message on stderr and exit code 2."""
    try:
        return main()
    except VlmPgError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
