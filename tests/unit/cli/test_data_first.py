"""Missing records are refused before anything that takes time, by every command alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.data_sets import write_shards
from tests.support.short_run import train_here
from vlm_pg import cli
from vlm_pg.config import load_config
from vlm_pg.data.records import parse_record
from vlm_pg.errors import ConfigError
from vlm_pg.training.setup import check_step_size

COMMANDS = {"train": ("train",), "check": ("check",), "eval": ("eval", "--config"), "verify": ("verify",)}


def record(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "problem_id": number, "problem": f"How much is {number}?", "data_type": "text", "problem_type": "numerical",
        "options": [], "solution": f"<answer>{number}</answer>", "path": "",
    } | changes  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``good.jsonl`` of 3 records, one of another source, ``empty.jsonl``, a prepared set without an eval split."""
    records = [record(0), record(1), record(2, data_source="other")]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "set").mkdir()
    write_shards(tmp_path / "set", "train", [parse_record(record(1))])
    return tmp_path


def config(folder: Path, data: dict[str, Any], **sections: Any) -> Path:
    """A run whose model is not there."""
    given = {"model": {"path": str(folder / "no_model")}, "training": {"steps": 1}, "run": {"dir": str(folder / "run")}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**given, "data": data, **sections}))
    return folder / "run.yaml"


@pytest.mark.parametrize(
    ("command", "key", "path", "message"),
    [
        ("train", "train", "absent.jsonl", "absent.jsonl' does not exist"),
        ("train", "eval", "empty.jsonl", "empty.jsonl' has no records. At least one is expected"),
        ("check", "train", "set:eval", "has the splits train, not 'eval'"),
        ("check", "eval", "absent.jsonl", "absent.jsonl' does not exist"),
        ("eval", "eval", "absent.jsonl", "absent.jsonl' does not exist"),
        ("verify", "train", "absent.jsonl", "absent.jsonl' does not exist"),
    ],
)
def test_records_come_before_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, key: str, path: str, message: str
) -> None:
    good, wrong = str(folder / "good.jsonl"), str(folder / path)
    data = {"train": wrong, "eval": {"held": good}} if key == "train" else {"train": good, "eval": {"held": wrong}}
    assert cli.main([*COMMANDS[command], str(config(folder, data))]) == 2
    error = capsys.readouterr().err
    assert f"error: data.{key}{'.held' if key == 'eval' else ''}: " in error and message in error


def test_sets_that_a_run_does_not_read_may_be_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, absent = str(folder / "good.jsonl"), str(folder / "absent.jsonl")
    data = {"train": good, "eval": {"held": absent, "other": good}}
    steps = {"steps": 1, "prompts_per_step": 3}
    assert cli.main(["train", str(config(folder, data, training=steps)), "eval.before=false", "eval.after=false"]) == 2
    assert "no_model" in capsys.readouterr().err
    for once in ("eval.before=true", "eval.after=true", "eval.every=1"):
        assert cli.main(["train", str(folder / "run.yaml"), "eval.before=false", "eval.after=false", once]) == 2
        assert "error: data.eval.held: " in capsys.readouterr().err
    assert cli.main(["check", str(folder / "run.yaml"), "eval.sets=[other]"]) == 2
    assert "no_model" in capsys.readouterr().err
    assert cli.main(["check", good, str(folder / "run.yaml")]) == 2
    assert "no_model" in capsys.readouterr().err


def test_of_several_training_sets_the_missing_one_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = {"one": str(folder / "good.jsonl"), "two": str(folder / "absent.jsonl")}
    assert cli.main(["train", str(config(folder, {"train": sets}))]) == 2
    assert "error: data.train.two: " in capsys.readouterr().err


def test_nothing_heavy_is_imported_before(folder: Path) -> None:
    data = {"train": str(folder / "absent.jsonl"), "eval": {"held": str(folder / "absent.jsonl")}}
    commands = [[*words, str(config(folder, data))] for words in COMMANDS.values()]
    script = (
        f"import sys\nfrom vlm_pg.cli import main\nassert [main(one) for one in {commands!r}] == [2] * 4\n"
        "heavy = [n for n in ('torch', 'transformers', 'av', 'decord', 'PIL') if n in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("absent.jsonl' does not exist") == 4


@pytest.mark.parametrize("changes", [{}, {"limit": 2}, {"mixture": {"unknown": 1.0, "other": 0.0}}])
def test_a_step_of_more_questions_than_there_are_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    """Before the model is loaded: there is none."""
    path = config(
        folder, {"train": str(folder / "good.jsonl"), **changes}, training={"steps": 1, "prompts_per_step": 4}
    )
    usable = 2 if changes else 3
    ended = train_here(path)
    assert ended.code == 2 and not (folder / "run").exists()
    assert (
        f"training.prompts_per_step is 4, and {folder / 'good.jsonl'} has {usable} usable question(s). A step asks no "
        f"question twice. Set training.prompts_per_step to {usable} or less" in ended.printed
    )
    assert "no_model" in train_here(path, f"training.prompts_per_step={usable}").printed


def test_a_step_of_fewer_questions_for_bad_records_is_said(folder: Path) -> None:
    path = config(folder, {"train": "x.jsonl"}, training={"steps": 1, "prompts_per_step": 4})
    lines: list[str] = []
    check_step_size(load_config(path), 4, 9, lines.append)
    assert not lines
    check_step_size(load_config(path), 3, 1, lines.append)
    assert lines == [
        "training.prompts_per_step is 4, and x.jsonl has 3 usable question(s) beside 1 bad record(s): a step asks 3"
    ]
    with pytest.raises(ConfigError, match=r"has 2 usable question\(s\)\. A step asks no question twice"):
        check_step_size(load_config(path), 2, 1, lines.append)
    with pytest.raises(ConfigError, match=r"has 3 usable question\(s\)\. A step .* \(data\.train, data\.limit"):
        check_step_size(load_config(path, ["data.limit=3"]), 3, 9, lines.append)
    with (folder / "good.jsonl").open("a") as file:
        file.write(json.dumps({"problem_id": 3}) + "\n")
    printed = train_here(path, f"data.train={folder / 'good.jsonl'}").printed
    assert "has 3 usable question(s) beside 1 bad record(s): a step asks 3" in printed and "no_model" in printed
