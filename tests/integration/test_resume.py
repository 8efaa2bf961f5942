"""kill -9 anywhere, inside a checkpoint save too, then the same command: the same weights, bit for bit."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from data_pipelines.embedded import main as prepare_embedded
from tests.support.processes import ModuleProcess
from tests.support.runs import ROOT, read_lines, run_cli
from tests.support.tracker_files import expected_scalars, scalars
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.training.checkpoints import find_checkpoints

STEPS = 4
# Within a save: with nothing, weights, all but the manifest, and everything under the temporary name.
WITHIN = [("begun", 2), ("weights", 4), ("before_manifest", 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded default, shortened, on a few freshly rendered clips."""
    path = tmp_path_factory.mktemp("resume")
    prepare_embedded(["--out", str(path / "data"), "--train", "24", "--eval", "8"])
    sections = {
        "include": [str(ROOT / "configs" / "embedded.yaml")],
        "data": {
            "train": str(path / "data/train.jsonl"),
            # Mappings are merged key by key, so the included config's own evaluation sets are replaced by name.
            "eval": {name: str(path / "data/eval_seen.jsonl") for name in ("seen_orders", "unseen_orders")},
        },
        "training": {"steps": STEPS, "prompts_per_step": 3, "checkpoint_every": 2, "keep_checkpoints": 9},
        "rollout": {"num_generations": 4},
        "eval": {"controls": [], "control_sets": [], "headline_set": None},
        "observe": {"report": False},
    }
    (path / "run.yaml").write_text(yaml.safe_dump(sections))
    return path


def start(folder: Path, run: str, module: str, *arguments: str, workers: int = 0) -> ModuleProcess:
    """``workers``: of media; they must not make a difference."""
    own = (str(folder / "run.yaml"), f"run.dir={folder / run}", f"media.workers={workers}", "run.resume=auto")
    return ModuleProcess(module, *arguments, *own)


def run_to_the_end(folder: Path, run: str, workers: int = 0) -> str:
    done = start(folder, run, "vlm_pg.cli", "train", workers=workers).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    (folder / "printed.txt").write_text(run_to_the_end(folder, "whole", workers=1))
    return folder / "whole"


def assert_same_outcome(run: Path, whole: Path) -> None:
    name = f"checkpoints/step-{STEPS:06d}"
    for file in ("model.safetensors", "optimizer/rank-00000-00000.safetensors"):
        ours, theirs = load_file(run / name / file), load_file(whole / name / file)
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert (ours[key] == tensor).all(), f"{file}: {key} differs"
    lines, expected = read_lines(run / "metrics.jsonl"), read_lines(whole / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for key in ("reward", "loss", "grad_norm", "entropy"):
        assert [line[key] for line in lines] == [line[key] for line in expected]
    assert scalars(RunFolder(run)) == expected_scalars(RunFolder(run))  # every step once, times included
    rollouts = [(r["step"], r["sample_id"], r["response"]) for r in read_lines(run / "rollouts.jsonl")]
    assert rollouts == [(r["step"], r["sample_id"], r["response"]) for r in read_lines(whole / "rollouts.jsonl")]
    results = json.loads((run / "summary.json").read_text())
    assert results["eval_after"] == json.loads((whole / "summary.json").read_text())["eval_after"]


def test_the_run_trains_and_names_its_position_rule(folder: Path, uninterrupted: Path) -> None:
    lines = read_lines(uninterrupted / "metrics.jsonl")
    assert all(line["grad_norm"] > 0 for line in lines)
    checkpoints = find_checkpoints(uninterrupted / "checkpoints")
    first, last = (load_file(checkpoints[i][1] / "model.safetensors") for i in (0, -1))
    assert sum((first[key] != last[key]).any().item() for key in first) > 30

    lines = (folder / "printed.txt").read_text().splitlines()
    assert sum(line.startswith("positions: qwen (tokens after an image or video continue past") for line in lines) == 1


@pytest.mark.parametrize(
    "moment, step",
    [("training", 3), *(pytest.param(*moment, marks=pytest.mark.matrix) for moment in (("before_rename", 4), *WITHIN))],
)
def test_killed_and_resumed_equals_uninterrupted(moment: str, step: int, folder: Path, uninterrupted: Path) -> None:
    run = f"killed_{moment}"
    done = start(folder, run, "tests.integration.dying_run", moment, str(step)).finish()
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert all(number < step for number, _ in find_checkpoints(folder / run / "checkpoints"))
    run_to_the_end(folder, run)
    assert_same_outcome(folder / run, uninterrupted)
    assert not list((folder / run / "checkpoints").glob(".tmp-*"))


def test_stopped_it_saves_and_goes_on(folder: Path, uninterrupted: Path) -> None:
    """SIGTERM: a checkpoint at once, exit code 0, and the rest of the run as if nothing had happened."""
    process = start(folder, "stopped", "vlm_pg.cli", "train")
    metrics = folder / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 1):
        assert time.monotonic() < deadline and process.returncode is None
        time.sleep(0.01)
    process.terminate()
    done = process.finish(timeout_seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped on request" in done.stdout + done.stderr
    run_to_the_end(folder, "stopped")
    assert_same_outcome(folder / "stopped", uninterrupted)


@pytest.mark.matrix
def test_the_eval_command_repeats_the_runs_own_figures(uninterrupted: Path) -> None:
    """Same prompts, engine and rewards: the newest checkpoint scores as it did at the end of training."""
    done = run_cli("eval", str(uninterrupted))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((uninterrupted / f"eval-step-{STEPS:06d}" / "result.json").read_text())
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert result["sets"] == summary["eval_after"]["sets"]
    assert result["protocol"]["config"]["media"]["max_frames"] == 8
    assert result["protocol"]["decides"]["positions"] == "qwen" and "positions: qwen (" in done.stdout
    assert "seen_orders: accuracy" in done.stdout


def test_a_finished_run_is_left_as_it_is(folder: Path, uninterrupted: Path) -> None:
    before = (uninterrupted / "summary.json").read_bytes()
    assert f"this run is finished at step {STEPS}" in run_to_the_end(folder, "whole")
    assert (uninterrupted / "summary.json").read_bytes() == before
    refused = run_cli(
        "train", str(folder / "run.yaml"), f"run.dir={uninterrupted}", "run.resume=auto", "training.steps=2"
    )
    assert refused.returncode == 2 and f"is at step {STEPS}, but training.steps is 2" in refused.stderr
