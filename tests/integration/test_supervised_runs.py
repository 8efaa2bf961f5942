"""Whole runs on records' own responses: killed and resumed bit for bit, and the same on two processes as on one."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.layouts import distance
from tests.support.processes import ModuleProcess, launch_ranks
from tests.support.runs import deepspeed_config, read_lines
from tests.support.short_run import train_here
from tests.support.small_run import STEPS
from tests.support.supervised import sections_of, supervised_run
from vlm_pg.data.records import read_records, write_records

LAST = f"checkpoints/step-{STEPS:06d}/model.safetensors"


@pytest.fixture(scope="module", params=["sft", "dpo", "distill"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """With the uninterrupted run of one process; of pairs in its second epoch from the third step on."""
    path, objective = tmp_path_factory.mktemp(request.param), request.param
    sections = sections_of(objective, path, checkpoint_every=1, keep_checkpoints=9)
    supervised_run(path, pairs=objective != "sft", clips=8 if objective == "sft" else 4, **sections)
    assert train_here(path / "run.yaml", f"run.dir={path / 'whole'}").code == 0
    return path


def values(run: Path, *names: str) -> list[list[Any]]:
    return [[line[name] for name in names] for line in read_lines(run / "metrics.jsonl")]


@pytest.mark.parametrize("when, step", [("training", 2), ("before_manifest", 2)])
def test_a_killed_run_goes_on_bit_for_bit(folder: Path, when: str, step: int) -> None:
    run = folder / when
    dying = ModuleProcess("tests.integration.dying_run", when, str(step), str(folder / "run.yaml"), f"run.dir={run}")
    assert dying.finish().returncode == -9
    assert train_here(folder / "run.yaml", f"run.dir={run}").code == 0
    found, expected = load_file(run / LAST), load_file(folder / "whole" / LAST)
    assert found.keys() == expected.keys()
    assert all((found[name] == tensor).all() for name, tensor in expected.items())
    names = ("step", "loss", "groups", "response_tokens", "grad_norm")
    assert values(run, *names) == values(folder / "whole", *names)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["training.engine=deepspeed"], id="ZeRO-2"),
        pytest.param(["training.sequence_parallel=2"], id="sequence parallel"),
        pytest.param(["training.balance=false"], id="unbalanced", marks=pytest.mark.matrix),
        pytest.param(["model.share_prefix=false"], id="repeated", marks=pytest.mark.matrix),
    ],
)
def test_two_processes_train_what_one_trains(folder: Path, tmp_path: Path, overrides: list[str]) -> None:
    if "model.share_prefix=false" in overrides and folder.name.startswith("dpo"):
        pytest.skip("refused")
    if "training.engine=deepspeed" in overrides:
        overrides = [*overrides, f"training.deepspeed_config={deepspeed_config(tmp_path, 2)}"]
    run = tmp_path / "two"
    launch_ranks("vlm_pg.cli", "train", str(folder / "run.yaml"), f"run.dir={run}", *overrides)
    assert max(distance(load_file(run / LAST), load_file(folder / "whole" / LAST)).values()) <= 1e-5
    for ours, theirs in zip(values(run, "loss", "groups"), values(folder / "whole", "loss", "groups"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_step_encodes_a_video_once(folder: Path) -> None:
    """Seven questions of a step are on three clips at most, whatever the order of the file."""
    for line in read_lines(folder / "whole" / "metrics.jsonl"):
        names = {"sft": "nll", "dpo": "preference/margin", "distill": "distillation/divergence"}
        objective = folder.name.rstrip("0123456789")
        assert [name in line for name in names.values()] == [name == objective for name in names]
        assert line["groups"] == 7 and (line["questions_sharing"] >= 6 or objective == "distill")
        assert objective != "sft" or line["trained_tokens_mean"] < line["response_tokens_mean"]


def test_pairs_on_an_adapter_start_at_that_adapter(folder: Path, tmp_path: Path) -> None:
    if not folder.name.startswith("dpo"):
        pytest.skip("has no reference")
    own = ["model.train=[language]", "model.lora={rank: 4}", "training.steps=1", "training.learning_rate=1e-2"]
    for name, further in (("first", []), ("second", [f"model.path={tmp_path}/first/checkpoints/step-000001"])):
        assert train_here(folder / "run.yaml", f"run.dir={tmp_path / name}", *own, *further).code == 0
        [[loss]] = values(tmp_path / name, "loss")
        assert loss == pytest.approx(math.log(2), abs=1e-5)


def test_what_the_reference_reads_is_read_anew_where_it_changes(folder: Path, tmp_path: Path) -> None:
    if not folder.name.startswith("dpo"):
        pytest.skip("has no reference")
    records, _ = read_records(folder / "clips" / "cot.jsonl")
    other = folder / "clips" / "other.jsonl"
    write_records(other, [replace(one, rejected=f"{one.rejected} green") for one in records])
    run, name = tmp_path / "run", "checkpoints/step-000002"
    shutil.copytree(folder / "whole" / name, run / name)
    before = json.loads((run / name / "trainer_state.json").read_text())["reference_logprobs"]
    assert len(before) == len(records), "the third step is of the second epoch"
    assert train_here(folder / "run.yaml", f"run.dir={run}", f"data.train={other}").code == 0
    after = json.loads((run / Path(LAST).parent / "trainer_state.json").read_text())["reference_logprobs"]
    assert len(after) == len(before) + 7
