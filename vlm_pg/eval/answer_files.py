"""Answers on disk: a line a question as they come, so that an evaluation that was killed goes on where it was.

answers_NAME.part-0.jsonl    what rank 0 has answered so far of the set NAME; gone when the set is complete
answers_NAME.jsonl           all of a set, in the order of its records
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError
from vlm_pg.eval.contracts import Answered
from vlm_pg.files import write_bytes_atomic

Row = dict[str, Any]


class AnswerFiles:
    """The files of one evaluation's answers.

    Args:
        folder: where they lie.
        rank: of this process, which appends to a part of its own.
        prefix, suffix: around the set's name in file names.
        resumable: whether answers are written as they come, and those that are there are taken over.
    """

    def __init__(self, folder: Path, rank: int, prefix: str = "answers_", suffix: str = "", resumable: bool = True):
        self._folder, self._rank, self._prefix, self._suffix = folder, rank, prefix, suffix
        self._resumable = resumable

    def kept(self, name: str) -> dict[str, Row]:
        """The rows that ranks have left of an unfinished set, by sample id. A line that was cut off is none.

        Without what a judge has said: whether one is asked is for whoever goes on to say (``judging/judge.py``).
        All ranks ask before any of them appends.
        """
        rows: dict[str, Row] = {}
        if not self._resumable:
            return rows
        done = self._done(name)
        for path in [*([done] if done.is_file() else []), *self._parts(name)]:
            for line in path.read_bytes().split(b"\n")[:-1]:
                row = _whole_row(line)
                # A fault may have been put right by another rank since.
                if row is not None and (row["fault"] is None or row["sample_id"] not in rows):
                    rows[row["sample_id"]] = row
        for row in rows.values():
            for output in row["outputs"]:
                output.pop("judged", None)
        return rows

    def append(self, name: str, rows: Sequence[Row]) -> None:
        """Add rows to this rank's part of a set, at once."""
        if not rows or not self._resumable:
            return
        path = self._part(name, self._rank)
        data = b"".join(_line(row) for row in rows)
        with path.open("ab") as file:
            if file.tell() and not _ends_whole(path):
                data = b"\n" + data  # what a kill cut off becomes a line that is no row
            file.write(data)

    def complete(self, name: str, rows: Iterable[Row]) -> Path:
        """Write all rows of a set in one piece, and remove its parts. Of one rank, when all are done."""
        path = self._done(name)
        write_bytes_atomic(path, b"".join(_line(row) for row in rows))
        self._remove_parts(name)
        return path

    def _remove_parts(self, name: str) -> None:
        for part in self._parts(name):
            part.unlink()

    def _done(self, name: str) -> Path:
        return self._folder / f"{self._prefix}{file_name(name)}{self._suffix}.jsonl"

    def _part(self, name: str, rank: int) -> Path:
        return self._folder / f"{self._prefix}{file_name(name)}{self._suffix}.part-{rank}.jsonl"

    def _parts(self, name: str) -> list[Path]:
        stem = f"{self._prefix}{file_name(name)}{self._suffix}.part-"
        found = [path for path in self._folder.iterdir() if path.name.startswith(stem)]
        return sorted(path for path in found if path.name[len(stem) :].removesuffix(".jsonl").isdigit())


def read_answers(path: Path) -> list[Answered]:
    """The questions of a finished set's file.

    Raises:
        ValueError: a line is no row; says which.
    """
    answered = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        row = _whole_row(line)
        if row is None:
            raise ValueError(f"line {number} of {path} is no question with its answers")
        answered.append(Answered.from_row(row))
    return answered


def answers_path(folder: Path, name: str) -> Path:
    """Where ``vlm-pg eval`` and ``score`` put the answers of a finished set."""
    return folder / f"answers_{file_name(name)}.jsonl"


def file_name(name: str) -> str:
    """A set's name as part of a file's."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name).strip("_")


def refuse_equal_files(names: Sequence[str], what: str) -> None:
    """Raise ConfigError for sets whose files would have one name; ``what``: of them is in it ("answers")."""
    files = Counter(map(file_name, names))
    clash = [name for name in names if files[file_name(name)] > 1 or not file_name(name)]
    if clash:
        raise ConfigError(
            f"The {what} of {', '.join(map(repr, clash))} would have one file, whose name has letters, digits, - and _ "
            "alone. Give each set of data.eval a name that differs in these."
        )


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _whole_row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
        Answered.from_row(row)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return row


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
