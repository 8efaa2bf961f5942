"""GroupedGRPOTrainer equals TRL's GRPOTrainer: loss, metrics and every gradient of a real training step.

Both train the same tiny Qwen2.5-VL from the same seed on prompts with images; both sample with ``generate``, so that
they see the same completions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")

from tests.support.processes import launch_ranks  # noqa: E402
from tests.support.trl import Recorded  # noqa: E402
from tests.support.trl_cases import Case, compare  # noqa: E402
from vlm_pg.integrations.trl import GroupedGRPOTrainer  # noqa: E402

EVALUATION = Case({"num_generations_eval": 2, "per_device_eval_batch_size": 2, "beta": 0.1}, evaluate=True)


@pytest.mark.parametrize("case", [Case({"max_steps": 1}), pytest.param(EVALUATION, marks=pytest.mark.matrix)])
def test_a_step_equals_trls_own(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, _ = compare(case, tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("vlm_pg: ") == 1
    assert "prompt(s) through the model as" in printed
    logged = {name.removeprefix("eval_"): value for name, value in ours.trainer.state.log_history[0].items()}
    assert logged["vlm_pg/tokens_saved"] > 0
    assert logged["vlm_pg/sharing_ratio"] > 1


def test_two_processes_sum_the_same_gradients(tmp_path: Path) -> None:
    """Scoring goes through DistributedDataParallel's forward, so gradients are reduced over the processes."""
    printed = launch_ranks("tests.numerics.trl_two_processes", str(tmp_path))
    assert "gradients of 2 processes equal under DistributedDataParallel" in printed


@pytest.mark.parametrize("target_modules", ["all-linear", pytest.param(["q_proj", "v_proj"], marks=pytest.mark.matrix)])
def test_an_adapter_trains_the_same(target_modules: Any, tmp_path: Path) -> None:
    """The reference of the KL term is the model without its adapter, in both; several steps see the same pictures."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=target_modules, init_lora_weights=False)
    settings = {"beta": 0.1, "max_steps": 4, "learning_rate": 1e-4}
    ours, theirs = compare(Case(settings, {"peft_config": config}, prepare=lambda _: torch.manual_seed(0)), tmp_path)
    assert all("lora_" in name for gradients in ours.gradients for name in gradients)
    kls = [[entry["kl"] for entry in run.trainer.state.log_history if "kl" in entry] for run in (theirs, ours)]
    assert len(kls[0]) == 4
    assert kls[1] == pytest.approx(kls[0], rel=1e-3)
    assert min(kls[1]) > 0


def test_generation_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = Recorded(GroupedGRPOTrainer, tmp_path).trainer
    trainer.train()
    model = trainer.model.eval()
    ids = torch.randint(10, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    generated = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    assert torch.equal(generated, model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False))
    with torch.no_grad():
        torch.testing.assert_close(logits[:, -1], model(input_ids=ids, attention_mask=mask).logits[:, -1])


def test_what_it_cannot_score_is_refused(tmp_path: Path) -> None:
    trainer = Recorded(GroupedGRPOTrainer, tmp_path).trainer
    ids = torch.full((2, 5), 20)
    with pytest.raises(ValueError, match="token_type_ids"):
        trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), 2, token_type_ids=torch.zeros_like(ids)
        )
