"""Rows of annotation files are read as they were written, or refused; no cell is moved, cut or made up."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from data_pipelines.engine.dataset import keyed_rows, one_object, read_rows
from data_pipelines.generic import dataset_of
from tests.support.pipeline_rows import empty_files, parted, write_lines
from vlm_pg.data.fields import Unreadable
from vlm_pg.errors import ConfigError
from vlm_pg.types import Sample

CHOICE_MAP = """name: my
fields:
  problem: question
  data_type: {constant: text}
  problem_type: {constant: multiple choice}
  options: {columns: [a0, a1, a2]}
  answer: {field: label, given_as: index}
"""
NAMES = "question,a0,a1,a2,label\n"


def table(folder: Path, text: str) -> Path:
    path = folder / "rows.csv"
    path.write_bytes(text.encode())
    return path


def rows(folder: Path, text: str) -> list[tuple[int, Any]]:
    return [(index.line, row) for index, row in read_rows(table(folder, text))]


def test_a_row_of_more_or_fewer_cells_than_columns_is_refused(tmp_path: Path) -> None:
    """A comma in a text without quotes moves all behind it: "Bob" would be option C, and the gold answer another."""
    path = table(
        tmp_path,
        f"{NAMES}How many balls?,1 ball,2 balls,3 balls,2\nIn Paris, who won?,Ann,Bob,2,1\nCut?,x,y\nFew?,x,y,,1\n",
    )
    (tmp_path / "map.yaml").write_text(CHOICE_MAP)
    samples, refused = parted(dataset_of(tmp_path / "map.yaml"), path)
    assert [(one.sample_id, one.answer, one.options) for one in samples] == [
        ("rows-2", "C", ("A. 1 ball", "B. 2 balls", "C. 3 balls")),
        ("rows-5", "B", ("A. x", "B. y")),
    ]
    assert [(one.sample_id, one.reason, one.where) for one in refused] == [
        ("rows-3", "bad_csv_row", "rows.csv:3"),
        ("rows-4", "bad_csv_row", "rows.csv:4"),
    ]
    assert "a line of 6 cells below 5 column names. One that can be read is expected" in refused[0].message


def test_of_a_file_of_such_rows_alone_each_is_refused(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(CHOICE_MAP)
    path = table(tmp_path, NAMES + "In Paris, who won?,Ann,Bob,2,1\n" * 30)
    samples, refused = parted(dataset_of(tmp_path / "map.yaml"), path)
    assert not samples and [one.reason for one in refused] == ["bad_csv_row"] * 30


@pytest.mark.parametrize(
    "cells",
    [
        ["two\nlines", "x"],
        ["two\r\nlines\r\n", "x"],
        ["a, b", 'he said "hi, you"'],
        ["", ""],
        [" x ", "'"],
        ["\ufeffx", "é\u2028"],
        ["w " * 70_000, "x"],
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_what_is_written_by_the_rules_is_read_back(tmp_path: Path, cells: list[str], ending: str) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, lineterminator=ending)
        writer.writerows([["a", "b"], cells, ["next", "row"]])
    assert [row for _, row in read_rows(path)] == [dict(zip("ab", cells, strict=True)), {"a": "next", "b": "row"}]


def test_empty_lines_and_columns_without_a_name(tmp_path: Path) -> None:
    assert rows(tmp_path, '\n,a,,\n\n0,x,,\n5" disk,y,,\n') == [(4, {"a": "x"}), (5, {"a": "y"})]
    assert rows(tmp_path, "") == []
    assert rows(tmp_path, "a,b\n1,2") == [(2, {"a": "1", "b": "2"})]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('a,b\n1,2\n"open,2\n3,4\n5,6\n', 3),  # else the rest of the file is one cell
        ('a,b\n1,"open\n2,"x"\n', 2),
        ('a,b\n"two\nlines",2\n3,"x" y\n', 4),
        ('a,b\n"he said \\"hi, you\\"",2\n', 2),
        ('"a,b\n1,2\n', 1),
    ],
)
def test_a_misplaced_quote_is_an_error_with_the_first_line_of_its_row(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"rows\.csv:{line}' cannot be read as CSV.*begins with a quote must end"):
        rows(tmp_path, text)


def test_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.csv' has several columns named label\. .* Rename or remove one"):
        rows(tmp_path, "question,label,label,,\n")


def test_a_cell_without_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.csv:2' cannot be read as CSV: field larger than field limit"):
        rows(tmp_path, f"a,b\n{'x' * (1 << 24)}x,2\n")


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
def test_a_row_without_questions_is_refused(tmp_path: Path, questions: Any, reason: str) -> None:
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
