"""Folders as ``datasets`` and a hub make them, of records and of rows with media inside."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_pg.data.prepared import ShardWriter, to_row
from vlm_pg.types import Sample

Row = Mapping[str, Any]


def records(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Text-only records in Video-R1's format."""
    return [
        {
            "problem_id": number,
            "problem": f"How much is {number} + {number}?",
            "data_type": "text",
            "problem_type": "numerical",
            "options": [],
            "process": "",
            "solution": f"<answer>{2 * number}</answer>",
            "path": "",
            "data_source": "sums",
        }
        for number in range(first, first + count)
    ]


def png(colour: int) -> bytes:
    """A small picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (colour, 90, 180)).save(file, "PNG")
    return file.getvalue()


def save(folder: Path, rows: Sequence[Row], shards: int = 1, features: Any = None) -> Path:
    """What ``Dataset.save_to_disk`` writes."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(list(rows), features=features).save_to_disk(folder, num_shards=shards)
    return folder


def save_splits(folder: Path, splits: Mapping[str, Sequence[Row]], features: Any = None) -> Path:
    """What ``DatasetDict.save_to_disk`` writes."""
    import datasets

    datasets.disable_progress_bars()
    made = {name: datasets.Dataset.from_list(list(rows), features=features) for name, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(folder)
    return folder


def shard(folder: Path, split: str, rows: Sequence[Row], shards: int, features: Any = None) -> Path:
    """What a hub holds: ``train-00000-of-00002.parquet``, ..."""
    import datasets

    datasets.disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    whole = datasets.Dataset.from_list(list(rows), features=features)
    for index in range(shards):
        part = whole.shard(shards, index, contiguous=True)
        part.to_parquet(folder / f"{split}-{index:05d}-of-{shards:05d}.parquet")
    return folder


def shard_of_paths(folder: Path, rows: Sequence[Row], features: Any) -> Path:
    """A shard whose media may be paths; ``datasets`` itself would put the files into it."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(list(rows), schema=features.arrow_schema)
    pyarrow.parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    return folder


def saved_of_paths(folder: Path, rows: Sequence[Row], features: Any) -> Path:
    """The same as ``Dataset.save_to_disk`` would write it."""
    import pyarrow

    folder.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(list(rows), schema=features.arrow_schema)
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    return folder


def write_shards(folder: Path, split: str, samples: Iterable[Sample]) -> dict[str, int]:
    """A split of a prepared set; the number of rows by name."""
    writer = ShardWriter(folder, split)
    for sample in samples:
        writer.add(to_row(sample))
    return writer.close()
