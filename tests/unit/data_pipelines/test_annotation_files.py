"""The folder that a data set unpacks to: its annotation files by split, or what was expected and what is there."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines.engine.annotation_files import find_files
from data_pipelines.engine.dataset import DataSet
from data_pipelines.generic import dataset_of as dataset_of_map
from vlm_pg.cli import main
from vlm_pg.commands import find_pipelines
from vlm_pg.errors import ConfigError

NAMES = sorted(set(find_pipelines()) - {"embedded", "generic"})


def dataset_of(name: str) -> DataSet:
    found: DataSet = getattr(importlib.import_module(f"data_pipelines.{name}"), name.upper())
    return found


def lay_out(folder: Path, pattern: str, rows: int = 1) -> None:
    """A file that a pattern names, or a shard of the split it does."""
    # Of "[0-9]" a 0.
    folder_name, colon, split = re.sub(r"\[(.)[^]]*\]", r"\1", pattern.replace("*", "x")).rpartition(":")
    path = folder / folder_name / f"{split}-00000-of-00001.parquet" if colon else folder / split
    path.parent.mkdir(parents=True, exist_ok=True)
    if colon:
        pyarrow.parquet.write_table(pyarrow.table({"a": list(range(rows))}), path)
    else:
        path.write_text(json.dumps([{}] * rows))


@pytest.mark.parametrize("name", NAMES)
def test_every_pattern_of_every_form_is_found(name: str, tmp_path: Path) -> None:
    dataset = dataset_of(name)
    assert dataset.name == name
    number = 0
    for form in dataset.forms:
        for split, patterns in form.files.items():
            for pattern in patterns:
                number += 1
                folder = tmp_path / str(number)
                lay_out(folder, pattern)
                found, _ = find_files(dataset, folder)
                assert len(found[split]) == 1, (pattern, found)
    assert number


def test_of_mirrors_in_one_folder_the_first_counts(tmp_path: Path) -> None:
    for pattern in ("test.jsonl", ".:test"):
        lay_out(tmp_path, pattern)
    found, (unread,) = find_files(dataset_of("gsm8k"), tmp_path)
    assert found == {"train": [], "eval": [tmp_path / "test.jsonl"]}
    assert (unread.split, unread.files) == ("eval", (Path(f"{tmp_path}:test"),))


def named(dataset: DataSet, folder: Path) -> tuple[dict[str, list[str]], list[tuple[str, list[str]]]]:
    """The files that are read and those that are not, by split and relative to the folder."""
    found, unread = find_files(dataset, folder)
    return (
        {split: [str(path.relative_to(folder)) for path in files] for split, files in found.items()},
        [(one.split, [str(path.relative_to(folder)) for path in one.files]) for one in unread],
    )


def test_each_split_has_files_of_the_first_form_that_has_any(tmp_path: Path) -> None:
    for pattern in ("VSI-590K/vsi_590k.jsonl", "VSI-Bench/test.jsonl", "VSI-Bench:test"):
        lay_out(tmp_path / "vsi", pattern)
    assert named(dataset_of("vsi"), tmp_path / "vsi") == (
        {"train": ["VSI-590K/vsi_590k.jsonl"], "eval": ["VSI-Bench/test.jsonl"]},
        [("eval", ["VSI-Bench:test"])],
    )
    for pattern in ("mc_question_train.json", "mc_question_val:validation"):
        lay_out(tmp_path / "perception", pattern)
    assert named(dataset_of("perception_test"), tmp_path / "perception") == (
        {"train": ["mc_question_train.json"], "eval": ["mc_question_val:validation"]},
        [],
    )
    for pattern in ("MATH/train/a/1.json", "MATH/test/a/1.json", "MATH/test/a/2.json", "MATH-500/test.jsonl"):
        lay_out(tmp_path / "math", pattern)
    assert named(dataset_of("math"), tmp_path / "math") == (
        {"train": ["MATH/train/a/1.json"], "eval": ["MATH-500/test.jsonl"]},
        [("eval", ["MATH/test/a/1.json", "MATH/test/a/2.json"])],
    )


def test_shards_matched_by_two_patterns_are_reported_once(tmp_path: Path) -> None:
    for folder_name in ("data", "elsewhere/data"):
        lay_out(tmp_path, f"{folder_name}:test")
    charades = dataset_of("charades_sta")
    assert named(charades, tmp_path) == ({"train": [], "eval": ["data:test"]}, [])
    lay_out(tmp_path, "charades_sta_test.txt")
    assert named(charades, tmp_path) == ({"train": [], "eval": ["charades_sta_test.txt"]}, [("eval", ["data:test"])])


def test_unread_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"train": "train", "main/train": "main", "main/test": "test"}
    for name, question in rows.items():
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        row = {"question": [question], "answer": ["#### 1"]}
        if name == "train":
            (tmp_path / "raw/train.jsonl").write_text(json.dumps({key: value[0] for key, value in row.items()}))
        else:
            pyarrow.parquet.write_table(pyarrow.table(row), tmp_path / f"raw/{name}-00000-of-00001.parquet")
    out, raw = tmp_path / "out", tmp_path / "raw"
    assert main(["prepare", "gsm8k", str(raw), "--out", str(out)]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("Not read")]
    assert line.startswith(f"Not read: '{raw}/main:train' (") and "Name files with --train and --eval" in line
    for name in ("manifest.json", "report.json"):
        (listed,) = json.loads((out / name).read_text())["unread_files"]
        assert (listed["split"], listed["files"], listed["count"]) == ("train", [f"{raw}/main:train"], 1)
    assert f"{raw}/main:train" in (out / "summary.html").read_text()
    assert main(["prepare", "gsm8k", "--eval", f"{raw}/main:test", "--out", str(tmp_path / "by-name")]) == 0
    assert "Not read" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (["test-00000-of-00002"], r"has 1 of the 2 shards of 'test' only.*Download the others"),
        (["test-00000-of-00001", "test-00001-of-00002"], r"has shards of 'test' of two divisions.*Remove the other"),
    ],
)
def test_a_split_that_is_there_in_part_is_not_passed_over(tmp_path: Path, there: list[str], message: str) -> None:
    """In one folder of several, and beside a file that would be taken in its place."""
    for subject in ("algebra", "geometry"):
        lay_out(tmp_path / "math" / subject, ".:train")
    for name in there:
        (tmp_path / f"math/geometry/{name}.parquet").write_bytes(b"")
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"math/geometry' {message}"):
        find_files(dataset_of("math"), tmp_path / "math")
    lay_out(tmp_path, "main/train.parquet")
    (tmp_path / "test.jsonl").write_text("{}")
    fields = {"problem": "q", "data_type": {"constant": "text"}, "problem_type": {"constant": "exact"}, "answer": "a"}
    (tmp_path / "map.yaml").write_text(json.dumps({"name": "mine", "fields": fields}))
    with pytest.raises(ConfigError, match=message):
        find_files(dataset_of_map(tmp_path / "map.yaml"), tmp_path)


def test_an_incomplete_split_that_is_not_read_is_reported(tmp_path: Path) -> None:
    """An earlier form of that split is there whole."""
    gsm8k = dataset_of("gsm8k")
    (tmp_path / "main").mkdir()
    (tmp_path / "main/test-00000-of-00002.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has 1 of the 2 shards of 'test' only"):
        find_files(gsm8k, tmp_path)
    (tmp_path / "test.jsonl").write_text("{}")
    found, (unread,) = find_files(gsm8k, tmp_path)
    assert found == {"train": [], "eval": [tmp_path / "test.jsonl"]}
    assert str(unread).startswith(f"'{tmp_path}/main:test' (")
    assert "not all of its shards are there; others" in str(unread)
    assert unread.as_json()["files"] == [f"{tmp_path}/main:test"]
    (tmp_path / "main/train-00000-of-00003.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has 1 of the \d shards of"):
        find_files(gsm8k, tmp_path)


def test_the_error_for_a_wrong_folder_lists_its_entries_and_the_expected_files(tmp_path: Path) -> None:
    star = dataset_of("star")
    with pytest.raises(ConfigError, match=r"is not a folder\. The folder that star unpacks to is expected"):
        find_files(star, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"Found are no files at all\. Give the folder as the archive unpacks"):
        find_files(star, tmp_path / "empty")
    (tmp_path / "named").mkdir()
    (tmp_path / "named/STAR_train_v1.json").write_text("[]")
    with pytest.raises(
        ConfigError, match=r"Expected are .*STAR_train\.json.* Found are STAR_train_v1\.json\. Give the folder"
    ):
        find_files(star, tmp_path / "named")
    lay_out(tmp_path / "outer/further/deep/STAR", "STAR_train.json")
    with pytest.raises(ConfigError, match=r"Found are further/\."):
        find_files(star, tmp_path / "outer")
    with pytest.raises(ConfigError, match=r"Its folder 'STAR' holds such files: give that one"):
        find_files(dataset_of("video_r1"), _with_inner(tmp_path / "inner"))


def _with_inner(folder: Path) -> Path:
    lay_out(folder / "STAR", "Video-R1-260k.json")
    return folder
