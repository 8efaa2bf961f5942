"""Tables of comma separated values: a row is read as it was written, or refused; no cell is moved, cut or made up."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from data_pipelines.engine.dataset import read_rows
from data_pipelines.generic import dataset_of
from tests.support.pipeline_rows import parted
from vlm_pg.errors import ConfigError

MAP = """name: my
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
    return [(place.line, row) for place, row in read_rows(table(folder, text))]


def test_a_row_of_more_or_fewer_cells_than_columns_is_refused(tmp_path: Path) -> None:
    """A comma in a text without quotes moves all behind it: "Bob" would be option C, and the gold answer another."""
    path = table(
        tmp_path,
        f"{NAMES}How many balls?,1 ball,2 balls,3 balls,2\nIn Paris, who won?,Ann,Bob,2,1\nCut?,x,y\nFew?,x,y,,1\n",
    )
    (tmp_path / "map.yaml").write_text(MAP)
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
    (tmp_path / "map.yaml").write_text(MAP)
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
def test_a_quote_in_the_wrong_place_stops_with_the_line_its_row_begins_on(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"rows\.csv:{line}' cannot be read as CSV.*begins with a quote must end"):
        rows(tmp_path, text)


def test_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.csv' has several columns named label\. .* Rename or remove one"):
        rows(tmp_path, "question,label,label,,\n")


def test_a_cell_without_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.csv:2' cannot be read as CSV: field larger than field limit"):
        rows(tmp_path, f"a,b\n{'x' * (1 << 24)}x,2\n")
