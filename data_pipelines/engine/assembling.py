"""The files of a prepared set: records of each split, what was refused, what is asked twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from data_pipelines.engine.repeats import Repeats
from data_pipelines.engine.splitting import Placed
from data_pipelines.engine.tally import Tally
from vlm_pg.data.bad import line_of
from vlm_pg.data.prepared import ShardWriter, to_row
from vlm_pg.data.records import line_of_record
from vlm_pg.errors import SampleError
from vlm_pg.files import replacing
from vlm_pg.types import BadSample, Sample

Format = Literal["parquet", "jsonl"]
REFUSED, REPEATED = "refused.jsonl", "repeated.jsonl"


def write_all(
    folder: Path,
    placed: Iterable[Placed | BadSample | str],
    repeats: Repeats,
    splits: Sequence[str],
    form: Format,
    tally: Tally,
) -> dict[str, int]:
    """Write the records of each split, ``refused.jsonl`` and ``repeated.jsonl`` into a folder, and count them. A split
    without a record has no file.

    Returns:
        The number of records in each file.
    """
    writers: dict[str, RecordWriter] = {}
    with (
        replacing(folder / REFUSED, durable=False) as refused,
        replacing(folder / REPEATED, durable=False) as repeated,
    ):
        for one in placed:
            if isinstance(one, str):
                tally.left_out[one] += 1
                continue
            if isinstance(one, Placed):
                fault = _written(one, writers, folder, form)
                if fault is None:
                    tally.keep(one.split, one.sample, one.facts)
                    repeat = repeats.of(one.sample, one.facts)
                    if repeat is not None:
                        tally.repeat(repeat)
                        repeated.write(repeat.line())
                    continue
                one = fault
            tally.refuse(one)
            refused.write(line_of(one).encode(errors="backslashreplace"))
    ordered = [writers[split] for split in splits if split in writers]
    files = {name: count for writer in ordered for name, count in writer.close().items()}
    return {**files, REFUSED: sum(tally.refused.values()), REPEATED: sum(tally.repeated.values())}


def _written(one: Placed, writers: dict[str, RecordWriter], folder: Path, form: Format) -> BadSample | None:
    """Write a record, the first of its split into a new file; what no file of this form holds is refused."""
    try:
        record = to_row(one.sample) if form == "parquet" else one.sample
    except SampleError as fault:
        return BadSample(one.sample.sample_id, fault.reason, str(fault), one.sample.where)
    if one.split not in writers:
        kind = ShardWriter if form == "parquet" else JsonlWriter
        writers[one.split] = kind(folder, one.split)
    writers[one.split].add(record)
    return None


class RecordWriter(Protocol):
    """Writes the records of one split."""

    def add(self, record: Any) -> None: ...

    def close(self) -> dict[str, int]:
        """The files and how many records each has."""
        ...


class JsonlWriter:
    """One file of JSON lines; see ``ShardWriter``."""

    def __init__(self, folder: Path, split: str):
        self._path, self._count = folder / f"{split}.jsonl", 0
        self._temporary = folder / f".{split}.jsonl.tmp"
        self._file = self._temporary.open("wb")

    def add(self, record: Sample) -> None:
        self._file.write(line_of_record(record))
        self._count += 1

    def close(self) -> dict[str, int]:
        self._file.close()
        self._temporary.replace(self._path)
        return {self._path.name: self._count}
