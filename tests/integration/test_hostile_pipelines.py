"""Rows that name what must not be read: refused where they are prepared, or, unlooked at there, in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hostile_files import base_files
from tests.support.hostile_paths import REFUSALS, make_root
from tests.support.processes import ROOT
from tests.support.runs import read_lines, run_cli, write_config
from tests.support.watch import Doorbell, OpenedFiles

pytestmark = pytest.mark.matrix

FIELDS = ("problem_id", "problem", "data_type", "path", "subtitles")
MAP = {
    "name": "rows",
    "fields": {
        **{name: name for name in FIELDS}, "problem_type": {"constant": "free-form"}, "answer": "answer",
    },
}  # fmt: skip
GOOD = ("a.mp4", "link_in.mp4", "deep/B.MKV", "c.png")
SUBTITLES = ("../outside.srt", "link_out.srt", "/etc/passwd.srt", "http://127.0.0.1:9/x.srt")


def row(name: str, path: str, kind: str, **beside: Any) -> dict[str, Any]:
    return {"problem_id": name, "problem": "What is it?", "data_type": kind, "path": path, "answer": "a ball",
            "subtitles": None, **beside}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bases = base_files(tmp_path / "bases")
    contents = {".mp4": bases["libx264-mp4-base.mp4"], ".MKV": bases["libx264-matroska-base.mkv"]}
    root = make_root(tmp_path / "root", contents | {".png": bases["picture.png"]})
    (tmp_path / "outside.srt").write_text("1\n00:00:00,000 --> 00:00:01,000\nSecret.\n")
    (root / "link_out.srt").symlink_to(tmp_path / "outside.srt")
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(MAP))
    return tmp_path


def prepare(folder: Path, rows: list[dict[str, Any]], out: str, *options: str) -> dict[str, str]:
    """Reasons of refusals, by row."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    files = ["--map", str(folder / "map.yaml"), "--train", str(folder / "rows.jsonl"), "--out", str(folder / out)]
    limits = ["--media-root", str(folder / "root"), "--eval-share", "0", "--max-missing-share", "1"]
    done = run_cli("prepare", "generic", *files, *limits, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line["sample_id"]: line["reason"] for line in read_lines(folder / out / "refused.jsonl")}


def test_hostile_rows_are_refused_at_either_place(folder: Path) -> None:
    hostile = [(f"q{index}", kind, path, reason) for index, (kind, path, reason, _) in enumerate(REFUSALS) if path]
    rows = [row(f"good-{path}", path, "image" if path == "c.png" else "video") for path in GOOD]
    rows += [row(name, path, kind) for name, kind, path, _ in hostile]
    rows += [row(f"words-{path}", "a.mp4", "video", subtitles=path) for path in SUBTITLES]
    expected = {name: reason for name, _, _, reason in hostile}
    door, watched = Doorbell(), OpenedFiles(folder)
    rows.append(row("door", f"http://127.0.0.1:{door.port}/a.mp4", "video"))
    expected["door"] = "remote_media"
    refused = prepare(folder, rows, "checked")
    assert {name: reason for name, reason in refused.items() if name in expected} == expected
    assert not any(name.startswith("good-") for name in refused)

    refused = prepare(folder, rows, "unchecked", "--skip-media-check")
    left = {name: reason for name, reason in expected.items() if name not in refused}
    assert len(left) > 10
    words = dict(zip((f"words-{path}" for path in SUBTITLES), ("outside_root",) * 3 + ("remote_media",), strict=True))
    done = run_cli("train", str(write_config(folder / "run.yaml", sections(folder, len(rows) - len(refused)))))
    assert done.returncode == 0, done.stdout + done.stderr
    bad = {line["sample_id"]: line["reason"] for line in read_lines(folder / "run/bad_samples.jsonl")}
    assert bad == left | words
    used = {line["sample_id"] for line in read_lines(folder / "run/rollouts.jsonl")}
    assert used == {f"good-{path}" for path in GOOD}
    assert not {"outside.mp4", "outside.srt"} & watched.names() and door.rings == 0
    watched.close()
    door.close()


def sections(folder: Path, count: int) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl"), "train": ["language"]},
        "data": {"train": f"{folder / 'unchecked'}:train", "media_root": str(folder / "root"), "max_bad_share": 1.0},
        "media": {"max_frames": 4, "max_pixels": 8 * 28 * 28, "image_max_pixels": 8 * 28 * 28, "workers": 1,
                  "deadline_seconds": 600},
        "cache": {"folder": str(folder / "cache")},
        "rollout": {"num_generations": 2, "max_new_tokens": 4},
        "training": {"steps": 1, "prompts_per_step": count, "learning_rate": 1e-3},
        "observe": {"trackers": [], "rollouts_per_step": count, "thumbnails": 0, "report": False},
        "eval": {"controls": [], "control_sets": [], "headline_set": None},
    }  # fmt: skip
