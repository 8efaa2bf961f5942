"""Rows of a data set's files that a shard has no room for: they stand beside it, and are refused by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_pipelines.engine.reading import read_rows
from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import RecordPlace, files_of
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import replacing

_ENDING = ".lost.jsonl"
LOST = (f".*.parquet{_ENDING}",)  # in the shard's folder


class LostRows:
    """Those of one shard, written as they come. ``count``: how many; ``first``: the first, for messages."""

    def __init__(self, file: Any):
        self._file = file
        self.count, self.first = 0, ""

    def add(self, name: str, line: int, row: Unreadable) -> None:
        """A row that ends on this line of the file ``name`` of the data set."""
        self.count += 1
        self.first = self.first or f"'{printable(name, 200)}:{line}' is {row.what}"
        told = {"file": name, "line": line, "what": row.what, "reason": row.reason}
        self._file.write((json.dumps(told) + "\n").encode())


@contextmanager
def lost_beside(shard: Path) -> Iterator[LostRows]:
    """Collects the rows that a shard lacks, in the place of those of an earlier one of this name."""
    with replacing(_beside(shard)) as file:
        yield (lost := LostRows(file))
    if not lost.count:
        _beside(shard).unlink()


def how_many_lost(shard: Path) -> int:
    """How many rows a shard lacks."""
    return sum(1 for _ in _read(shard))


def rows_and_lost(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """As ``read_rows``, with the rows that shards lack behind the others."""
    number = 0
    for place, row in read_rows(path):
        number += 1
        yield place, row
    for shard in files_of(path):
        for told in _read(shard):
            number += 1
            place = RecordPlace(told["line"], file=told["file"], row=number)
            yield place, Unreadable(told["what"], told["reason"])


def _beside(shard: Path) -> Path:
    return shard.with_name(f".{shard.name}{_ENDING}")


def _read(shard: Path) -> Iterator[dict[str, Any]]:
    path = _beside(shard)
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                told = json.loads(line)
                yield {"file": str(told["file"]), "line": int(told["line"]), "what": str(told["what"]),
                       "reason": str(told["reason"])}  # fmt: skip
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"'{printable(str(path), 300)}' cannot be read: {printable(str(error), 200)}. What 'vlm-pg prepare "
                    "generic --hub' wrote is expected. Remove the folder, and fetch the data set again."
                ) from error
