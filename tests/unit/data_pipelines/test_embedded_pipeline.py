"""The embedded set: prepared once, the same every time, held-out orders only where they belong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data_pipelines import embedded
from data_pipelines.flashes import SEEN_ORDERS, UNSEEN_ORDERS, Clip, make_clips
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError
from vlm_pg.types import Sample

SMALL = ("--train", "24", "--eval", "8")
NAMES = ("train", "eval_seen", "eval_unseen")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("embedded") / "set"
    assert embedded.main(["--out", str(out), *SMALL]) == 0
    return out


def read(folder: Path, name: str) -> list[Sample]:
    samples, bad = read_records(folder / f"{name}.jsonl")
    assert not bad
    return samples


def test_records_name_existing_clips_and_categories(folder: Path) -> None:
    assert [len(read(folder, name)) for name in NAMES] == [24, 8, 8]
    for name in NAMES:
        for sample in read(folder, name):
            assert (folder / sample.media[0].path).is_file()
            assert sample.answer_kind == "multiple_choice" and len(sample.options) == 4
            assert sample.category == ("unseen order" if name == "eval_unseen" else "seen order")
            assert sample.question in {f"Which colour is shown {p}?" for p in ("first", "second", "third", "last")}


def test_no_clip_is_in_two_files(folder: Path) -> None:
    contents = [(folder / sample.media[0].path).read_bytes() for name in NAMES for sample in read(folder, name)]
    assert len(set(contents)) == len(contents) == 40


def test_held_out_orders_never_occur_in_training() -> None:
    by_name = {split.name: split for split in embedded.SPLITS}
    assert set(by_name["train"].orders) == set(by_name["eval_seen"].orders) == set(SEEN_ORDERS)
    assert set(by_name["eval_unseen"].orders) == set(UNSEEN_ORDERS)
    assert len({split.key for split in embedded.SPLITS}) == 3
    assert all(split.key < embedded.FIRST_FREE_KEY for split in embedded.SPLITS)


def test_equal_arguments_give_equal_files_and_another_seed_does_not(folder: Path, tmp_path: Path) -> None:
    embedded.main(["--out", str(tmp_path / "again"), *SMALL])
    embedded.main(["--out", str(tmp_path / "other"), *SMALL, "--seed", "1"])
    for name in NAMES:
        assert (tmp_path / "again" / f"{name}.jsonl").read_bytes() == (folder / f"{name}.jsonl").read_bytes()
        assert (tmp_path / "other" / f"{name}.jsonl").read_bytes() != (folder / f"{name}.jsonl").read_bytes()
        clip = read(folder, name)[3].media[0].path
        assert (tmp_path / "again" / clip).read_bytes() == (folder / clip).read_bytes()
        assert (tmp_path / "other" / clip).read_bytes() != (folder / clip).read_bytes()


def test_a_second_start_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert embedded.main(["--out", str(folder), *SMALL]) == 0
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert before == after
    assert "already prepared" in capsys.readouterr().out


def test_other_arguments_need_overwrite_which_leaves_nothing_of_before(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--eval", "2", "--train"]
    embedded.main([*arguments, "6"])
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"has \{'train': 6\}, asked for is \{'train': 4\}"):
        embedded.main([*arguments, "4"])
    embedded.main([*arguments, "4", "--overwrite"])
    assert len(list((tmp_path / "clips" / "train").iterdir())) == len(read(tmp_path, "train")) == 4
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_interrupted_preparation_is_completed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--out", str(tmp_path), "--train", "6", "--eval", "2"]
    written: list[Path] = []

    def stop_after_four(clip: Clip, path: Path) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(path)
        write_clip(clip, path)

    write_clip = embedded.write_clip
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "write_clip", stop_after_four)
        with pytest.raises(KeyboardInterrupt):
            embedded.main(arguments)
    assert not (tmp_path / "manifest.json").exists() and not (tmp_path / "train.jsonl").exists()
    embedded.main(arguments)
    assert len(read(tmp_path, "train")) == 6 and (tmp_path / "manifest.json").exists()


def test_a_clip_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(frames: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(embedded, "encode_mp4", fail)
    clip = make_clips(1, SEEN_ORDERS, ("first",), (0, 0))[0]
    with pytest.raises(OSError, match="disk full"):
        embedded.write_clip(clip, tmp_path / "0.mp4")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "value"), [("--seed", "-1"), ("--train", "0"), ("--eval", "100000")])
def test_numbers_out_of_range_are_refused(tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option} is {value}\. [01] to 99999 is allowed\. Choose"):
        embedded.main(["--out", str(tmp_path / "set"), option, value])
    assert not (tmp_path / "set").exists()


def test_two_processes_preparing_one_folder_end_in_one_complete_set(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data_pipelines.embedded", "--out", str(tmp_path / "set"), *SMALL]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted("already prepared" in output for output in outputs) == [False, True]
    assert (tmp_path / "set" / "train.jsonl").read_bytes() == (folder / "train.jsonl").read_bytes()
