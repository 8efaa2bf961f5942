"""Every kind of record that a pipeline makes can be prepared and trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import ROOT
from tests.support.published.case import cases_of, check, records
from tests.support.runs import read_lines, run_cli, write_config
from tests.support.tiny_media import png
from tests.unit.data_pipelines.test_published_forms import NAMES
from vlm_pg.commands import run_pipeline
from vlm_pg.types import ANSWER_KINDS, Sample

pytestmark = pytest.mark.matrix

# Kinds that a data set which is not published here may have, by a map of its fields.
MAP = {
    "name": "own",
    "fields": {
        name: name
        for name in ("problem", "data_type", "problem_type", "options", "answer", "path", "start", "end", "times")
    }
    | {"subtitles": "subtitles"},
}
MOVIE: dict[str, Any] = {"problem": "What happens?", "data_type": "video", "path": "film.mkv", "options": []}
OWN = [
    MOVIE | {"problem_type": "free-form", "answer": "It is flipped.", "subtitles": "film.srt"},
    MOVIE | {"problem_type": "numerical", "answer": "3", "start": 1.0, "end": 4.0, "subtitles": "film.srt"},
    MOVIE | {"problem_type": "yes/no", "answer": "yes", "times": [0.5, 2.0, 7.5]},
    MOVIE | {"problem_type": "multiple select", "answer": "A, C", "options": ["a", "b", "c"]},
    {"problem": "Which differ?", "data_type": "image", "path": ["1.jpg", "2.jpg", "3.jpg"], "options": [],
     "problem_type": "regression", "answer": "2.5"},
    {"problem": "What does it say?", "data_type": "image", "path": ["1.jpg"], "options": [], "problem_type": "OCR",
     "answer": "STOP"},
    {"problem": "2 + 2?", "data_type": "text", "path": [], "options": [], "problem_type": "mathematics", "answer": "4"},
    MOVIE | {"problem_type": "multiple choice", "answer": "b", "options": ["a", "b"]},
    MOVIE | {"problem_type": "time span", "answer": "[1.5, 4]"},
    {"problem": "Where is it?", "data_type": "image", "path": ["2.jpg"], "options": [], "problem_type": "box",
     "answer": "[1, 2, 30, 20]"},
    MOVIE | {"problem_type": "exact", "answer": "pan", "start": 2.0},
    MOVIE | {"problem_type": "mean relative accuracy", "answer": "1.5", "end": 3.0},
]  # fmt: skip
NOTHING = dict.fromkeys(("start", "end", "times", "subtitles"))
SUBTITLES = "1\n00:00:01,000 --> 00:00:03,000\nNow flip it.\n"


def own_set(folder: Path, media_dir: Path) -> list[Sample]:
    raw, out = folder / "raw" / "own", folder / "own"
    raw.mkdir(parents=True)
    (raw / "film.mkv").write_bytes((media_dir / "flipping_a_pancake.mkv").read_bytes())
    (raw / "film.srt").write_text(SUBTITLES)
    for number in (1, 2, 3):
        (raw / f"{number}.jpg").write_bytes(png(number))
    (raw / "train.jsonl").write_text("".join(json.dumps(NOTHING | row) + "\n" for row in OWN))
    (folder / "map.yaml").write_text(yaml.safe_dump(MAP))
    arguments = ["--map", str(folder / "map.yaml"), str(raw), "--out", str(out), "--eval-share", "0"]
    assert run_pipeline("generic", arguments) == 0
    return records(out, "train")


def train(folder: Path, records: str, root: Path, count: int) -> list[dict[str, Any]]:
    """At most three steps over all records; the groups of rollouts."""
    per_step = -(-count // 3)
    config = write_config(folder / "run.yaml", {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl"), "train": ["language"]},
        "data": {"train": records, "media_root": str(root)},
        "media": {"max_frames": 4, "max_pixels": 8 * 28 * 28, "image_max_pixels": 8 * 28 * 28, "workers": 1,
                  "deadline_seconds": 600},
        "cache": {"folder": str(folder / "cache")},
        "rollout": {"num_generations": 2, "max_new_tokens": 4},
        "training": {"steps": -(-count // per_step), "prompts_per_step": per_step, "learning_rate": 1e-3},
        "observe": {"trackers": [], "rollouts_per_step": per_step, "thumbnails": 0, "report": False},
        "eval": {"controls": [], "control_sets": [], "headline_set": None},
    })  # fmt: skip
    done = run_cli("train", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "run/summary.json").read_text())["finished"]
    bad = folder / "run/bad_samples.jsonl"
    assert not bad.exists() or not read_lines(bad), bad.read_text()
    return read_lines(folder / "run/rollouts.jsonl")


def test_every_kind_of_record_trains(tmp_path: Path, media_dir: Path) -> None:
    found = own_set(tmp_path, media_dir)
    assert {one.answer_kind for one in found} == set(ANSWER_KINDS) and len(found) == len(OWN)
    refs = [ref for one in found for ref in one.media]
    assert {ref.kind for ref in refs} == {"image", "video"} and {len(one.media) for one in found} == {0, 1, 3}
    assert any(ref.times for ref in refs) and any(ref.end for ref in refs) and any(ref.subtitles for ref in refs)
    lines = train(tmp_path, f"{tmp_path / 'own'}:train", tmp_path / "raw/own", len(found))
    assert {line["sample_id"] for line in lines} == {one.sample_id for one in found}


@pytest.mark.parametrize(("name", "form"), [(name, form) for name in NAMES for form in cases_of(name)])
def test_each_published_form_trains_as_it_was_prepared(tmp_path: Path, name: str, form: str) -> None:
    case, raw, out = cases_of(name)[form], tmp_path / "raw", tmp_path / "out"
    check(name, case, raw, out)
    split, samples = ("train", case.train) if case.train else ("eval", case.evaluation)
    root = Path(json.loads((out / "report.json").read_text()).get("media_root", raw))
    lines = train(tmp_path, f"{out}:{split}", root, len(samples))
    assert {line["sample_id"] for line in lines} == {one.sample_id for one in samples}
