"""Atomic writes, so that a killed process leaves the old file or the new one; lines of JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from vlm_pg.errors import VlmPgError

# Errors from outside the program, with advice; any other is a bug.
_ADVICE = {
    errno.ENOSPC: "Make room on that disk",
    errno.EDQUOT: "Make room in that quota",
    errno.EFBIG: "Raise the limit on the size of files",
    errno.EACCES: "Correct the permissions",
    errno.EPERM: "Correct the permissions",
    errno.EROFS: "Choose a folder that can be written",
    errno.EIO: "Check that disk",
    errno.ESTALE: "Check that disk's connection",
    errno.ENOENT: "Put it back",
    errno.ENOTDIR: "Move away what stands instead of a folder",
    errno.EISDIR: "Move away the folder that stands instead of a file",
    errno.ELOOP: "Remove the links that lead in a circle",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.EMFILE: "Raise the limit on open files",
    errno.ENFILE: "Raise the limit on open files",
}
# Outside the run's own folder these are bugs, a missing program for example.
_OWN_ONLY = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


@contextmanager
def file_errors_explained(run: Path | None = None) -> Iterator[None]:
    """Turn operating system errors on files into a VlmPgError that names the file.

    Args:
        run: folder of the running training, whose files may also vanish.

    Raises:
        VlmPgError: a full disk, missing permission, a file of the run that vanished, and the like.
    """
    try:
        yield
    except InterruptedError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        named = isinstance(error.filename, str | bytes | os.PathLike)
        own = run is not None and named and run.absolute() in Path(os.fsdecode(error.filename)).absolute().parents
        if advice is None or (error.errno in _OWN_ONLY and not own):
            raise
        where = str(error.filename) if named else "A file"
        further = ""
        if run is not None:
            further = ", then go on with run.resume=auto: checkpoints that were finished are untouched"
        raise VlmPgError(f"{where} cannot be used: {error.strerror}. {advice}{further}.") from error


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """A temporary file beside ``path`` that replaces it at the end of the block, and is removed if the block raises.

    Args:
        durable: survives a power cut; waits for the disk.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    if durable:
        sync_path(path.parent)


def write_bytes_atomic(path: Path, data: bytes, durable: bool = True) -> None:
    """Replace the content of ``path``, as ``replacing`` does."""
    with replacing(path, durable) as file:
        file.write(data)


def sync_path(path: Path) -> None:
    """fsync a file's content, or a folder so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON. Raises VlmPgError naming the key when a number in it is NaN or infinite."""
    key = find_non_finite(value)
    if key is not None:
        raise VlmPgError(
            f"{path.name}: the value of '{key}' is not a finite number. JSON holds finite numbers and null only; "
            "write null for a value that does not exist, or find out where the number came from."
        )
    write_bytes_atomic(path, json_line(value, indent=2))


def json_line(value: Any, indent: int | None = None) -> bytes:
    """``value`` as JSON in UTF-8 with a newline; a lone surrogate stays an escape, which JSON allows."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"
    return text.encode("utf-8", "backslashreplace")


class LineFile:
    """A JSONL file, written to its end line by line; usable as a context manager."""

    def __init__(self, path: Path):
        self._file = path.open("ab")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line and flush it; an error names the file."""
        try:
            self._file.write(json_line(record))
            self._file.flush()
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = str(self._file.name)
            raise

    def close(self) -> None:
        """Close the file; writing afterwards is an error."""
        with suppress(OSError):  # reported when it was written
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def find_non_finite(value: Any, key: str = "") -> str | None:
    """The dotted key of the first NaN or infinity inside ``value``; None when all numbers are finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return key or "the value itself"
    children: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, Mapping):
        children = ((str(name), child) for name, child in value.items())
    elif isinstance(value, list | tuple):
        children = ((str(index), child) for index, child in enumerate(value))
    for name, child in children:
        found = find_non_finite(child, f"{key}.{name}" if key else name)
        if found is not None:
            return found
    return None


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> tuple[int, int]:
    """Rewrite a JSONL file with the lines that ``keep`` accepts; returns (other lines, lines that were no JSON).

    The file is only rewritten when something leaves it, in one piece, so a crash here loses nothing. Other lines are
    moved to ``<name>.abandoned``, those that are not JSON (a process killed in the middle of a write leaves one) to
    ``<name>.damaged``.
    """
    if not path.exists():
        return 0, 0
    kept: list[bytes] = []
    damaged: list[bytes] = []
    others: list[bytes] = []
    with path.open("rb") as file:
        for line in file:
            record = parse_json_line(line)
            if record is None:
                home = damaged
            else:
                home = kept if keep(record) else others
            home.append(line if line.endswith(b"\n") else line + b"\n")
    for suffix, lines in ((".damaged", damaged), (".abandoned", others)):
        if lines:
            with path.with_name(path.name + suffix).open("ab") as file:
                file.writelines(lines)
    if damaged or others:
        write_bytes_atomic(path, b"".join(kept))
    return len(others), len(damaged)


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object on one line, or None if the line is not a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
