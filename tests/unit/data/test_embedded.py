"""Media inside rows are known by the data set's features, or by their shape; training refuses them in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.data_sets import png, records, save, saved_of_paths, shard, shard_of_paths
from vlm_pg.data.files import read_raw
from vlm_pg.data.records import read_records
from vlm_pg.data.tables import Embedded, media_columns
from vlm_pg.errors import ConfigError

FILE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
INSIDE = {"bytes": png(1), "path": "../../a.png"}


def features(**media: Any) -> Any:
    import datasets

    text = datasets.Value("string")
    plain = dict.fromkeys(("problem", "data_type", "problem_type", "process", "solution", "data_source"), text)
    if "path" not in media:
        plain["path"] = text
    return datasets.Features(plain | {"problem_id": datasets.Value("int64"), "options": datasets.List(text)} | media)


def with_columns(**columns: Any) -> list[dict[str, Any]]:
    return [record | columns for record in records(2)]


def test_features_say_what_a_column_holds(tmp_path: Path) -> None:
    import datasets

    columns = {
        "image": (datasets.Image(), INSIDE, Embedded(png(1), "../../a.png", "image")),
        "images": (datasets.List(datasets.Image()), [INSIDE], [Embedded(png(1), "../../a.png", "image")]),
        "clip": (datasets.Video(), {"bytes": b"v", "path": None}, Embedded(b"v", None, "video")),
        "clips": (datasets.LargeList(datasets.Video()), [None], [None]),
        "none": (datasets.Image(), None, None),
        "file": (datasets.Image(), {"bytes": None, "path": "a/b.png"}, "a/b.png"),
        "sound": (datasets.Audio(), {"bytes": None, "path": "a.wav"}, {"bytes": None, "path": "a.wav"}),
        "text": (datasets.Value("string"), "x", "x"),
    }
    rows = with_columns(**{name: value for name, (_, value, _) in columns.items()})
    described = features(**{name: feature for name, (feature, _, _) in columns.items()})
    for make in (saved_of_paths, shard_of_paths):
        path = make(tmp_path / make.__name__, rows, described)
        for _, record in read_raw(path):
            assert {name: record[name] for name in columns} == {
                name: wanted for name, (_, _, wanted) in columns.items()
            }


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        b"{",
        b"\xff",
        b"{}",
        b'{"info": {"features": {"image": {"_type": "NoSuchType"}}}}',
        b'{"info": {"features": {"image": {"_type": "dataclass"}}}}',
        b'{"info": {"features": ' + b'{"a": ' * 20_000 + b"1" + b"}" * 20_000 + b"}}",
        b'{"info": {"features": [1]}}',
    ],
)
def test_without_features_that_can_be_read_the_shape_says_it(metadata: bytes | None, tmp_path: Path) -> None:
    table = pyarrow.table(
        {"image": pyarrow.array([INSIDE], FILE), "images": pyarrow.array([[INSIDE]], pyarrow.list_(FILE))}
    )
    if metadata is not None:
        table = table.replace_schema_metadata({"huggingface": metadata})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    ((_, record),) = read_raw(tmp_path / "a.parquet")
    assert record["image"] == Embedded(png(1), "../../a.png") and record["images"] == [record["image"]]


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.binary(),
        pyarrow.struct([("bytes", pyarrow.binary())]),
        pyarrow.struct([("bytes", pyarrow.string()), ("path", pyarrow.string())]),
        pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.int64())]),
        pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string()), ("more", pyarrow.string())]),
        pyarrow.map_(pyarrow.string(), FILE),
    ],
    ids=str,
)
def test_what_only_resembles_media_is_left_as_it_is(column: pyarrow.DataType) -> None:
    assert media_columns(pyarrow.schema([("image", column)])) == {}


@pytest.mark.parametrize("name", ["path", "image", "images"])
def test_training_refuses_media_inside_rows_and_says_what_to_do(name: str, tmp_path: Path) -> None:
    import datasets

    value, feature = ([INSIDE], datasets.List(datasets.Image())) if name == "images" else (INSIDE, datasets.Image())
    rows = [record | {"data_type": "image", name: value} for record in records(2)]
    folder = shard(tmp_path / "hub", "train", rows, 1, features(**{name: feature}))
    with pytest.raises(ConfigError) as refused:
        read_records(folder)
    assert str(refused.value) == (
        f"Data set '{folder}' holds media inside its rows ({name}). Training reads media from files, and records name "
        "them in 'path'. Prepare it first: 'vlm-pg prepare' lists the data sets it knows, and 'vlm-pg prepare video_r1 "
        "--train' takes records in Video-R1's format."
    )


@pytest.mark.parametrize("path", ["a/1.png", ["a/1.png"]])
def test_media_that_are_paths_need_no_preparing(path: Any, tmp_path: Path) -> None:
    """A column of previews beside them is as little read as any other column."""
    import datasets

    feature = datasets.Image() if isinstance(path, str) else datasets.List(datasets.Image())
    named = {"bytes": None, "path": "a/1.png"}
    rows = [
        record | {"data_type": "image", "path": named if isinstance(path, str) else [named], "preview": INSIDE}
        for record in records(2)
    ]
    described = features(path=feature, preview=datasets.Image())
    samples, bad = read_records(saved_of_paths(tmp_path / "saved", rows, described))
    assert bad == [] and [[ref.path for ref in sample.media] for sample in samples] == [["a/1.png"]] * 2
    (tmp_path / "a.json").write_text(
        json.dumps([record | {"data_type": "image", "path": path} for record in records(2)])
    )
    assert read_records(tmp_path / "a.json")[0] == samples


def test_text_records_need_no_preparing_whatever_stands_beside_them(tmp_path: Path) -> None:
    import datasets

    folder = save(tmp_path / "saved", with_columns(preview=INSIDE), features=features(preview=datasets.Image()))
    assert len(read_records(folder)[0]) == 2
