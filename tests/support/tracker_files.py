"""Files that tensorboard, wandb and swanlab write, read back. The last two keep protocol buffers in LevelDB's log."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vlm_pg.observe.run_folder import RunFolder

_HEADER, _BLOCK = 7, 32768
_FULL, _LAST = 1, 4


def records(path: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` or ``.swanlab`` file."""
    data, offset, record = path.read_bytes(), _HEADER, b""
    while offset + _HEADER <= len(data):
        left = _BLOCK - offset % _BLOCK
        if left < _HEADER:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        offset += _HEADER
        record += data[offset : offset + length]
        offset += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def _wandb(path: Path, kind: str) -> Iterator[Any]:
    """The content of a file's records of one kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    for record in map(Record.FromString, records(path)):
        if record.WhichOneof("record_type") == kind:
            yield getattr(record, kind)


def wandb_steps(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Every step in a file, in its order: its number, and what was logged in it (of a table what describes it)."""
    return [
        (step.step.num, {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in step.item})
        for step in _wandb(path, "history")
    ]


def wandb_artifacts(path: Path) -> Iterator[dict[str, Path]]:
    """Of every table in a file: what belongs to it, by name, and where that lies until it is sent."""
    for artifact in _wandb(path, "artifact"):
        yield {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}


def wandb_config(path: Path) -> dict[str, Any]:
    """The settings in a file."""
    items = (item for config in _wandb(path, "config") for item in config.update if item.key)
    return {item.key: json.loads(item.value_json) for item in items}


def swanlab_scalars(path: Path) -> list[tuple[str, int, float]]:
    """(key, step, value) of every scalar in a file, in its order."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found = (Record.FromString(data) for data in records(path))
    return [(one.scalar.key, one.scalar.step, one.scalar.value.number) for one in found if one.HasField("scalar")]


def events(folder: RunFolder) -> Any:
    from tensorboard.backend.event_processing import event_accumulator

    return event_accumulator.EventAccumulator(
        str(folder.tensorboard), size_guidance={"tensors": 0, "images": 0}
    ).Reload()


def scalars(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    found = events(folder)
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def expected_scalars(folder: RunFolder, precision: Callable[[float], Any] = np.float32) -> dict[str, list[Any]]:
    """metrics.jsonl, by default in tensorboard's precision."""
    table: dict[str, list[Any]] = {}
    for line in map(json.loads, folder.metrics.read_text().splitlines()):
        for key, value in line.items():
            if key not in ("step", "phase", "time") and value is not None:
                table.setdefault(f"train/{key}", []).append((line["step"], float(precision(value))))
    return table
