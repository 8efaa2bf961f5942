"""Training on 64 records of which 20 are bad, each in a way of its own: all 20 are recorded and counted, 44 are used.

Among the 44 are files that look odd and are harmless.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.clip_table import QUICK
from tests.support.clips import Clip, write
from tests.support.hostile_files import (
    base_files,
    growing,
    huge_png,
    huge_webp,
    image,
    late_stream,
    many_scans,
    odd_exifs,
    table_bombs,
    titled,
)
from tests.support.runs import read_lines, run_cli, save_tiny_model, write_config

HALF = "\ud83d"
BAD_FILES = {
    "script.mp4": "corrupt_media",
    "encrypted.mp4": "corrupt_media",
    "unknown.webm": "corrupt_media",
    "cut.mkv": "truncated_media",
    "cut.mp4": "corrupt_media",
    "bomb.mp4": "corrupt_media",
    "growing.mkv": "video_too_large",
    "scans.jpg": "corrupt_media",
    "canvas.webp": "image_too_large",
    "header.png": "image_too_large",
    "none\udce9.mp4": "missing_media",
    "http://[::1/x.mp4": "bad_url",
    "http://127.0.0.1:9/x.mp4": "download_failed",
    "http://user:secret@127.0.0.1:9/x.mp4": "bad_url",
}
BAD_RECORDS: list[tuple[dict[str, Any], str]] = [
    ({"problem": f"How many {HALF}?"}, "not_unicode"),
    ({"problem_id": f"id{HALF}"}, "not_unicode"),
    ({"options": ["A. red", "B. red"]}, "bad_options"),
    ({"options": ["A. red", "B. "]}, "bad_options"),
    ({"solution": "<answer>" * 100_000}, "no_answer_tag"),
    ({"problem": 10**4200}, "unreadable_value"),
]


def make_media(root: Path) -> list[str]:
    """All files; returns the names of the good ones."""
    bases = base_files(root / "bases")
    movie = bases["libx264-mp4-base.mp4"]
    files = {
        "plain.mp4": movie,
        "plain.png": image(".png"),
        "titled.mkv": titled(root, "matroska"),
        "late.mkv": late_stream(root),
        "odd.jpg": image(".jpg", exif=next(odd_exifs())),
        "caf\udce9.mp4": movie,
        "script.mp4": b"ffconcat version 1.0\nfile plain.mp4\n",
        "encrypted.mp4": movie.replace(b"avc1", b"encv"),
        "unknown.webm": bases["libvpx-webm-base.webm"].replace(b"V_VP8", b"V_XX8"),
        "bomb.mp4": dict(table_bombs(movie))["stts-200000000.mp4"],
        "growing.mkv": growing(root, 1500),
        "scans.jpg": many_scans(40, side=64),
        "canvas.webp": huge_webp(9000),
        "header.png": huge_png(20_000),
        "cut.mp4": movie[: len(movie) // 2],
    }
    long = write(Clip("libx264", "matroska", "long", QUICK["libx264"]), root, frames=100)
    files["cut.mkv"] = long.read_bytes()[: long.stat().st_size // 2]
    for name, data in files.items():
        (root / name).write_bytes(data)
    return [name for name in files if name not in BAD_FILES]


def record(number: int, path: str) -> dict[str, Any]:
    kind = "image" if path.endswith((".jpg", ".png", ".webp")) else "video"
    return {
        "problem_id": f"q{number}", "problem": f"Which colour is shown in number {number}?", "data_type": kind,
        "problem_type": "multiple choice", "options": ["A. red", "B. blue"], "solution": "<answer>A</answer>",
        "path": path,
    }  # fmt: skip


def test_twenty_bad_of_sixty_four(tmp_path: Path) -> None:
    root = tmp_path / "media"
    root.mkdir()
    good_names = make_media(root)
    good = [record(number, good_names[number % len(good_names)]) for number in range(44)]
    bad_files = [record(100 + number, name) for number, name in enumerate(BAD_FILES)]
    bad_records = [record(200 + n, "plain.png") | changes for n, (changes, _) in enumerate(BAD_RECORDS)]
    records = [*good[:20], *bad_files, *good[20:], *bad_records]
    assert len(records) == 64 and len(bad_files) + len(bad_records) == 20
    (tmp_path / "records.jsonl").write_text("\n".join(map(dumps, records)))
    done = run_cli("train", str(write_config(tmp_path / "run.yaml", sections(tmp_path, root))), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr

    recorded = read_lines(tmp_path / "run" / "bad_samples.jsonl")
    expected = {f"q{100 + number}": reason for number, reason in enumerate(BAD_FILES.values())}
    expected |= {f"q{200 + number}": reason for number, (_, reason) in enumerate(BAD_RECORDS)}
    expected[r"id\ud83d"] = expected.pop("q201")
    assert {line["sample_id"]: line["reason"] for line in recorded} == expected
    assert len(recorded) == 20
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] and summary["bad_samples"] == Counter(expected.values())
    assert sum(line["groups"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")) == 44
    used = {line["sample_id"] for line in read_lines(tmp_path / "run" / "rollouts.jsonl")}
    assert used == {one["problem_id"] for one in good}
    for text in (done.stdout, (tmp_path / "run" / "bad_samples.jsonl").read_text()):
        assert "secret" not in text
    assert not list(tmp_path.glob("vlm_pg_media_*"))


def dumps(one: dict[str, Any]) -> str:
    return json.dumps(one) if isinstance(one["problem"], str) else json.dumps(one | {"problem": "X"}).replace(
        '"X"', "1" + "0" * 4200
    )  # fmt: skip


def sections(tmp_path: Path, root: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(save_tiny_model(tmp_path / "model"))},
        "data": {
            "train": str(tmp_path / "records.jsonl"), "media_root": str(root), "allow_remote": True, "shuffle": False,
        },
        "media": {"max_frames": 4, "max_pixels": 8 * 28 * 28, "image_max_pixels": 8 * 28 * 28, "workers": 1,
                  "max_video_frame_pixels": 2_000_000, "deadline_seconds": 600},
        "rollout": {"num_generations": 2, "max_new_tokens": 4},
        "training": {"steps": 2, "prompts_per_step": 29, "learning_rate": 1e-3},
        "observe": {"trackers": [], "rollouts_per_step": 29, "thumbnails": 0, "print_rollouts_every": 0},
    }  # fmt: skip
