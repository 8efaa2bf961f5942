"""Answers on disk, one line per question, appended as they come, so that a killed evaluation resumes.

answers_NAME.part-0.jsonl    answers of rank 0 to the set NAME so far; removed when the set is complete
answers_NAME.jsonl           all of a set, in the order of its records
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError
from vlm_pg.eval.contracts import Answered
from vlm_pg.files import write_bytes_atomic

# The figures and record of a finished evaluation, beside its answers.
RESULT = "result.json"
Row = dict[str, Any]


class AnswerFiles:
    """The files of one evaluation's answers.

    Args:
        folder: of the evaluation.
        rank: of this process, which appends to a part of its own.
        prefix, suffix: around the set's name in file names.
        resumable: whether answers are written as they come, and existing ones are reused.
        parse: the row that a line holds, with ``sample_id`` and ``fault``; None if it holds none.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        prefix: str = "answers_",
        suffix: str = "",
        resumable: bool = True,
        parse: Callable[[bytes], Row | None] | None = None,
    ):
        self._parse = parsed_row if parse is None else parse
        self._folder, self._rank, self._prefix, self._suffix = folder, rank, prefix, suffix
        self._resumable = resumable

    def finished_rows(self, name: str) -> dict[str, Row]:
        """The rows of an earlier attempt at a set, of all ranks, by sample id; truncated lines are skipped.

        Without a judge's decisions: ``judging/judge.py`` keeps those. All ranks read before any of them appends.
        """
        rows: dict[str, Row] = {}
        if not self._resumable:
            return rows
        complete = self._folder / f"{self._stem(name)}.jsonl"
        for path in [*([complete] if complete.is_file() else []), *self._parts(name)]:
            for line in path.read_bytes().split(b"\n")[:-1]:
                row = self._parse(line)
                # A fault may have been repaired by another rank since.
                if row is not None and (row["fault"] is None or row["sample_id"] not in rows):
                    rows[row["sample_id"]] = row
        for row in rows.values():
            for output in row.get("outputs", ()):
                output.pop("judged", None)
        return rows

    def append(self, name: str, rows: Sequence[Row]) -> None:
        """Append rows to this rank's part of a set, in one write."""
        if not rows or not self._resumable:
            return
        data = b"".join(map(_line, rows))
        with (self._folder / f"{self._stem(name)}.part-{self._rank}.jsonl").open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                # A line truncated by a kill becomes a line of its own, which is no row.
                data = (b"" if file.read(1) == b"\n" else b"\n") + data
            file.write(data)

    def complete(self, name: str, rows: Iterable[Row]) -> None:
        """Write all rows of a set atomically, and remove its parts. Called by one rank, when all are done."""
        write_bytes_atomic(self._folder / f"{self._stem(name)}.jsonl", b"".join(map(_line, rows)))
        for part in self._parts(name):
            part.unlink()

    def _stem(self, name: str) -> str:
        return f"{self._prefix}{file_name(name)}{self._suffix}"

    def _parts(self, name: str) -> list[Path]:
        stem = f"{self._stem(name)}.part-"
        found = [path for path in self._folder.iterdir() if path.name.startswith(stem)]
        return sorted(path for path in found if path.name[len(stem) :].removesuffix(".jsonl").isdigit())


def read_answers(path: Path) -> list[Answered]:
    """The questions of a finished set's file. Raises ValueError: a line is no row; says which."""
    answered = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        row = parsed_row(line)
        if row is None:
            raise ValueError(f"line {number} of {path} is no question with its answers")
        answered.append(Answered.from_row(row))
    return answered


def answers_path(folder: Path, name: str) -> Path:
    """The answers of a finished set in a folder of ``vlm-pg eval`` or ``score``."""
    return folder / f"answers_{file_name(name)}.jsonl"


def file_name(name: str) -> str:
    """A set's name as part of a file name."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name).strip("_")


def refuse_equal_files(names: Sequence[str], what: str) -> None:
    """Raise ConfigError for sets whose files ("answers", "prompts") would have one name."""
    files = Counter(map(file_name, names))
    clash = [name for name in names if files[file_name(name)] > 1 or not file_name(name)]
    if clash:
        raise ConfigError(
            f"The {what} of {', '.join(map(repr, clash))} would have one file, whose name has letters, digits, - and _ "
            "alone. Give each set of data.eval a name that differs in these."
        )


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def parsed_row(line: bytes) -> Row | None:
    """The row that a line holds; None if it is no question with its answers."""
    try:
        row = json.loads(line)
        Answered.from_row(row)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return row
