"""Training on prepared sets: what it streams is what it would have held, and sources come as often as they weigh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.data_sets import write_shards
from tests.support.runs import read_lines, run_cli
from tests.support.small_run import STEPS, small_run
from vlm_pg.data.records import read_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, and its training records as a prepared set of two sources, four records and eight."""
    path = tmp_path_factory.mktemp("prepared")
    small_run(path)
    samples, _ = read_records(path / "clips/train.jsonl")
    (path / "set").mkdir()
    sources = [replace(one, source="rare" if index % 3 else "often") for index, one in enumerate(samples)]
    write_shards(path / "set", "train", sources)
    return path


def train(folder: Path, name: str, *options: str) -> Path:
    done = run_cli("train", str(folder / "run.yaml"), f"run.dir={folder / name}", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


def prepared(folder: Path) -> list[str]:
    return [f"data.train={folder / 'set'}:train", f"data.media_root={folder / 'clips'}"]


def test_streamed_records_train_as_records_in_memory(folder: Path) -> None:
    held, streamed = train(folder, "held"), train(folder, "streamed", *prepared(folder))
    name = f"checkpoints/step-{STEPS:06d}/model.safetensors"
    weights, expected = load_file(streamed / name), load_file(held / name)
    assert all(weights[key].equal(value) for key, value in expected.items())


@pytest.mark.matrix
def test_sources_are_sampled_by_weight_also_after_a_resume(folder: Path) -> None:
    options = [*prepared(folder), "data.mixture={often: 2, rare: 1}", "observe.rollouts_per_step=6"]
    whole = train(folder, "whole", *options, "training.steps=8")
    shorter = train(folder, "shorter", *options, "training.steps=3")
    train(folder, "shorter", *options, "training.steps=8", "run.resume=auto")
    name = "checkpoints/step-000008/model.safetensors"
    resumed, expected = load_file(shorter / name), load_file(whole / name)
    assert all(resumed[key].equal(value) for key, value in expected.items())
    sampled = [int(line["sample_id"].removeprefix("train-")) for line in read_lines(whole / "rollouts.jsonl")]
    often = [number for number in sampled if number % 3 == 0]
    assert len(sampled) == 8 * 3 * 2 and abs(len(often) / len(sampled) - 2 / 3) < 0.1


def test_weights_that_fit_no_source_are_refused_before_the_folder_is_made(folder: Path) -> None:
    done = run_cli(
        "train", str(folder / "run.yaml"), f"run.dir={folder / 'none'}", *prepared(folder), "data.mixture={often: 1}"
    )
    assert done.returncode == 2 and "data.mixture has no weight for rare" in done.stderr
    assert not (folder / "none").exists()


@pytest.mark.matrix
def test_two_sets_are_sampled_by_weight_also_after_a_resume(folder: Path) -> None:
    """The same clips twice: as a file beside them, and as a prepared set whose media lie elsewhere."""
    sets = f"data.train={{files: {folder / 'clips/train.jsonl'}, shards: '{folder / 'set'}:train'}}"
    options = [sets, f"data.media_root={{shards: {folder / 'clips'}}}", "data.mixture={files: 1, shards: 2}"]
    options.append("observe.rollouts_per_step=6")
    whole = train(folder, "sets", *options, "training.steps=4")
    stopped = train(folder, "sets-stopped", *options, "training.steps=2")
    train(folder, "sets-stopped", *options, "training.steps=4", "run.resume=auto")
    name = "checkpoints/step-000004/model.safetensors"
    resumed, expected = load_file(stopped / name), load_file(whole / name)
    assert all(resumed[key].equal(value) for key, value in expected.items())
    sampled = [line["sample_id"] for line in read_lines(whole / "rollouts.jsonl")]
    shards = [one for one in sampled if one.startswith("shards/train-")]
    assert len(sampled) == 4 * 3 * 2 and abs(len(shards) / len(sampled) - 2 / 3) < 0.2
    assert all(one.startswith(("shards/train-", "files/train-")) for one in sampled)
    assert not (whole / "bad_samples.jsonl").exists()
