"""A CSV file of a hub is read as the same file on disk: no text is taken for a missing value, a number or a date."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import datasets
import pytest

from data_pipelines import generic
from data_pipelines.engine.hub import fetch, rows_and_lost
from vlm_pg.data.files import read_raw
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError

MAP = """name: my
fields:
  problem_id: id
  problem: question
  data_type: {constant: text}
  problem_type: {constant: multiple choice}
  options: {columns: [a0, a1, a2, a3]}
  answer: {field: label, given_as: index}
"""
TEXTS = ["None", "NA", "nan", "null", "007", "1e3", "True", "2020-01-01", " x ", "1.0", "-", 'two\nlines, "a"', "é"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def hub(folder: Path, text: str, card: str = "", name: str = "train.csv") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    if card:
        (folder / "README.md").write_text(f"---\n{card}---\n")
    return folder


def fetched(source: Path, to: Path) -> list[dict[str, object]]:
    return [row for _, row in read_raw(fetch(str(source), None, "train", to))]


def test_every_text_stays_one(tmp_path: Path) -> None:
    source = tmp_path / "set"
    source.mkdir()
    with (source / "train.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["a", "b"], *([text, ""] for text in TEXTS)])
    assert fetched(source, tmp_path / "raw") == [{"a": text, "b": ""} for text in TEXTS]
    hub(source, "a,b\n8,x\n", name="train-2.csv")
    assert fetched(source, tmp_path / "both")[:2] == [{"a": "8", "b": "x"}, {"a": "None", "b": ""}]


def test_what_the_data_set_says_of_its_columns_counts(tmp_path: Path) -> None:
    card = (
        "dataset_info:\n  features:\n  - name: n\n    dtype: int64\n  - name: animal\n    dtype:\n      class_label:\n"
        "        names:\n          '0': cat\n          '1': None\n"
    )
    source = hub(tmp_path / "set", "animal,n\n1,7\n0,\n", card)
    assert fetched(source, tmp_path / "raw") == [{"n": 7, "animal": "None"}, {"n": None, "animal": "cat"}]
    source = hub(
        tmp_path / "tabs",
        "a\tb\nx, y\t2\n",
        "configs:\n- config_name: default\n  sep: \"\\t\"\n  data_files: '*.csv'\n",
    )
    assert fetched(source, tmp_path / "tabs-raw") == [{"a": "x, y", "b": "2"}]


@pytest.mark.parametrize(
    ("text", "card", "message"),
    [
        ("a,b\n1\n", "", r"no rows that can be read: 'train\.csv:2' is a line of 1 cells below 2 column names"),
        ("a,b\n", "", r"it has no rows"),
        (
            "a;b\n1;2\n",
            "configs:\n- config_name: default\n  sep: ';'\n  skiprows: 1\n  data_files: '*.csv'\n",
            r"are to be read with skiprows, which is not known here",
        ),
        (
            "b\n1\n",
            "dataset_info:\n  features:\n  - name: a\n    dtype: string\n",
            r"'train\.csv' has the columns b, not a",
        ),
    ],
)
def test_what_cannot_be_read_so_is_refused(tmp_path: Path, text: str, card: str, message: str) -> None:
    source = hub(tmp_path / "set", text, card)
    with pytest.raises(
        ConfigError, match=rf"cannot be fetched: .*{message}.* Or: Take its files from '.*/set' and give"
    ):
        fetch(str(source), None, "train", tmp_path / "raw")
    assert not list((tmp_path / "raw").iterdir())
    with pytest.raises(ConfigError, match=r"it has the splits train\."):
        fetch(str(source), None, "test", tmp_path / "raw")


@pytest.mark.parametrize(
    ("text", "message"), [("a,a\n1,2\n", "several columns named a"), ('a,b\n"x"y,1\n', r"csv:2' cannot")]
)
def test_a_file_that_cannot_be_read_is_to_be_corrected_first(tmp_path: Path, text: str, message: str) -> None:
    source = hub(tmp_path / "set", text)
    said = rf"is not fetched: .*{message}.*Take its files from '.*/set', correct that one, and give them with --train"
    with pytest.raises(ConfigError, match=said):
        fetch(str(source), None, "train", tmp_path / "raw")
    assert not list((tmp_path / "raw").iterdir())


def test_rows_that_lost_or_won_cells_are_refused_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And they are when the split is there already; all others are read."""
    (tmp_path / "map.yaml").write_text(MAP)
    lines = ["id,question,a0,a1,a2,a3,label", *(f"{n},How many is {n}?,x,y,z,w,1" for n in range(70))]
    lines[3] += ",extra"
    lines[70] = "69,short"
    source = hub(tmp_path / "set", "\n".join(lines) + "\n")
    arguments = ["--map", str(tmp_path / "map.yaml"), "--eval-share", "0", "--workers", "0"]
    arguments += ["--hub", str(source), "--hub-folder", str(tmp_path / "raw"), "--allow-hub"]
    for out in (tmp_path / "one", tmp_path / "two"):
        assert generic.main([*arguments, "--out", str(out)]) == 0
        said = capsys.readouterr().out
        assert "raw:train is there. 2 rows of its files cannot be read; each is refused with its line." in said
        refused = [json.loads(line) for line in (out / "refused.jsonl").read_text().splitlines()]
        assert [(one["where"], one["reason"]) for one in refused] == [
            ("train.csv:4", "bad_csv_row"),
            ("train.csv:71", "bad_csv_row"),
        ]
        assert "a line of 8 cells below 7 column names" in refused[0]["message"]
        assert len(open_records(Path(f"{out}:train"))[0]) == 68
    (tmp_path / "raw/train-00000-of-00001.parquet").unlink()
    hub(source, "\n".join([lines[0], lines[1]]))
    fetch(str(source), None, "train", tmp_path / "raw")
    assert [row for _, row in rows_and_lost(Path(f"{tmp_path}/raw:train"))] == fetched(source, tmp_path / "raw")
    assert not list((tmp_path / "raw").glob(".*lost*"))


def test_rows_with_fewer_options_than_columns_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "map.yaml").write_text(MAP)
    source = hub(
        tmp_path / "set",
        "id,question,a0,a1,a2,a3,label\n007,How many?,One,Two,Three,None,0\n008,Which?,DE,FR,NA,,1\n9,Who?,x,y,,,1\n",
    )
    arguments = ["--map", str(tmp_path / "map.yaml"), "--out", str(tmp_path / "out"), "--eval-share", "0"]
    hub_arguments = ["--hub", str(source), "--hub-folder", str(tmp_path / "raw"), "--allow-hub", "--workers", "0"]
    assert generic.main([*arguments, *hub_arguments]) == 0
    assert "kept          2  of them have fewer options than 4 columns" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/report.json").read_text())["fewer_options_than_columns"] == 2
    samples, _ = open_records(Path(f"{tmp_path / 'out'}:train"))
    assert [(one.sample_id, one.options[-1]) for one in samples] == [
        ("007", "D. None"),
        ("008", "C. NA"),
        ("9", "B. y"),
    ]
