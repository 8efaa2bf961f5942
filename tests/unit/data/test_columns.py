"""Tables give a class by its name and a number of few bits by the digits it was written with."""

from __future__ import annotations

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

from tests.support.data_sets import saved_of_paths, shard_of_paths
from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import read_raw
from vlm_pg.data.tables import Label, shortest, written_columns

ANIMAL = datasets.ClassLabel(names=["cat", "dog", "owl"])
MAKERS = pytest.mark.parametrize("make", [saved_of_paths, shard_of_paths])
Make = Callable[[Path, Any, Any], Path]


def read(make: Make, folder: Path, rows: list[dict[str, Any]], **features: Any) -> list[dict[str, Any]]:
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
    first, without, none = read(make, tmp_path, rows, **features)
    assert first == {
        "one": "dog",
        "several": ["owl", "cat"],
        "inside": {"deep": [{"animal": "dog", "n": 1}]},
        "number": 1,
    }
    assert first["one"].number == 1 and [one.number for one in first["several"]] == [2, 0]
    assert without == {"one": None, "several": [None, "cat"], "inside": {"deep": []}, "number": -1}
    assert none["one"] is None and none["several"] is None and none["number"] is None


@MAKERS
def test_a_number_that_no_class_has_cannot_be_read(make: Make, tmp_path: Path) -> None:
    (row,) = read(make, tmp_path, [{"one": 3}], one=ANIMAL)
    assert row == {"one": Unreadable("class 3 of 3")}


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
    found = read(make, tmp_path, rows, **features)
    assert found == [{"one": one, "several": [one, None], "inside": {"n": one}} for one in written]


@MAKERS
def test_other_numbers_stay_as_they_are(make: Make, tmp_path: Path) -> None:
    odd = [float(np.float32(24.3)), 0.1 + 0.2, 1e300, -0.0, 2.0**24 + 2]
    rows = [{"double": one, "whole": 2**60} for one in odd]
    features = {"double": datasets.Value("float64"), "whole": datasets.Value("int64")}
    assert read(make, tmp_path / "double", rows, **features) == rows
    single = [math.inf, -math.inf, float("nan"), 2.0**24 + 2, 123456792.0, None]
    rows = read(make, tmp_path / "single", [{"one": one} for one in single], one=datasets.Value("float32"))
    assert repr([row["one"] for row in rows]) == repr(single)


def test_a_number_of_another_precision_is_not_shortened() -> None:
    assert shortest(24.296875, np.float16) == 24.3 and shortest(24.297, np.float16) == 24.297
    assert shortest(1e300, np.float16) == 1e300 and shortest(65184.0, np.float16) == 65184.0
