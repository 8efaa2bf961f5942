"""Files that tensorboard, wandb and swanlab write, read back. The last two keep protocol buffers in LevelDB's log."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vlm_pg.observe.run_folder import RunFolder

_HEADER, _BLOCK = 7, 32768
_FULL, _LAST = 1, 4


def records(path: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` or ``.swanlab`` file."""
    data, place, record = path.read_bytes(), _HEADER, b""
    while place + _HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += _HEADER
        record += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def wandb_steps(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Every step in a file, in its order: its number, and what was logged in it (of a table what describes it)."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps = []
    for data in records(path):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            steps.append((record.history.step.num, values))
    return steps


def wandb_artifacts(path: Path) -> Iterator[dict[str, Path]]:
    """Of every table in a file: what belongs to it, by name, and where that lies until it is sent."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in records(path):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "artifact":
            yield {entry.path: Path(entry.local_path) for entry in record.artifact.manifest.contents}


def wandb_config(path: Path) -> dict[str, Any]:
    """The settings in a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = (Record.FromString(data) for data in records(path))
    changes = [record.config.update for record in found if record.WhichOneof("record_type") == "config"]
    return {item.key: json.loads(item.value_json) for items in changes for item in items if item.key}


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


def expected_scalars(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """metrics.jsonl in tensorboard's precision."""
    table: dict[str, list[tuple[int, float]]] = {}
    for line in map(json.loads, folder.metrics.read_text().splitlines()):
        for key, value in line.items():
            if key not in ("step", "phase", "time") and value is not None:
                table.setdefault(f"train/{key}", []).append((line["step"], float(np.float32(value))))
    return table
