"""Tables give values as they were written: classes by name, numbers by their digits, media as ``Embedded``."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.support.data_sets import png, records, save, saved_of_paths, shard, shard_of_paths
from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import read_raw
from vlm_pg.data.records import read_records
from vlm_pg.data.tables import Embedded, Label, media_columns, shortest, written_columns
from vlm_pg.errors import ConfigError

ANIMAL = datasets.ClassLabel(names=["cat", "dog", "owl"])
MAKERS = pytest.mark.parametrize("make", [saved_of_paths, shard_of_paths])
Make = Callable[[Path, Any, Any], Path]


def read_rows(make: Make, folder: Path, rows: list[dict[str, Any]], **features: Any) -> list[dict[str, Any]]:
    return [row for _, row in read_raw(make(folder, rows, datasets.Features(features)))]


@MAKERS
def test_a_class_is_its_name_wherever_it_stands(make: Make, tmp_path: Path) -> None:
    features = {
        "one": ANIMAL,
        "several": datasets.List(ANIMAL),
        "inside": {"deep": datasets.List({"animal": ANIMAL, "n": datasets.Value("int64")})},
        "number": datasets.Value("int64"),
    }
    rows = [
        {"one": 1, "several": [2, 0], "inside": {"deep": [{"animal": 1, "n": 1}]}, "number": 1},
        {"one": -1, "several": [-1, 0], "inside": {"deep": []}, "number": -1},
        {"one": None, "several": None, "inside": None, "number": None},
    ]
    first, without, none = read_rows(make, tmp_path, rows, **features)
    assert first == {
        "one": "dog",
        "several": ["owl", "cat"],
        "inside": {"deep": [{"animal": "dog", "n": 1}]},
        "number": 1,
    }
    assert first["one"].number == 1 and [one.number for one in first["several"]] == [2, 0]
    assert without == {"one": None, "several": [None, "cat"], "inside": {"deep": []}, "number": -1}
    assert none["one"] is None and none["several"] is None and none["number"] is None
    assert read_rows(make, tmp_path / "beyond", [{"one": 3}], one=ANIMAL) == [{"one": Unreadable("class 3 of 3")}]


def test_what_only_is_said_to_be_a_class_stays_as_it_is(tmp_path: Path) -> None:
    described = datasets.Features({"one": ANIMAL}).arrow_schema.metadata
    pyarrow.parquet.write_table(
        pyarrow.table({"one": ["cat"], "two": [1]}).replace_schema_metadata(described), tmp_path / "a.parquet"
    )
    assert [row for _, row in read_raw(tmp_path / "a.parquet")] == [{"one": "cat", "two": 1}]
    broken = pyarrow.schema([("one", pyarrow.int64())], {"huggingface": '{"info": {"features": "ClassLabel"'})
    assert written_columns(broken) == {}


def test_a_class_goes_to_other_processes_with_its_number() -> None:
    label = pickle.loads(pickle.dumps({"a": Label("dog", 1)}))["a"]
    assert (label, label.number, type(label)) == ("dog", 1, Label)


@MAKERS
@pytest.mark.parametrize(("kind", "name"), [(np.float32, "float32"), (np.float16, "float16")])
def test_numbers_of_few_bits_have_the_digits_they_were_written_with(
    make: Make, kind: Any, name: str, tmp_path: Path
) -> None:
    """All tenths up to 100, and hundredths up to 10: single and half precision tell them apart."""
    number = datasets.Value(name)
    written = [tenth / 10 for tenth in range(1000)] + [hundredth / 100 for hundredth in range(1000)]
    held = [float(kind(one)) for one in written]
    assert held != written
    features = {"one": number, "several": datasets.List(number), "inside": {"n": number}}
    rows = [{"one": kind(one), "several": [kind(one), None], "inside": {"n": kind(one)}} for one in written]
    found = read_rows(make, tmp_path, rows, **features)
    assert found == [{"one": one, "several": [one, None], "inside": {"n": one}} for one in written]


@MAKERS
def test_other_numbers_stay_as_they_are(make: Make, tmp_path: Path) -> None:
    odd = [float(np.float32(24.3)), 0.1 + 0.2, 1e300, -0.0, 2.0**24 + 2]
    rows = [{"double": one, "whole": 2**60} for one in odd]
    features = {"double": datasets.Value("float64"), "whole": datasets.Value("int64")}
    assert read_rows(make, tmp_path / "double", rows, **features) == rows
    single = [math.inf, -math.inf, float("nan"), 2.0**24 + 2, 123456792.0, None]
    rows = read_rows(make, tmp_path / "single", [{"one": one} for one in single], one=datasets.Value("float32"))
    assert repr([row["one"] for row in rows]) == repr(single)


def test_a_number_of_another_precision_is_not_shortened() -> None:
    assert shortest(24.296875, np.float16) == 24.3 and shortest(24.297, np.float16) == 24.297
    assert shortest(1e300, np.float16) == 1e300 and shortest(65184.0, np.float16) == 65184.0


# ---- media inside rows ----

FILE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
INSIDE = {"bytes": png(1), "path": "../../a.png"}


def features(**media: Any) -> Any:
    text = datasets.Value("string")
    plain = dict.fromkeys(("problem", "data_type", "problem_type", "process", "solution", "data_source"), text)
    if "path" not in media:
        plain["path"] = text
    return datasets.Features(plain | {"problem_id": datasets.Value("int64"), "options": datasets.List(text)} | media)


def with_columns(**columns: Any) -> list[dict[str, Any]]:
    return [record | columns for record in records(2)]


def test_features_say_what_a_column_holds(tmp_path: Path) -> None:
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
        b'{"info": {"features": {"image": {"_type": "NoSuchType"}}}}',
        b'{"info": {"features": {"image": {"_type": "dataclass"}}}}',
        b'{"info": {"features": ' + b'{"a": ' * 20_000 + b"1" + b"}" * 20_000 + b"}}",
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


def test_columns_that_only_resemble_media_stay_as_they_are() -> None:
    content, name = ("bytes", pyarrow.binary()), ("path", pyarrow.string())
    for column in (
        pyarrow.binary(),
        pyarrow.struct([content]),
        pyarrow.struct([("bytes", pyarrow.string()), name]),
        pyarrow.struct([content, ("path", pyarrow.int64())]),
        pyarrow.struct([content, name, ("more", pyarrow.string())]),
        pyarrow.map_(pyarrow.string(), FILE),
    ):
        assert media_columns(pyarrow.schema([("image", column)])) == {}, column


@pytest.mark.parametrize("name", ["path", "images"])
def test_training_refuses_media_inside_rows_and_says_what_to_do(name: str, tmp_path: Path) -> None:
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
    folder = save(tmp_path / "saved", with_columns(preview=INSIDE), features=features(preview=datasets.Image()))
    assert len(read_records(folder)[0]) == 2
