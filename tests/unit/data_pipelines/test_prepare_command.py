"""``vlm-pg prepare`` as a command: splits, names of rows, a second start, overwriting, wrong arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import gsm8k, nextqa
from data_pipelines.engine.command import pipeline
from tests.support.pipeline_rows import write_lines
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError
from vlm_pg.types import Sample


def gsm8k_row(number: int, answer: str = "") -> dict[str, str]:
    return {
        "question": f"How much is {number}?",
        "answer": answer or f"It is <<{number}={number}>>{number}.\n#### {number}",
    }


def samples(folder: Path, name: str) -> list[Sample]:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    if not sum(count for file, count in files.items() if file.startswith(name)):
        return []
    kept, bad = read_records(Path(f"{folder}:{name}"))
    assert not bad
    return kept


def ids(folder: Path, name: str) -> list[str]:
    return [sample.sample_id for sample in samples(folder, name)]


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return content


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_split_without_a_record_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    """Nor does anything advise to use it; one of an earlier start goes."""
    train = write_lines(tmp_path / "train.jsonl", [gsm8k_row(number) for number in range(4)])
    out, given = tmp_path / "out", ["--out", str(tmp_path / "out"), "--format", form]
    gsm8k.main(["--train", str(train), *given, "--eval-share", "0.9"])
    assert "Evaluate with: data.eval.gsm8k=" in capsys.readouterr().out and list(out.glob("eval*"))
    for share, shown in ((["--eval-share", "0"], "0"), ([], "0.01")):
        gsm8k.main(["--train", str(train), *given, *share, "--overwrite"])
        output = capsys.readouterr().out
        assert f"There is no eval split: no record is in --eval-share {shown}. Give --eval FILE, or raise" in output
        assert "Evaluate with" not in output and "Train with" in output and "eval-0" not in output
        assert not list(out.glob("eval*")) and len(list(out.glob("train*"))) == 1 and report(out)["train"] == 4
    test = write_lines(tmp_path / "test.jsonl", [gsm8k_row(9, "no gold")])
    gsm8k.main(["--train", str(train), "--eval", str(test), *given, "--overwrite"])
    assert "no record in the files of --eval is left" in capsys.readouterr().out and not list(out.glob("eval*"))


def test_several_files_a_second_start_and_changed_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_lines(tmp_path / "first.jsonl", [gsm8k_row(1)])
    second = tmp_path / "second.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([gsm8k_row(2)]), second)
    arguments = ["--train", str(first), str(second), "--eval-share", "0", "--out", str(tmp_path / "out")]
    assert gsm8k.main(arguments) == 0 and ids(tmp_path / "out", "train") == ["first-1", "second-1"]
    assert gsm8k.main(arguments) == 0 and "already prepared" in capsys.readouterr().out
    write_lines(first, [gsm8k_row(1), gsm8k_row(3)])
    with pytest.raises(ConfigError, match="prepared with other arguments"):
        gsm8k.main(arguments)
    assert gsm8k.main([*arguments, "--overwrite"]) == 0
    assert ids(tmp_path / "out", "train") == ["first-1", "first-2", "second-1"]


def test_files_of_the_same_name_have_rows_of_different_names(tmp_path: Path) -> None:
    """MATH comes as one folder a subject, each with a file of the same name."""
    files = []
    for index, folder in enumerate(("algebra", "geometry", "old/algebra")):
        (tmp_path / folder).mkdir(parents=True)
        files.append(write_lines(tmp_path / folder / "train.jsonl", [gsm8k_row(2 * index), gsm8k_row(2 * index + 1)]))
    arguments = ["--eval-share", "0", "--out", str(tmp_path / "out"), "--overwrite"]
    assert gsm8k.main(["--train", *map(str, files[:2]), *arguments]) == 0
    assert ids(tmp_path / "out", "train") == [
        "algebra-train-1",
        "algebra-train-2",
        "geometry-train-1",
        "geometry-train-2",
    ]
    assert gsm8k.main(["--train", *map(str, files), *arguments]) == 0
    names = ["1-algebra-train", "geometry-train", "3-algebra-train"]
    assert ids(tmp_path / "out", "train") == [f"{name}-{line}" for name in names for line in (1, 2)]
    assert report(tmp_path / "out")["refused"] == {}


def test_a_pipeline_runs_at_once_where_its_module_is_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gsm8k", "--out", "out"])
    with pytest.raises(SystemExit) as ended:
        pipeline(gsm8k.GSM8K, "", "__main__")
    assert ended.value.code == 2 and "error: Neither a folder nor --train" in capsys.readouterr().err


def test_overwriting_leaves_nothing_of_the_old_set(tmp_path: Path) -> None:
    out = tmp_path / "out"
    train = write_lines(tmp_path / "train.jsonl", [gsm8k_row(1)])
    test = write_lines(tmp_path / "test.jsonl", [gsm8k_row(2)])
    bad = write_lines(tmp_path / "bad.jsonl", [gsm8k_row(3, "no gold")])
    assert gsm8k.main(["--train", str(train), "--eval", str(test), "--out", str(out)]) == 0
    with pytest.raises(ConfigError, match="No record is left"):
        gsm8k.main(["--eval", str(bad), "--out", str(out), "--overwrite"])
    assert ids(out, "train") == ["train-1"], "what cannot be replaced is left as it was"
    (out / "notes.txt").write_text("mine")
    (tmp_path / "other.txt").write_text("mine")
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"files": manifest["files"] | {"../other.txt": 1}}))
    assert gsm8k.main(["--eval", str(test), "--out", str(out), "--overwrite"]) == 0
    assert not (out / "train.jsonl").exists() and ids(out, "eval") == ["test-1"]
    assert (out / "notes.txt").exists() and (tmp_path / "other.txt").exists()
    (out / "manifest.json").write_text("no manifest")
    with pytest.raises(ConfigError, match=r"holds eval-00000-of-00001\.parquet, manifest\.json, .*are not replaced"):
        gsm8k.main(["--eval", str(test), "--out", str(out), "--overwrite"])
    assert (out / "eval-00000-of-00001.parquet").exists() and (out / "manifest.json").read_text() == "no manifest"


def test_wrong_arguments_and_files_are_clear_errors(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    good = str(write_lines(tmp_path / "good.jsonl", [gsm8k_row(1)]))
    with pytest.raises(ConfigError, match=r"Neither a folder nor --train nor --eval is given.*Name them"):
        gsm8k.main(out)
    with pytest.raises(ConfigError, match=r"files to evaluate on, and --eval-share is given.*Leave one out"):
        gsm8k.main(["--train", good, "--eval", good, "--eval-share", "0.1", *out])
    with pytest.raises(ConfigError, match=r"--eval-share is 1\.0.*less than 1.*Choose"):
        gsm8k.main(["--train", good, "--eval-share", "1", *out])
    with pytest.raises(ConfigError, match=r"'nowhere\.jsonl' does not exist.*Correct the path"):
        gsm8k.main(["--train", "nowhere.jsonl", *out])
    with pytest.raises(ConfigError, match=r"'.*empty\.jsonl' has no rows"):
        gsm8k.main(["--train", str(write_lines(tmp_path / "empty.jsonl", [])), *out])
    other = str(write_lines(tmp_path / "other.jsonl", [{"question": "?"}]))
    with pytest.raises(ConfigError, match=r"other\.jsonl:1: the row has no answer\. Nearest is the form"):
        gsm8k.main(["--train", other, *out])
    with pytest.raises(
        ConfigError, match=r"Media root .* is not a folder.*Correct --media-root, or create .*: mkdir -p "
    ):
        nextqa.main(["--eval", good, "--media-root", str(tmp_path / "nowhere"), *out])
    broken = tmp_path / "broken.csv"
    broken.write_bytes(b"video,question\n\xff,what\n")
    with pytest.raises(ConfigError, match=r"cannot be read as CSV.*Correct the path"):
        nextqa.main(["--eval", str(broken), "--media-root", str(tmp_path), *out])
    bad = str(write_lines(tmp_path / "bad.jsonl", [gsm8k_row(1, "no gold")]))
    with pytest.raises(ConfigError, match=r"No record is left for train\.(.|\n)*refused +1  no_gold_answer"):
        gsm8k.main(["--train", bad, *out])
    assert not (tmp_path / "out" / "manifest.json").exists()
