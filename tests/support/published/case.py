"""A data set as its source publishes it, made small, and what the command is to make of each of its questions."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from data_pipelines.engine.command import SUMMARY
from data_pipelines.engine.dataset import DataSet
from tests.support.tiny_media import write_media
from vlm_pg.cli import main
from vlm_pg.data.sample_sets import open_records
from vlm_pg.types import MediaRef, Sample

Refused = tuple[str, str, str]


@dataclass(frozen=True)
class Published:
    """Files below a folder, the command's arguments, and all that is to come of them, in order.

    Args:
        files: content by path: rows of .json (as published, on one line), .jsonl and .parquet (with ``Features``, or
            without), text of .csv and .txt, bytes of media; None: a medium of five minutes, unlike all others.
        arguments: of ``vlm-pg prepare NAME``, without --out; "{}" stands for the folder.
        train, evaluation: the records of each split.
        refused: location, name and reason of each question that is not kept; None: any.
        left_out: how many questions are in both splits, or asked for by nobody, by the reason that the report gives.
        forms: numbers of the forms of the data set that the files are of.
        unpacked: content of media that stood inside rows, in the order of the records.
        unread: annotation files of the set in the folder that are not read: split, the first one, their number.
    """

    files: Mapping[str, Any]
    train: Sequence[Sample] = ()
    evaluation: Sequence[Sample] = ()
    refused: Sequence[Refused] | None = ()
    arguments: Sequence[str] = ("{}",)
    left_out: Mapping[str, int] = field(default_factory=dict)
    forms: tuple[int, ...] = (0,)
    unpacked: Sequence[bytes] = ()
    unread: Sequence[tuple[str, str, int]] = ()


def media(*names: str) -> dict[str, None]:
    """Files that are there and can be used."""
    return dict.fromkeys(names)


def video(path: str, **part: Any) -> tuple[MediaRef, ...]:
    """The one video of a record, or a part of it."""
    return (MediaRef("video", path, **part),)


def image(path: str) -> tuple[MediaRef, ...]:
    """The one picture of a record."""
    return (MediaRef("image", path),)


def picture(shade: int, name: str = "png") -> bytes:
    """A small picture, another for each shade."""
    content = io.BytesIO()
    Image.new("RGB", (32, 28), (shade, 40, 90)).save(content, name)
    return content.getvalue()


def stored(content: bytes, suffix: str = ".png") -> str:
    """Where a medium that stood inside a row is written: by a hash of its content."""
    name = hashlib.sha256(content).hexdigest()[:40]
    return f"unpacked/{name[:2]}/{name}{suffix}"


def dataset_of(name: str) -> DataSet:
    """The description of a data set."""
    found: DataSet = getattr(importlib.import_module(f"data_pipelines.{name}"), name.upper())
    return found


def cases_of(name: str) -> dict[str, Published]:
    """The published forms of a data set, by name."""
    found: dict[str, Published] = importlib.import_module(f"tests.support.published.{name}").CASES
    return found


def lay_out(folder: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            _write_parquet(path, content)
        elif content is None:
            write_media(path, zlib.crc32(name.encode()) % 2**24, seconds=300)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(_text(path.suffix, content), encoding="utf-8")


def check(name: str, case: Published, folder: Path, out: Path) -> None:
    """The command writes the expected records and refusals, and no others; once more it writes nothing."""
    lay_out(folder, case.files)
    arguments = ["prepare", name, *(one.replace("{}", str(folder)) for one in case.arguments), "--out", str(out)]
    assert main(arguments) == 0
    assert refusals(out) == list(case.refused or ())
    for split, expected in (("train", case.train), ("eval", case.evaluation)):
        assert records(out, split) == list(expected)
    report = json.loads((out / "report.json").read_text())
    assert report["left_out"] == case.left_out
    assert (report["train"], report["eval"]) == (len(case.train), len(case.evaluation))
    root = Path(report["media_root"]) if "media_root" in report else folder
    refs = [ref for one in (*case.train, *case.evaluation) for ref in one.media]
    assert all((root / path).exists() for ref in refs for path in (ref.path, ref.subtitles) if path)
    inside = [(root / ref.path).read_bytes() for ref in refs if ref.path.startswith("unpacked/")]
    assert inside == list(case.unpacked)
    manifest = json.loads((out / "manifest.json").read_text())
    unread = [(one["split"], one["files"][0], one["count"]) for one in manifest["unread_files"]]
    base = Path(arguments[2])
    assert unread == [(split, str(base / name), count) for split, name, count in case.unread]
    assert report["unread_files"] == manifest["unread_files"]
    assert all(name in (out / SUMMARY).read_text() for _, name, _ in unread)
    forms = {source["form"] for source in manifest["sources"]}
    if name != "generic":
        assert forms == {dataset_of(name).forms[number].name for number in case.forms}
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert SUMMARY in before and main(arguments) == 0
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def records(out: Path, split: str) -> list[Sample]:
    """The records of a split as training reads them."""
    files = json.loads((out / "manifest.json").read_text())["files"]
    found = sum(count for name, count in files.items() if name.startswith(f"{split}-"))
    return list(open_records(Path(f"{out}:{split}"))[0]) if found else []


def refusals(out: Path) -> list[Refused]:
    """Location, name and reason of each."""
    lines = (out / "refused.jsonl").read_text(encoding="utf-8").splitlines()
    return [(bad["where"], bad["sample_id"], bad["reason"]) for bad in map(json.loads, lines)]


def _text(suffix: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(json.dumps(row) + "\n" for row in content) if suffix == ".jsonl" else json.dumps(content)


def _write_parquet(path: Path, content: Any) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    if isinstance(content, pyarrow.Table):
        pyarrow.parquet.write_table(content, path)
    elif isinstance(content, tuple):
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(content[0], features=content[1]).to_parquet(path)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
