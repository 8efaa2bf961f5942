"""Preparing looks at media: what cannot be used is refused, and a medium is what is in it, not what it is called."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import video_r1
from data_pipelines.engine import resume
from data_pipelines.engine.media_check import media_settings
from tests.support.pipeline_rows import write_lines
from tests.support.tiny_media import mp4, write_media
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.types import Sample


def record(number: int, path: str | list[str], question: str = "", **changes: Any) -> dict[str, Any]:
    one = {"problem_id": number, "problem": question or f"What is {number}?", "data_type": "video", "options": []}
    one |= {"problem_type": "numerical", "process": "", "solution": "<answer>7</answer>", "data_source": "made-up"}
    return one | {"path": path} | changes


def samples(out: Path, split: str) -> dict[str, Sample]:
    files = json.loads((out / "manifest.json").read_text())["files"]
    found = sum(count for name, count in files.items() if name.startswith(split))
    return {one.sample_id: one for one in open_records(Path(f"{out}:{split}"))[0]} if found else {}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def damaged_inside() -> bytes:
    """A video whose later pictures are garbage: only decoding shows it."""
    data = bytearray(mp4(9))
    begin = data.index(b"mdat") + 4
    size = int.from_bytes(data[begin - 8 : begin - 4], "big") - 8
    middle = begin + size // 2
    data[middle : begin + size] = bytes(begin + size - middle)
    return bytes(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Media of every fate, and questions on them."""
    root = tmp_path_factory.mktemp("look")
    media = root / "media"
    for number in range(4):
        write_media(media / f"{number}.mp4", number)
    shutil.copy(media / "0.mp4", media / "again.mp4")  # "0" by another name
    shutil.copy(media / "1.mp4", media / "copy.mp4")
    write_media(media / "picture.png", 3)
    (media / "empty.mp4").write_bytes(b"")
    (media / "cut.mp4").write_bytes(mp4(5)[:900])
    (media / "inside.mp4").write_bytes(damaged_inside())
    (media / "two.mp4").write_bytes(mp4(6, seconds=1))  # of two frames
    (media / "one.mp4").write_bytes(mp4(7, seconds=1, rate=1))
    train = [
        record(1, "1.mp4", "Who?"),
        record(2, "copy.mp4", "Who?"),
        record(3, "copy.mp4", "Who?", solution="<answer>8</answer>"),
        record(4, "copy.mp4", "Who?", start=1, end=9),
        record(5, "again.mp4"),  # of the evaluation file
        record(6, "empty.mp4"),
        record(7, "cut.mp4"),
        record(8, "inside.mp4"),
        record(9, "two.mp4"),
        record(10, "one.mp4"),
        record(11, "2.mp4", start=100, end=200),
        record(12, "picture.png", data_type="image"),
    ]
    write_lines(root / "train.jsonl", train)
    write_lines(root / "eval.jsonl", [record(20, "0.mp4"), record(21, "3.mp4")])
    return root


def prepare(folder: Path, out: Path, *options: str) -> dict[str, Any]:
    arguments = ["--train", str(folder / "train.jsonl"), "--eval", str(folder / "eval.jsonl"), "--workers", "1"]
    assert video_r1.main([*arguments, "--media-root", str(folder / "media"), "--out", str(out), *options]) == 0
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What is printed while ``folder / "whole"`` is written."""
    output = io.StringIO()
    with redirect_stdout(output):
        prepare(folder, folder / "whole")
    return output.getvalue()


def test_probing_refuses_unusable_media_and_finds_duplicates_by_content(folder: Path, printed: str) -> None:
    out = folder / "whole"
    report = json.loads((out / "report.json").read_text())
    assert set(samples(out, "train")) == {"1", "2", "3", "4", "8", "9", "12"}
    assert set(samples(out, "eval")) == {"20", "21"}
    assert report["left_out"] == {"also in the evaluation file": 1}  # 5: the same video by another name
    refused = {one["sample_id"]: one["reason"] for one in lines(out / "refused.jsonl")}
    assert refused == {"6": "corrupt_media", "7": "corrupt_media", "10": "too_few_frames", "11": "bad_clip"}
    assert report["refused"] == {"corrupt_media": 2, "bad_clip": 1, "too_few_frames": 1}
    assert lines(out / "repeated.jsonl") == [
        {"sample_id": "2", "first": "1", "answers": "same", "where": "train.jsonl:2"},
        {"sample_id": "3", "first": "1", "answers": "other", "where": "train.jsonl:3"},
    ]
    assert report["repeated"] == {"other": 1, "same": 1}
    assert "Looking at media: 13 of 13" in printed  # two of 14 questions ask about one part of one file
    assert "another answer: one of them is wrong, for example 3 asks what 1 asks" in printed
    page = (out / "summary.html").read_text()
    for text in ("Seconds of whole videos", "patches of 28", "data:image/jpeg", "Asked before", "corrupt_media"):
        assert text in page, text


def test_decoding_and_a_runs_settings_show_more(folder: Path, tmp_path: Path) -> None:
    given = ("--decode", "--patch", "32", "--media", "max_video_seconds=20", "video_tokens=8", "max_pixels=5000")
    report = prepare(folder, tmp_path / "out", *given)
    assert report["refused"] == {"video_too_long": 9, "corrupt_media": 2, "too_few_frames": 1}
    assert set(samples(tmp_path / "out", "train")) == {"9", "12"}
    assert report["decode"] and report["patch"] == 32 and report["media"] == sorted(given[4:])
    page = (tmp_path / "out" / "summary.html").read_text()
    assert "patches of 32" in page and "8 tokens of a video" in page


def test_frames_that_are_damaged_are_seen_by_decoding_alone(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path / "out", "--decode")
    reasons = {one["sample_id"]: one["reason"] for one in lines(tmp_path / "out" / "refused.jsonl")}
    assert reasons["8"] == "corrupt_media"


def test_media_that_are_fetched_after_a_refusal_count(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "media", tmp_path / "media")
    rows = [record(number, f"late-{number}.mp4") for number in range(30)]
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "eval.jsonl", [record(99, "3.mp4")])
    with pytest.raises(ConfigError, match=r"media of 30 of 31 questions are not there.*missing_media\.txt' lists them"):
        prepare(tmp_path, tmp_path / "out")
    assert len((tmp_path / "out" / "missing_media.txt").read_text().splitlines()) == 30
    (tmp_path / "out" / ".placing.json").unlink()  # some versions left none; the parts tell whose the list is
    with pytest.raises(ConfigError, match=r"media of 30 of 31 questions are not there"):
        prepare(tmp_path, tmp_path / "out")
    (tmp_path / "out" / ".placing.json").unlink()
    for number in range(30):
        write_media(tmp_path / "media" / f"late-{number}.mp4", 100 + number)
    assert prepare(tmp_path, tmp_path / "out")["train"] == 30
    assert not (tmp_path / "out" / "missing_media.txt").exists()


def test_a_full_disk_stops_cleanly_and_the_next_run_resumes(
    folder: Path, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = resume.PRAGMAS
    monkeypatch.setattr(resume, "PRAGMAS", ("page_size=512", *usual, "max_page_count=8"))
    with pytest.raises(VlmPgError, match=r"is full.*What was finished is kept. Make room.*it goes on"):
        prepare(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    monkeypatch.setattr(resume, "PRAGMAS", usual)
    prepare(folder, tmp_path / "out")
    for path in (folder / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["max_frame=4"], r"--media has 'max_frame=4'\. KEY=VALUE is expected.*Did you mean max_frames\?"),
        (["workers=4"], r"--media has 'workers=4'.*but workers"),
        (["max_frames"], r"--media has 'max_frames'\. KEY=VALUE is expected"),
        (["max_frames=many"], r"max_frames is 'many' \(--media\): .*Correct it"),
        (["max_frames=2"], r"no even number of frames lies between them"),
    ],
)
def test_settings_that_are_none_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        media_settings(given, 1)


def test_settings_have_a_runs_names_and_values(tmp_path: Path) -> None:
    settings = media_settings(["media.frames=uniform", "num_frames=8", "fps=0.5"], 3)
    assert (settings.frames, settings.num_frames, settings.fps, settings.workers) == ("uniform", 8, 0.5, 3)
    assert settings.max_video_seconds == 4 * 3600.0 < media_settings([], 3).max_video_seconds


@pytest.mark.parametrize("options", [["--decode"], ["--media", "fps=1"]])
def test_skip_media_check_excludes_settings_of_the_check(folder: Path, options: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--skip-media-check is given with --decode or --media.*Leave one out"):
        prepare(folder, folder / "never", "--skip-media-check", *options)
