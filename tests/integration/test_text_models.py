"""CPPO's published GSM8K run starts with a text model of Qwen2.5's shape, and trains with and without pruning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2ForCausalLM

from data_pipelines.gsm8k import main as prepare_gsm8k
from tests.support.processes import launch_ranks
from tests.support.runs import ROOT, read_lines, save_tiny_model
from vlm_pg.config import RunConfig, load_config
from vlm_pg.data.records import read_records, to_record
from vlm_pg.errors import ModelError
from vlm_pg.training.main import train

CONFIG = ROOT / "configs" / "text_gsm8k_cppo.yaml"
# A random model earns nothing for its answers; what differs by text gives it something to learn from.
SPREAD = "def spread(response):\n    return sum(map(ord, response)) % 7 / 7\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text model, GSM8K's rows as published, prepared, and a reward."""
    home = tmp_path_factory.mktemp("gsm8k")
    save_tiny_model(home / "model", "qwen2")
    for name, first in (("train", 0), ("test", 100)):
        rows = [
            {"question": f"Tom has {n} apples and eats {n % 3}. How many are left?", "answer": f"...\n#### {n - n % 3}"}
            for n in range(first + 5, first + 25)
        ]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = ["--train", str(home / "train.jsonl"), "--eval", str(home / "test.jsonl")]
    assert prepare_gsm8k([*raw, "--out", str(home / "data")]) == 0
    (home / "spread.py").write_text(SPREAD)
    return home


def changes(home: Path, run: Path, *more: str) -> list[str]:
    """What makes the published run a tiny one."""
    return [
        f"model.path={home}/model",
        "model.dtype=fp32",
        f"data.train={home}/data:train",
        f"data.eval.gsm8k={home}/data:eval",
        f"run.dir={run}",
        f"reward.functions=[{{function: '{home}/spread.py:spread'}}]",
        "rollout.max_new_tokens=6",
        "training.steps=2",
        "training.prompts_per_step=2",
        "training.learning_rate=1e-3",
        "eval.limit=4",
        "eval.before=false",
        "observe.trackers=[]",
        "observe.report=false",
        *more,
    ]


def on_one_process(home: Path, run: Path, *more: str) -> RunConfig:
    engine = ("training.engine=torch", "training.deepspeed_config=null")
    return load_config(CONFIG, changes(home, run, *engine, *more))


@pytest.mark.matrix
def test_the_published_run_on_two_processes(home: Path, tmp_path: Path) -> None:
    # Responses so long beside their prompts that what pruning saves is worth a further question.
    more = ("eval.after=false", "rollout.max_new_tokens=24")
    printed = launch_ranks("vlm_pg.cli", "train", str(CONFIG), *changes(home, tmp_path / "run", *more))
    assert " trained, fp32 on cpu, 2 process(es), engine deepspeed (ZeRO-" in printed
    assert "parts: language trained (" in printed
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert line["updates"] == 2 and line["pruned_share"] == pytest.approx(0.5) and line["filled_groups"] > 0
        assert line["grad_norm"] > 0 and "kl" in line and line["sharing_ratio"] > 2


@pytest.mark.matrix
@pytest.mark.parametrize("rate", [0.0, 0.875])
def test_with_and_without_pruning_and_resumed(rate: float, home: Path, tmp_path: Path) -> None:
    more = (f"algorithm.prune_rate={rate}", "run.resume=auto")
    assert train(on_one_process(home, tmp_path / "run", *more, "training.steps=1", "eval.after=false")) == 0
    assert train(on_one_process(home, tmp_path / "run", *more)) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["pruned_share"] == pytest.approx(rate) and line["grad_norm"] > 0 for line in lines)
    answers = read_lines(tmp_path / "run" / "eval_gsm8k_after.jsonl")
    assert len(answers) == 4 and all(len(row["outputs"]) == 1 for row in answers)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    assert type(Qwen2ForCausalLM.from_pretrained(checkpoint)) is Qwen2ForCausalLM
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template


def test_questions_with_media_are_refused_before_the_run_begins(home: Path, tmp_path: Path) -> None:
    record = to_record(read_records(Path(f"{home}/data:train"))[0][0])
    (tmp_path / "mixed.json").write_text(
        json.dumps([record, record | {"problem_id": 9, "data_type": "image", "path": "a.png"}])
    )
    config = on_one_process(home, tmp_path / "run", f"data.train={tmp_path}/mixed.json")
    with pytest.raises(
        ModelError, match=rf"1 of 2 questions in .*mixed.json have .* but the model {home}/model \(qwen2\)"
    ):
        train(config)
    assert not (tmp_path / "run").exists()
    of_eval = on_one_process(home, tmp_path / "run", f"data.eval.gsm8k={tmp_path}/mixed.json")
    with pytest.raises(ModelError, match=r"mixed.json have images or videos"):
        train(of_eval)
    left_out = record | {"problem_id": 9, "data_type": "image", "path": "a.png", "data_source": "pictures"}
    (tmp_path / "mixed.json").write_text(json.dumps([record, left_out]))
    weights = "data.mixture={gsm8k: 1, pictures: 0}"
    short = ("training.prompts_per_step=1", "training.steps=1", "eval.after=false")
    assert train(on_one_process(home, tmp_path / "run", f"data.train={tmp_path}/mixed.json", weights, *short)) == 0
