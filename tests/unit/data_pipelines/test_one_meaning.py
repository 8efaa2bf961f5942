"""What a file says twice, or of itself, is read in one way or refused: names, values under one name, empty lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_pipelines.engine.dataset import keyed_rows, one_object
from data_pipelines.generic import dataset_of
from tests.support.pipeline_rows import empty_files, parted, write_lines
from vlm_pg.data.fields import Unreadable
from vlm_pg.types import Sample

MAP = """name: my
fields:
  problem: q
  data_type: {constant: text}
  problem_type: {constant: exact}
  answer: a
"""


def prepared(folder: Path, content: Any, beside: str) -> list[tuple[str, str]]:
    """Of each question of a file its name, and its answer or why there is none."""
    (folder / "map.yaml").write_text(MAP + beside)
    path = folder / "rows.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    samples, refused = parted(dataset_of(folder / "map.yaml"), path)
    found = [
        (one.where, one.sample_id, one.answer if isinstance(one, Sample) else one.reason)
        for one in (*samples, *refused)
    ]
    return [(name, outcome) for _, name, outcome in sorted(found)]


def row_of(folder: Path, text: str) -> Any:
    (folder / "1.json").write_text(text)
    ((_, row),) = one_object(folder / "1.json")
    return row


def test_a_file_of_one_row_knows_its_path(tmp_path: Path) -> None:
    row = row_of(tmp_path, '{"q": "1?", "a": "x", "a": "x"}')
    assert row == {"q": "1?", "a": "x", "file": str(tmp_path / "1.json")}


def test_a_name_with_two_values_is_not_the_last_of_them(tmp_path: Path) -> None:
    assert row_of(tmp_path, '{"a": "x", "b": 1, "a": "y"}') == Unreadable("an object that gives 'a' different values")
    text = '{"q": "1?", "a": "x", "a": "y", "a": "y"}'
    assert prepared(tmp_path, text, "file_is_row: true\n") == [("rows-1", "unreadable_value")]


def test_a_field_called_as_the_path_is_refused(tmp_path: Path) -> None:
    row = row_of(tmp_path, '{"q": "1?", "file": "mine"}')
    assert isinstance(row, Unreadable) and row.reason == "two_names" and "a field 'file'" in row.what
    assert prepared(tmp_path, {"q": "1?", "a": "x", "file": None}, "file_is_row: true\n") == [("rows-1", "two_names")]


def test_a_row_under_a_name_that_is_not_its_own_is_refused(tmp_path: Path) -> None:
    row = {"q": "1?", "a": "x"}
    rows = {
        "k1": row,
        "k2": row | {"id": "other"},
        "k3": row | {"id": "k3"},
        "4": row | {"id": 4},
        "5": row | {"id": None},
    }
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    found = [one for _, one in keyed_rows("id")(tmp_path / "rows.json")]
    assert [one["id"] if isinstance(one, dict) else one.reason for one in found] == [
        "k1",
        "two_names",
        "k3",
        4,
        "two_names",
    ]
    assert found[1].what == "called 'k2' in its file and 'other' in its field 'id'"
    assert [outcome for _, outcome in prepared(tmp_path, rows, "keyed_by: id\n")] == [
        "x",
        "two_names",
        "x",
        "x",
        "two_names",
    ]


@pytest.mark.parametrize(
    ("questions", "reason"), [([], "no_questions"), (None, "wrong_type"), ({}, "wrong_type"), ("", "wrong_type")]
)
def test_a_row_without_questions_is_told_of(tmp_path: Path, questions: Any, reason: str) -> None:
    rows = [{"qs": [{"q": "1?", "a": "x"}]}, {"qs": questions}]
    expected = [("rows-1-1", "x"), ("rows-1.2", reason)]
    assert prepared(tmp_path, rows, "questions: qs\n") == expected


def test_a_medium_that_lies_in_two_folders_of_the_map_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "media"
    empty_files(root, "part1/1.png", "part2/1.png", "part2/2.png")
    image = MAP.replace("constant: text", "constant: image") + "  path: p\n"
    (tmp_path / "map.yaml").write_text(image + "media_folders: ['part*']\n")
    rows = write_lines(tmp_path / "rows.jsonl", [{"q": "?", "a": "x", "p": f"{number}.png"} for number in (1, 2)])
    (sample,), (refused,) = parted(dataset_of(tmp_path / "map.yaml"), rows, root=root)
    assert sample.media[0].path == "part2/2.png" and refused.reason == "ambiguous_media"
    assert "'1.png' may be part1/1.png, part2/1.png" in refused.message
