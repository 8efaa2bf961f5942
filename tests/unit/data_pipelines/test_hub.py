"""Data sets of a hub: a folder holds one alone, nothing is fetched that is not read, and CSV is read as from disk."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import generic
from data_pipelines.engine import hub
from data_pipelines.engine.hub import fetch
from vlm_pg.data.files import read_raw
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError

CHOICE_MAP = """name: my
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


def source_of(folder: Path, text: str, card: str = "", name: str = "train.csv") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    if card:
        (folder / "README.md").write_text(f"---\n{card}---\n")
    return folder


def fetched_rows(source: Path, to: Path) -> list[dict[str, object]]:
    return [row for _, row in read_raw(fetch(str(source), None, "train", to))]


def test_every_text_stays_one(tmp_path: Path) -> None:
    source = tmp_path / "set"
    source.mkdir()
    with (source / "train.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["a", "b"], *([text, ""] for text in TEXTS)])
    assert fetched_rows(source, tmp_path / "raw") == [{"a": text, "b": ""} for text in TEXTS]
    source_of(source, "a,b\n8,x\n", name="train-2.csv")
    assert fetched_rows(source, tmp_path / "both")[:2] == [{"a": "8", "b": "x"}, {"a": "None", "b": ""}]


def test_declared_features_and_separators_are_used(tmp_path: Path) -> None:
    card = (
        "dataset_info:\n  features:\n  - name: n\n    dtype: int64\n  - name: animal\n    dtype:\n      class_label:\n"
        "        names:\n          '0': cat\n          '1': None\n"
    )
    source = source_of(tmp_path / "set", "animal,n\n1,7\n0,\n", card)
    assert fetched_rows(source, tmp_path / "raw") == [{"n": 7, "animal": "None"}, {"n": None, "animal": "cat"}]
    source = source_of(
        tmp_path / "tabs",
        "a\tb\nx, y\t2\n",
        "configs:\n- config_name: default\n  sep: \"\\t\"\n  data_files: '*.csv'\n",
    )
    assert fetched_rows(source, tmp_path / "tabs-raw") == [{"a": "x, y", "b": "2"}]


@pytest.mark.parametrize(
    ("text", "card", "message"),
    [
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
    source = source_of(tmp_path / "set", text, card)
    with pytest.raises(
        ConfigError, match=rf"cannot be fetched: .*{message}.* Or: Take its files from '.*/set' and give"
    ):
        fetch(str(source), None, "train", tmp_path / "raw")
    assert not list((tmp_path / "raw").iterdir())
    with pytest.raises(ConfigError, match=r"it has the splits train\."):
        fetch(str(source), None, "test", tmp_path / "raw")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,a\n1,2\n", "several columns named a"),
        ('a,b\n"x"y,1\n', r"csv:2' cannot"),
        ("a,b\n1,2\n1\n", r"'train\.csv:3' is a line of 1 cells below 2 column names"),
        ("a,b\n1,2,3\n", r"'train\.csv:2' is a line of 3 cells .* given with --train such a row alone is refused"),
    ],
)
def test_a_file_that_cannot_be_read_is_to_be_corrected_first(tmp_path: Path, text: str, message: str) -> None:
    source = source_of(tmp_path / "set", text)
    expected = (
        rf"is not fetched: .*{message}.*Take its files from '.*/set', correct that one, and give them with --train"
    )
    with pytest.raises(ConfigError, match=expected):
        fetch(str(source), None, "train", tmp_path / "raw")
    assert not list((tmp_path / "raw").iterdir())


def test_rows_with_fewer_options_than_columns_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "map.yaml").write_text(CHOICE_MAP)
    source = source_of(
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


FIELDS = {
    "problem": "question",
    "data_type": {"constant": "text"},
    "problem_type": {"constant": "exact"},
    "answer": "answer",
}


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the hub; it has every data set, whose one question tells its name."""
    requests: list[tuple[Any, ...]] = []

    def write(name: str, config: str | None, split: str, target: Path, revision: str | None) -> None:
        requests.append((name, config, split, revision))
        row = {"question": f"{name} {config} {split} {revision}", "answer": "x"}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), target)

    monkeypatch.setattr(hub, "_write", write)
    return requests


def command(folder: Path, *more: str, files: dict[str, list[str]] | None = None) -> list[str]:
    described: dict[str, Any] = {"name": "mine", "fields": FIELDS} | ({"files": files} if files else {})
    (folder / "map.yaml").write_text(json.dumps(described))
    given = ["--map", f"{folder}/map.yaml", "--hub-folder", f"{folder}/raw", "--allow-hub", "--out", f"{folder}/out"]
    return [*given, "--eval-share", "0", *more] if "test" not in more else [*given, *more]


@pytest.mark.parametrize(
    "more",
    [
        ["--hub", "b/b"],
        ["--hub", "a/a", "--hub-config", "socratic"],
        ["--hub", "a/a", "--hub-revision", "1f3"],
        ["--hub", "b/b", "--hub-splits", "test"],
    ],
)
def test_a_folder_of_another_data_set_is_refused(
    tmp_path: Path, fetched: list[tuple[Any, ...]], more: list[str]
) -> None:
    """Nor beside it, as its other split."""
    first = command(tmp_path, "--hub", "a/a")
    for _ in range(2):
        assert generic.main(first) == 0
        assert [one.question for one in open_records(Path(f"{tmp_path}/out:train"))[0]] == ["a/a None train None"]
    assert fetched == [("a/a", None, "train", None)], "it is fetched once"
    with pytest.raises(ConfigError, match=r"was fetched from 'a/a', configuration default; requested is .*Choose"):
        generic.main([*command(tmp_path, *more), "--overwrite"])
    assert len(fetched) == 1


def test_configuration_and_revision_are_requested(tmp_path: Path, fetched: list[tuple[Any, ...]]) -> None:
    more = ["--hub", "a/a", "--hub-config", "socratic", "--hub-revision", "1f3", "--hub-splits", "train", "test"]
    assert generic.main(command(tmp_path, *more)) == 0
    assert fetched == [("a/a", "socratic", "train", "1f3"), ("a/a", "socratic", "test", "1f3")]


def test_a_shard_of_unknown_origin_is_refused(tmp_path: Path, fetched: list[tuple[Any, ...]]) -> None:
    fetch("a/a", None, "train", tmp_path)
    expected = r"was fetched from an unknown place; requested is 'a/a'.*give the folder instead of --hub"
    for spoil in (lambda note: note.write_text("{"), Path.unlink):
        spoil(tmp_path / ".train-00000-of-00001.parquet.fetched")
        with pytest.raises(ConfigError, match=expected):
            fetch("a/a", None, "train", tmp_path)
    (tmp_path / "train-00000-of-00001.parquet").unlink()
    fetch("b/b", None, "train", tmp_path)
    assert len(fetched) == 2


def test_a_failed_fetch_leaves_no_note_of_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a name was misspelt."""
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_write", lambda *some: 1 / 0)
        with pytest.raises(ConfigError, match="cannot be fetched"):
            fetch("a/typo", None, "train", tmp_path)
    monkeypatch.setattr(hub, "_write", lambda name, config, split, target, revision: target.write_bytes(b"x"))
    fetch("a/a", None, "train", tmp_path)


def test_a_folder_is_identified_by_its_absolute_path(
    tmp_path: Path, fetched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in ("one", "two"):
        (tmp_path / index / "set").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one")
    fetch("set", None, "train", tmp_path / "raw")
    fetch(f"{tmp_path}/two/../one/set", None, "train", tmp_path / "raw")
    monkeypatch.chdir(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"was fetched from '.*one/set'.*; requested is '.*two/set'"):
        fetch("set", None, "train", tmp_path / "raw")
    with pytest.raises(ConfigError, match=r"--hub-revision 1f3 is given, and --hub names a folder"):
        generic.main(command(tmp_path, "--hub", "set", "--hub-revision", "1f3"))


@pytest.mark.parametrize(
    ("splits", "files", "unread"),
    [
        (["train", "validation"], None, "validation"),
        (["train[:2]"], None, r"train\[:2\]"),
        (["train", "test", "validation"], {"train": [".:train"], "eval": [".:validation", ".:test"]}, "test"),
        (["train", "../x"], None, r"\.\./x"),
    ],
)
def test_splits_that_would_not_be_read_are_not_fetched(
    tmp_path: Path, fetched: list[tuple[Any, ...]], splits: list[str], files: dict[str, list[str]] | None, unread: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--hub-splits has {unread}, which would not be read.*files: \{{eval"):
        generic.main(command(tmp_path, "--hub", "a/a", "--hub-splits", *splits, files=files))
    assert not fetched


@pytest.mark.parametrize("pattern", [".:validation", "*.parquet", "validation-*.parquet"])
def test_splits_that_the_map_names_are_fetched(tmp_path: Path, fetched: list[tuple[Any, ...]], pattern: str) -> None:
    files = {"train": [".:train"], "eval": [pattern]}
    splits = ["validation"] if pattern == "*.parquet" else ["train", "validation"]
    arguments = command(tmp_path, "--hub", "a/a", "--hub-splits", *splits, files=files)
    arguments[arguments.index("--eval-share") : arguments.index("--eval-share") + 2] = []
    assert generic.main(arguments) == 0 and len(fetched) == len(splits)


def test_what_goes_with_a_hub_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hub-folder is given without --hub"):
        generic.main(command(tmp_path, "--train", "rows.jsonl"))
