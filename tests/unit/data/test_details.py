"""Details of evaluation sets: kept in every form that records are written in, refused where they are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.data_sets import write_shards
from vlm_pg.data.fields import LONGEST_DETAILS
from vlm_pg.data.prepared import to_row
from vlm_pg.data.records import parse_record, read_records, to_record, write_records
from vlm_pg.errors import SampleError
from vlm_pg.types import Sample

DETAILS = {"task": "FAQ", "skills": ["a", "é"], "precision": 2, "unit": None, "nested": {"x": 1.5, "y": True}}
SAMPLE = Sample("1", "How many?", (), (), "3", "numerical", "s", "c", details=DETAILS)


def test_details_come_back_from_every_form(tmp_path: Path) -> None:
    assert parse_record(to_record(SAMPLE)) == SAMPLE
    assert parse_record(to_row(SAMPLE)) == SAMPLE
    write_records(tmp_path / "one.jsonl", [SAMPLE])
    (tmp_path / "set").mkdir()
    write_shards(tmp_path / "set", "eval", [SAMPLE])
    for path in (tmp_path / "one.jsonl", next((tmp_path / "set").iterdir())):
        assert read_records(path) == ([SAMPLE], [])


def test_without_details_a_record_has_no_such_field() -> None:
    bare = Sample("1", "How many?", (), (), "3", "numerical", "s", "c")
    assert "details" not in to_record(bare)
    assert parse_record(to_record(bare)).details == {} and hash(bare) == hash(SAMPLE)


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        ([1], "wrong_type", "'details' is a list. An object, or its JSON is expected"),
        ("{", "wrong_type", "a text that is no JSON"),
        ("[1]", "wrong_type", "'details' is a list"),
        ({"x": float("nan")}, "wrong_type", "a value that JSON does not have"),
        ({"x": "a" * LONGEST_DETAILS}, "details_too_long", "At most 20,000 is expected"),
        ("x" * (LONGEST_DETAILS + 1), "details_too_long", "At most 20,000 is expected"),
        ({"x": "\ud800"}, "not_unicode", "half of a character"),
    ],
)
def test_what_are_no_details_is_refused(value: Any, reason: str, message: str) -> None:
    with pytest.raises(SampleError, match=message) as caught:
        parse_record(to_record(SAMPLE) | {"details": value})
    assert caught.value.reason == reason
