"""A folder that gets a data set of a hub: of one data set alone, and nothing fetched that nobody reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import generic
from data_pipelines.engine import hub
from data_pipelines.engine.hub import fetch
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError

FIELDS = {
    "problem": "question",
    "data_type": {"constant": "text"},
    "problem_type": {"constant": "exact"},
    "answer": "answer",
}


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the hub; it has every data set, whose one question tells its name."""
    asked: list[tuple[Any, ...]] = []

    def write(name: str, config: str | None, split: str, target: Path, revision: str | None) -> None:
        asked.append((name, config, split, revision))
        row = {"question": f"{name} {config} {split} {revision}", "answer": "x"}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), target)

    monkeypatch.setattr(hub, "_write", write)
    return asked


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
def test_another_data_set_is_not_read_in_its_place(
    tmp_path: Path, fetched: list[tuple[Any, ...]], more: list[str]
) -> None:
    """Nor beside it, as its other split."""
    first = command(tmp_path, "--hub", "a/a")
    for _ in range(2):
        assert generic.main(first) == 0
        assert [one.question for one in open_records(Path(f"{tmp_path}/out:train"))[0]] == ["a/a None train None"]
    assert fetched == [("a/a", None, "train", None)], "it is fetched once"
    with pytest.raises(ConfigError, match=r"was fetched from 'a/a', configuration default; asked for is .*Choose"):
        generic.main([*command(tmp_path, *more), "--overwrite"])
    assert len(fetched) == 1


def test_a_configuration_and_a_revision_are_asked_for(tmp_path: Path, fetched: list[tuple[Any, ...]]) -> None:
    more = ["--hub", "a/a", "--hub-config", "socratic", "--hub-revision", "1f3", "--hub-splits", "train", "test"]
    assert generic.main(command(tmp_path, *more)) == 0
    assert fetched == [("a/a", "socratic", "train", "1f3"), ("a/a", "socratic", "test", "1f3")]


def test_a_file_from_nobody_knows_where(tmp_path: Path, fetched: list[tuple[Any, ...]]) -> None:
    fetch("a/a", None, "train", tmp_path)
    (tmp_path / ".train-00000-of-00001.parquet.fetched").write_text("{")
    with pytest.raises(ConfigError, match=r"was fetched from another place; asked for is 'a/a'"):
        fetch("a/a", None, "train", tmp_path)
    (tmp_path / ".train-00000-of-00001.parquet.fetched").unlink()
    said = r"is there, and it is not known from where: an earlier version may.*give the folder in the place of --hub"
    with pytest.raises(ConfigError, match=said):
        fetch("a/a", None, "train", tmp_path)
    (tmp_path / "train-00000-of-00001.parquet").unlink()
    fetch("b/b", None, "train", tmp_path)
    assert len(fetched) == 2


def test_of_a_set_that_is_finished_it_is_not_asked(
    tmp_path: Path, fetched: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """By a version that left no notes of where shards are from."""
    given = command(tmp_path, "--hub", "a/a")
    assert generic.main(given) == 0
    (tmp_path / "raw/.train-00000-of-00001.parquet.fetched").unlink()
    capsys.readouterr()
    assert generic.main(given) == 0 and "is already prepared" in capsys.readouterr().out
    for more in (["--overwrite"], ["--seed", "5"], ["--hub-splits", "train", "test"]):
        with pytest.raises(ConfigError, match=r"an earlier version may have fetched it"):
            generic.main([*given, *more])
    (tmp_path / "raw/.train-00000-of-00001.parquet.fetched").write_text("{")
    with pytest.raises(ConfigError, match=r"was fetched from another place"):
        generic.main(given)
    assert len(fetched) == 1


def test_one_that_could_not_be_fetched_stands_in_no_ones_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a name was misspelt."""
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_write", lambda *some: 1 / 0)
        with pytest.raises(ConfigError, match="cannot be fetched"):
            fetch("a/typo", None, "train", tmp_path)
    monkeypatch.setattr(hub, "_write", lambda name, config, split, target, revision: target.write_bytes(b"x"))
    fetch("a/a", None, "train", tmp_path)


def test_a_folder_goes_by_its_whole_path(
    tmp_path: Path, fetched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("one", "two"):
        (tmp_path / place / "set").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one")
    fetch("set", None, "train", tmp_path / "raw")
    fetch(f"{tmp_path}/two/../one/set", None, "train", tmp_path / "raw")
    monkeypatch.chdir(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"was fetched from '.*one/set'.*; asked for is '.*two/set'"):
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
def test_splits_that_nobody_reads_are_not_fetched(
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
