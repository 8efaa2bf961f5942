"""``vlm-pg plan`` and the check at a run's start: from config.json alone, refused before anything is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.runs import write_config
from vlm_pg.cli import main
from vlm_pg.config import RunConfig, load_config
from vlm_pg.errors import ConfigError, ModelError
from vlm_pg.memory import GIB
from vlm_pg.plan.command import check_fits, model_shape, published_shape
from vlm_pg.plan.devices import DEVICES
from vlm_pg.plan.memory import plan_memory
from vlm_pg.plan.setup import Setup, setup_of
from vlm_pg.plan.shape import PUBLISHED, published_config
from vlm_pg.plan.time import expected_line, rollout_seconds, update_work


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of a 7B model of which there is a config.json and nothing else."""
    folder = tmp_path / "model"
    published_config("Qwen2.5-VL-7B").save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    sections: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": "bf16", "gradient_checkpointing": True},
        "data": {"train": "train.jsonl"},
        "training": {"steps": 1, "engine": "deepspeed", "deepspeed_config": "configs/deepspeed/zero3.json"},
    }
    return write_config(tmp_path / "run.yaml", sections)


def test_the_plan_of_a_run(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    assert "qwen2_5_vl: 8.29 B weights (tower 0.68 B), bf16, ZeRO-3, 8 ranks" in printed
    for phrase in (
        "  recorded forwards  ",
        "keys and values of one group",
        "largest prompt that fits: ",
        "fits: ",
        "<- most",
        "recorded forwards: 0.39 MiB a token, ",
    ):
        assert phrase in printed
    words = re.search(r"question's rollout \+ update on one GPU, .*; H100 SXM ([\d.]+) s \+ ([\d.]+) ms;", printed)
    assert words and 4 < float(words[1]) < 16 and 600 < float(words[2]) < 1200


@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        ([], None),
        (["rollout.keep_forward_gb=2"], 2.0),
        (["rollout.keep_forward_gb=0"], 0.0),
        (["rollout.engine=server", "rollout.server.url=http://localhost:1"], 0.0),
        (["model.share_prefix=false"], 0.0),
        (["model.attention_kernel=oracle"], 0.0),
        (["rollout.logprobs=recompute"], None),
        (["rollout.logprobs=recompute", "algorithm.minibatches=2"], 0.0),
    ],
)
def test_room_for_recorded_forwards_is_that_of_the_run(run_file: Path, overrides: list[str], gib: float | None) -> None:
    config = load_config(run_file, overrides)
    assert setup_of(config, model_shape(config), 8).keep_forward == (gib and gib * GIB)


MEASURED = json.loads((ROOT / "docs/benchmarks/2026-11-28-h100.json").read_text())["figures"]
# (prefix, responses, tokens of each), seconds on an H100 in bf16: updates with checkpointing; all tokens of a question.
UPDATES = [one for one in MEASURED if one["figure"] == "update" and one["contestant"] == "grouped"]


@pytest.mark.parametrize("figure", UPDATES, ids=lambda figure: figure["point"])
def test_expected_seconds_of_an_update_are_those_that_were_measured(figure: dict[str, Any]) -> None:
    prefix, count, length = map(int, figure["point"].split(","))
    setup = Setup(prefix=prefix, generations=count, response=length - 1, budget=10**9)
    seconds = update_work(published_shape("Qwen2.5-VL-7B"), setup, fused=False).seconds(DEVICES["H100 SXM"], 2)
    assert seconds == pytest.approx(figure["seconds"], rel=0.15)


@pytest.mark.parametrize("point", ["4096,8,256", "16384,32,256"])
def test_expected_seconds_of_decoding_are_those_that_were_measured(point: str) -> None:
    """A step of all rollouts, replayed from its graph: what one more token adds."""
    (step,) = (f for f in MEASURED if (f["figure"], f["point"], f.get("kernels")) == ("decode step", point, "triton"))
    prefix, count, length = map(int, point.split(","))
    shape, device = published_shape("Qwen2.5-VL-7B"), DEVICES["H100 SXM"]
    setup = Setup(prefix=prefix, generations=count, response=length)
    two = [rollout_seconds(shape, replace(setup, response=tokens), device) for tokens in (length - 1, length)]
    assert two[1] - two[0] == pytest.approx(step["seconds"], rel=0.1)


def test_no_time_is_said_of_kernels_that_were_not_measured(run_file: Path) -> None:
    config = load_config(run_file)
    shape = model_shape(config)
    linear = replace(shape, language=PUBLISHED["Qwen3.5-9B"])
    words = expected_line(linear, setup_of(config, shape, 8), fused=True)
    assert words.startswith("expected time: not estimated: linear-attention layers")


def test_what_does_not_fit_exits_1_and_says_what_to_change(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run_file), "model.gradient_checkpointing=false", "--gpus", "8"]
    as_set = ["model.mlp_tile_rows=0", "model.vision_piece_tokens=0"]
    assert main(["plan", *arguments, *as_set, "--gpu", "60"]) == 1
    assert "change first: model.gradient_checkpointing=true" in capsys.readouterr().out
    # What a run chooses by itself counts before anybody is asked to change anything.
    assert main(["plan", *arguments, "--gpu", "60"]) == 0
    assert "fits, with what the run puts away and cuts by itself: " in capsys.readouterr().out


def test_the_start_of_a_run_refuses_what_cannot_fit(run_file: Path) -> None:
    config = load_config(run_file)
    said: list[str] = []
    check_fits(config, 8, 80 * GIB, said.append)
    assert said[0].startswith("memory: fits: ")
    with pytest.raises(ConfigError, match=r"does not fit: .* change first: .* Nothing was loaded\. vlm-pg plan CONFIG"):
        check_fits(config, 8, 16 * GIB, said.append)
    # What is less beyond the GPU than a plan may be off is said and tried.
    shape = model_shape(config)
    setup = setup_of(config, shape, 8)
    least = plan_memory(shape, replace(setup, measures=setup.allowed)).peak
    check_fits(config, 8, int(least / 1.1), said.append)
    assert said[-1].startswith("memory: does not fit: ")
    with pytest.raises(ConfigError, match="Nothing was loaded"):
        check_fits(config, 8, int(least / 1.2), said.append)
    # On a CPU it is said and not judged.
    check_fits(config, 1, None, said.append)
    assert said[-1].startswith("memory: about ")


def test_train_asks_before_it_loads(run_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU of 1 GiB; there are no weights that could be loaded, so a later refusal would be another one."""
    import vlm_pg.training.main as training

    record = {"problem": "?", "data_type": "text", "problem_type": "numerical", "options": []}
    record |= {"process": "", "solution": "<answer>1</answer>", "path": ""}
    lines = [json.dumps(record | {"problem_id": number}) for number in range(16)]  # a step's
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    overrides = [f"data.train={tmp_path / 'train.jsonl'}", f"run.dir={tmp_path / 'run'}"]
    overrides += ["training.engine=torch", "training.deepspeed_config=null"]
    monkeypatch.setattr(training, "gpu_bytes", lambda device: GIB)
    with pytest.raises(ConfigError, match="Nothing was loaded"):
        training.train(load_config(run_file, overrides))


def test_gpus_that_the_run_cannot_use(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "training.sequence_parallel=4", "--gpus", "2"]) == 2
    assert "training.sequence_parallel is 4, which does not divide 2 GPUs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", str(run_file), "--gpu", "0"])
    assert "0 is no size of a GPU's memory; give GiB, such as 80" in capsys.readouterr().err


def test_a_config_of_which_no_model_can_be_made(run_file: Path) -> None:
    config: RunConfig = load_config(run_file)
    file = Path(config.model.path) / "config.json"
    values = json.loads(file.read_text())
    values["text_config"]["num_attention_heads"] = 27
    file.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"no model can be made|could be read"):
        check_fits(config, 1, None, print)
