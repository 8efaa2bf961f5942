"""From real video files to a weight update, and bad records that are recorded one by one while the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.runs import read_lines, run_cli, save_tiny_model, write_config

REASONS = {
    "101": "corrupt_media",
    "102": "missing_media",
    "103": "outside_root",
    "104": "remote_media",
    "105": "empty_question",
    "106": "media_token_in_text",
}


def settings(tmp_path: Path, model: Path, records: Path, media_root: Path, workers: int = 1) -> dict:
    return {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model), "train": ["tower", "merger", "language"]},
        "data": {"train": str(records), "media_root": str(media_root), "max_bad_share": 0.9},
        "media": {"max_frames": 6, "max_pixels": 20 * 28 * 28, "workers": workers},
        "rollout": {"num_generations": 2, "max_new_tokens": 6},
        "training": {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-3, "weight_decay": 0.1},
        "observe": {"trackers": []},
    }


@pytest.mark.parametrize(
    ("file", "workers"),
    [
        ("flipping_a_pancake.mkv", 1),
        *(pytest.param(name, 0, marks=pytest.mark.matrix) for name in ("nasa_13013.mp4", "av1_video.mkv")),
    ],
)
def test_one_training_step_from_a_real_file(file: str, workers: int, tmp_path: Path, media_dir: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    records = [r for r in json.loads((media_dir / "questions.json").read_text()) if r["path"].endswith(file)]
    (tmp_path / "records.json").write_text(json.dumps(records))
    config = write_config(
        tmp_path / "run.yaml", settings(tmp_path, model, tmp_path / "records.json", media_dir, workers)
    )
    done = run_cli("train", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["groups"] == 1
    assert line["tokens_computed"] < line["tokens_repeated"]
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoints" / "step-000001" / "model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)
    assert not (tmp_path / "run" / "bad_samples.jsonl").exists()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.matrix
def test_bad_records_are_recorded_and_the_run_goes_on(tmp_path: Path, media_dir: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    good = [r for r in json.loads((media_dir / "questions.json").read_text()) if r["problem_id"] in (5, 8)]
    bad = json.loads((media_dir / "questions_bad.json").read_text())
    (tmp_path / "records.json").write_text(json.dumps(good + bad, indent=1))
    sections = settings(tmp_path, model, tmp_path / "records.json", media_dir)
    sections["training"]["prompts_per_step"] = 8
    config = write_config(tmp_path / "run.yaml", sections)
    done = run_cli("train", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = read_lines(tmp_path / "run" / "bad_samples.jsonl")
    assert {line["sample_id"]: line["reason"] for line in recorded} == REASONS
    assert len(recorded) == 6
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] and sum(summary["bad_samples"].values()) == 6
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[0]["groups"] == 2
    assert "corrupt_media" in done.stdout
    line = 1 + (tmp_path / "records.json").read_text().split("no such kind")[0].rsplit("{", 1)[0].count("\n")
    assert f"records.json:{line}: sample 105 is left out (empty_question)" in done.stdout


@pytest.mark.matrix
def test_too_large_a_share_of_bad_records_stops_the_run(tmp_path: Path, media_dir: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    sections = settings(tmp_path, model, media_dir / "questions_bad.json", media_dir)
    sections["data"] |= {"max_bad_share": 0.2, "min_seen_for_bad_share": 1}
    done = run_cli("train", str(write_config(tmp_path / "run.yaml", sections)))
    assert done.returncode == 2
    assert "samples could not be used" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.matrix
def test_a_run_in_which_nothing_could_be_trained_is_no_success(tmp_path: Path, media_dir: Path) -> None:
    sections = settings(tmp_path, save_tiny_model(tmp_path / "model"), media_dir / "questions_bad.json", media_dir)
    done = run_cli("train", str(write_config(tmp_path / "run.yaml", sections)))
    assert done.returncode == 2
    assert "No question of steps 1 to 1 could be used, so nothing was trained." in done.stderr


def test_a_mistyped_path_leaves_an_earlier_run_alone(tmp_path: Path, media_dir: Path) -> None:
    earlier = tmp_path / "run"
    earlier.mkdir()
    (earlier / "config.yaml").write_text("run: {}")
    (earlier / "metrics.jsonl").write_text("")
    for key in ("model", "train"):
        sections = settings(tmp_path, tmp_path / "nope", media_dir / "questions.json", media_dir)
        if key == "train":
            sections["model"]["path"] = str(save_tiny_model(tmp_path / "model"))
            sections["data"]["train"] = str(tmp_path / "nope.jsonl")
        done = run_cli("train", str(write_config(tmp_path / "run.yaml", sections)))
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout
        assert key != "model" or "which is not a folder" in done.stderr
        assert not list(tmp_path.glob("run.old-*"))
