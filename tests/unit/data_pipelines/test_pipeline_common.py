"""A prepared folder is complete or says why not; gold answers earn the full reward or are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import gsm8k, run
from data_pipelines.engine import output_folder
from data_pipelines.engine.output_folder import MANIFEST, find_prepared, locked, write_manifest
from vlm_pg.errors import ConfigError
from vlm_pg.progress import Bar
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import BadSample, Sample

ARGUMENTS = {"seed": 0, "train": 8}


def sample(answer: str, answer_kind: str, options: tuple[str, ...] = ()) -> Sample:
    return Sample("1", "How many?", (), options, answer, answer_kind, "test", "test")  # type: ignore[arg-type]


def prepared(folder: Path) -> Path:
    (folder / "train.jsonl").write_text("{}\n")
    write_manifest(folder, ARGUMENTS, {"train.jsonl": 1})
    return folder


def test_a_preparation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="why"), locked(tmp_path / "new"):
        raise ConfigError("why")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="why"), locked(tmp_path / "old"):
        raise ConfigError("why")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["mine.txt"]


def test_many_at_once_hold_it_one_after_the_other(tmp_path: Path) -> None:
    """Also where each removes the lock, and the folder, that others wait for."""
    holding, most = 0, 0
    guard = threading.Lock()

    def hold() -> None:
        nonlocal holding, most
        for _ in range(20):
            with locked(tmp_path / "set"):
                with guard:
                    holding += 1
                    most = max(most, holding)
                time.sleep(0.001)
                with guard:
                    holding -= 1

    with ThreadPoolExecutor(4) as pool:
        for held in [pool.submit(hold) for _ in range(4)]:
            held.result()
    assert most == 1 and not (tmp_path / "set").exists()


def test_a_folder_that_comes_and_goes_is_asked_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed and made again by others, between any two questions whether it is there and what it is."""
    folder, mkdir, asked = tmp_path / "set", Path.mkdir, iter((True, True, False))

    def made_by_another(path: Path, *arguments: Any, **options: Any) -> None:
        if next(asked, False):
            raise FileExistsError(path)
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", made_by_another)
    monkeypatch.setattr(output_folder.os.path, "lexists", lambda path: True)
    with locked(folder):
        assert folder.is_dir()
    assert not folder.exists()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="it is no folder"), locked(tmp_path / name):
            pass
    (tmp_path / "home").mkdir()
    (tmp_path / "led").symlink_to(tmp_path / "home")
    with locked(tmp_path / "led"):
        assert (tmp_path / "home" / ".lock").exists()


def test_a_folder_without_manifest_is_not_prepared(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert not find_prepared(tmp_path, ARGUMENTS)


def test_equal_arguments_find_it_prepared_whatever_their_order(tmp_path: Path) -> None:
    assert find_prepared(prepared(tmp_path), {"train": 8, "seed": 0})


def test_other_arguments_are_refused_and_both_sides_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has \{'seed': 0\}, asked for is \{'seed': 1\}.*Choose another --out"):
        find_prepared(prepared(tmp_path), {**ARGUMENTS, "seed": 1})


def test_a_lost_file_is_named(tmp_path: Path) -> None:
    (prepared(tmp_path) / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"lost train\.jsonl since it was prepared.*Pass --overwrite"):
        find_prepared(tmp_path, ARGUMENTS)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"arguments": 1, "files": {}, "fingerprint": "x"}', "\udcff"])
def test_a_manifest_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"is not the manifest of a prepared folder.*Choose another --out"):
        find_prepared(tmp_path, ARGUMENTS)


def test_a_folder_is_held_by_one_process_at_a_time_and_freed_when_it_dies(tmp_path: Path) -> None:
    holder = (
        "import sys, time; from pathlib import Path; from data_pipelines.engine.output_folder import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    waiter = (
        "import sys; from pathlib import Path; from data_pipelines.engine.output_folder import locked\n"
        "print('asking', flush=True)\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, tmp_path], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with subprocess.Popen([sys.executable, "-c", waiter, tmp_path], stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None and second.stdout.readline() == "asking\n"
            os.set_blocking(second.stdout.fileno(), False)
            time.sleep(0.5)
            assert second.stdout.readline() == ""
            first.kill()
            assert second.wait(timeout=60) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Cannot write to --out"), locked(tmp_path / "set"):
        pass


def test_an_out_below_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"Cannot write to --out .* Choose another"),
        locked(tmp_path / "file" / "set"),
    ):
        pass


@pytest.mark.parametrize(
    ("answer", "answer_kind", "options"),
    [
        ("B", "multiple_choice", ("A. red", "B. blue")),
        ("5.0", "numerical", ()),
        ("no entry", "ocr", ()),
        ("a red lorry on a bridge", "free_form", ()),
        ("keyboard", "free_form", ()),
        ("3.25", "regression", ()),
        ("3.25", "mean_relative_accuracy", ()),
        ("[10, 20, 30, 40]", "box", ()),
        ("[12.5, 30]", "time_span", ()),
        ("New York", "exact", ()),
        ("Yes", "yes_no", ()),
        ("A, B", "multiple_select", ("A. red", "B. blue")),
        ("none", "multiple_select", ("A. red", "B. blue")),
    ],
)
def test_good_gold_answers_pass(answer: str, answer_kind: str, options: tuple[str, ...]) -> None:
    assert list(gold_faults([sample(answer, answer_kind, options)])) == [None]


@pytest.mark.parametrize(
    ("answer", "answer_kind", "said"),
    [
        ("many", "numerical", "does not state one number"),
        ("0", "regression", "gold answer is 0"),
        ("see <think>", "ocr", "format 0.0"),
    ],
)
def test_gold_answers_that_cannot_be_rewarded_are_refused(answer: str, answer_kind: str, said: str) -> None:
    good = sample("5", "numerical")
    none, fault, _ = gold_faults([good, sample(answer, answer_kind), good])
    assert none is None and fault is not None and fault.reason == "unscorable_gold_answer"
    assert re.search(f"{said}.*must earn the full reward", str(fault))


def test_progress_is_a_line_a_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("Checking", 100) as bar:
        for _ in range(100):
            bar.advance(1)
    lines = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"Checking: {done} of 100" for done in (25, 50, 75, 100)]


def test_user_errors_of_a_script_are_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ConfigError("--seed is -1.")

    assert run(main) == 2
    assert capsys.readouterr().err == "error: --seed is -1.\n"
    assert run(lambda: 0) == 0


def test_the_manifest_holds_the_arguments_readably(tmp_path: Path) -> None:
    written = json.loads((prepared(tmp_path) / MANIFEST).read_text())
    assert written["arguments"] == ARGUMENTS and written["files"] == {"train.jsonl": 1}


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_names_of_files_and_records_may_be_no_unicode(tmp_path: Path, form: str) -> None:
    path = tmp_path / "caf\udce9.jsonl"
    path.write_text(
        '{"question": "How much is 1?", "answer": "#### 1"}\n{"question": "x\\ud83d", "answer": "#### 2"}\n'
    )
    arguments = ["--train", str(path), "--out", str(tmp_path / "out"), "--eval-share", "0", "--format", form]
    assert gsm8k.main(arguments) == 0
    refused = BadSample(**json.loads((tmp_path / "out/refused.jsonl").read_text()))
    assert (refused.sample_id, refused.reason) == ("caf\\udce9-2", "not_unicode")
    assert json.loads((tmp_path / "out/report.json").read_text())["train_files"] == [str(path)]
    assert gsm8k.main(arguments) == 0
