"""Our update equals TRL's: advantages, loss and every gradient from the same rollouts and rewards, for every loss.

TRL's own GRPOTrainer runs one training step and writes down what went into its loss. Our optimizer step gets the same
token ids, old log-probabilities and rewards, and starts from the same weights. At a ratio of 1 many losses coincide, so
the old log-probabilities are shifted until tokens are clipped on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")

from tests.support.collecting import tiny_config  # noqa: E402
from tests.support.tiny import tiny_processor  # noqa: E402
from tests.support.trl import (  # noqa: E402
    NUM_GENERATIONS,
    TEMPERATURE,
    Inputs,
    Recorded,
    largest_error,
    never_sampled,
    starting_model,
)
from vlm_pg.algorithms.settings import AlgorithmSettings  # noqa: E402
from vlm_pg.distributed import SINGLE_RANK  # noqa: E402
from vlm_pg.integrations.padded import GroupedRows, group_rows  # noqa: E402
from vlm_pg.integrations.trl import GroupedGRPOTrainer  # noqa: E402
from vlm_pg.models.loading import make_policy  # noqa: E402
from vlm_pg.models.policy import Policy  # noqa: E402
from vlm_pg.models.settings import PARTS, ModelSettings  # noqa: E402
from vlm_pg.training.engines import TorchEngine  # noqa: E402
from vlm_pg.training.groups import advantage_groups, without_truncated  # noqa: E402
from vlm_pg.training.settings import TrainingSettings  # noqa: E402
from vlm_pg.training.updates import Update, UpdateSettings, run_updates, update_policy  # noqa: E402
from vlm_pg.types import RewardBreakdown, Rollout, RolloutGroup, Sample  # noqa: E402

# TRL's optimizer. Its epsilon keeps Adam from turning a gradient that is rounding noise into a whole learning rate.
OPTIMIZER: dict[str, Any] = {"learning_rate": 1e-3, "adam_epsilon": 1e-2}
# Long enough that some responses end by themselves.
MAX_NEW_TOKENS = 16
SETTINGS = TrainingSettings(steps=1, betas=(0.9, 0.999), max_grad_norm=1e9, **OPTIMIZER)
OPTIONS: dict[str, Any] = OPTIMIZER | {"lr_scheduler_type": "constant", "max_completion_length": MAX_NEW_TOKENS}
CLIPS: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.3}
OUR_CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}


class RecordingEngine(TorchEngine):
    """Keeps the gradients of every step."""

    def __init__(self, policy: Policy, settings: TrainingSettings):
        super().__init__(policy, settings)
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step(self, learning_rate: float) -> float:
        self.gradients.append({name: p.grad.clone() for name, p in self._named if p.grad is not None})
        return super().step(learning_rate)


def starting_policy() -> Policy:
    return make_policy(starting_model(), tiny_processor(), ModelSettings(path="tiny", train=PARTS))


def off_policy(inputs: Inputs) -> Inputs:
    """Whole responses and single tokens are likelier or less likely than they were, whatever their advantage."""
    old = inputs["old_per_token_logps"]
    rank = inputs["advantages"].argsort().argsort()
    by_response = 0.3 * (1 - 2 * (rank % 2))[:, None]
    by_token = 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    return inputs | {"old_per_token_logps": old + by_response + by_token}


def perturb(language_model: torch.nn.Module) -> None:
    """A reference that differs a little, so that the KL term has a gradient."""
    with torch.no_grad():
        for parameter in language_model.parameters():
            parameter.mul_(1.01)


def trained(folder: Path, shifted: bool = False, trainer_class: type = trl.GRPOTrainer, **settings: Any) -> Recorded:
    """A finished run of a TRL trainer."""
    alter: dict[str, Any] = {"alter": off_policy} if shifted else {}
    run = Recorded(trainer_class, folder, **alter, **(OPTIONS | settings))
    if getattr(run.trainer, "ref_model", None) is not None:
        perturb(run.trainer.ref_model.model.language_model)
    run.trainer.train()
    return run


@cache
def shifted_run(**settings: Any) -> Recorded:
    """As ``trained``, off-policy, for tests that only read."""
    with TemporaryDirectory() as folder:
        # With several passes over a batch TRL hands the old log-probabilities to its loss; one step is taken.
        return trained(Path(folder), shifted=True, num_iterations=2, **settings)


def rows_of(inputs: Inputs, policy: Policy) -> GroupedRows:
    """TRL's padded rows by prompt. A response that it masks, because it was cut off, is there with all its tokens."""
    mask = inputs["completion_mask"]
    mask = torch.where(mask.any(-1, keepdim=True), mask, torch.ones_like(mask))
    return group_rows(
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], mask], dim=1),
        mask.shape[1],
        policy.positions,
        inputs["mm_token_type_ids"],
        inputs["pixel_values"],
        inputs["image_grid_thw"],
        inputs["num_images"],
    )


def rollout_groups(run: Recorded, inputs: Inputs, policy: Policy, algorithm: AlgorithmSettings) -> list[RolloutGroup]:
    """What TRL sampled, with our advantages, which must be TRL's."""
    tokenizer = tiny_processor().tokenizer
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)  # anything else is cut off, says TRL
    old = inputs.get("old_per_token_logps", torch.zeros(inputs["completion_ids"].shape))
    rows = rows_of(inputs, policy)
    groups = []
    for scored, indices in zip(rows.groups, rows.rows, strict=True):
        rollouts = tuple(
            Rollout(ids, old[row, : len(ids)], "stop" if ids[-1] in ends else "length")
            for ids, row in zip(scored.responses, indices, strict=True)
        )
        totals = [run.rewards[tuple(ids.tolist())] for ids in scored.responses]
        rewards = tuple(RewardBreakdown(total, {"accuracy": total}) for total in totals)
        sample = Sample(scored.prompt.sample_id, "?", (), (), "A", "exact", "test", "test")
        groups.append(RolloutGroup(sample, scored.prompt, rollouts, policy.weights_version, rewards))
    groups = advantage_groups(groups, algorithm, {"accuracy": 1.0}, SINGLE_RANK)
    for group, indices in zip(groups, rows.rows, strict=True):
        assert len(group.rollouts) == NUM_GENERATIONS
        assert list(group.advantages) == pytest.approx(inputs["advantages"][indices].tolist(), rel=1e-5, abs=1e-6)
    if algorithm.mask_truncated:
        groups = [group for group in map(without_truncated, groups) if group.rollouts]
    return groups


def update(
    run: Recorded, algorithm: AlgorithmSettings, groups: list[RolloutGroup] | None = None, budget: int = 10_000
) -> tuple[RecordingEngine, dict[str, float]]:
    """Our update on what ``run`` sampled for its first one."""
    policy = starting_policy()
    engine = RecordingEngine(policy, SETTINGS)
    reference = None
    if algorithm.kl_coef:
        reference = starting_policy().requires_grad_(False)
        perturb(reference.language_model)
    metrics = update_policy(
        engine,
        reference,
        Update(
            groups if groups is not None else rollout_groups(run, run.inputs[0], policy, algorithm),
            SETTINGS.learning_rate,
        ),
        UpdateSettings(
            algorithm,
            budget,
            TEMPERATURE,
            logprobs="reuse" if "old_per_token_logps" in run.inputs[0] else "recompute",
            max_new_tokens=MAX_NEW_TOKENS,
        ),
    )
    return engine, metrics


def assert_equal_update(run: Recorded, engine: RecordingEngine, metrics: dict[str, float]) -> None:
    assert metrics["loss"] == pytest.approx(sum(run.losses), rel=1e-5, abs=1e-6)
    error, name = largest_error(engine.gradients[0], run.gradients[0])
    assert error <= 1e-5, name


def assert_same_weights(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """By what the updates changed."""
    start = {name: p.detach() for name, p in starting_model().named_parameters()}
    mine, expected = ({name: weights[name].detach() - p for name, p in start.items()} for weights in (ours, theirs))
    error, name = largest_error(mine, expected)
    assert error <= 1e-3, name


TOKEN_MEAN: dict[str, Any] = {"loss_average": "token_mean"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"loss_average": "sequence_mean"}),
    "bnpo": ({"loss_type": "bnpo"}, TOKEN_MEAN),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_average": "constant_length", "scale_advantages": "none"},
    ),
    "dapo": ({"loss_type": "dapo"}, TOKEN_MEAN),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_average": "sequence_mean", "ratio_level": "sequence"},
    ),
    "gspo over tokens": (
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
        TOKEN_MEAN | {"ratio_level": "sequence"},
    ),
    "scaled by the batch": ({"scale_rewards": "batch"}, TOKEN_MEAN | {"scale_advantages": "batch"}),
    "dual clip": ({"delta": 1.5}, TOKEN_MEAN | {"dual_clip": 1.5}),
    "entropy bonus": ({"entropy_coef": 0.02}, TOKEN_MEAN | {"entropy_coef": 0.02}),
    # TRL's default for the KL, a factor of the ratio on every token's term, has no counterpart here.
    "kl": (
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
        {"loss_average": "sequence_mean", "kl_coef": 0.3},
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in ("grpo", "dr_grpo", "kl") else pytest.mark.matrix) for name in CASES],
)
def test_a_clipped_loss_equals_trls(case: str) -> None:
    theirs, ours = CASES[case]
    run = shifted_run(**CLIPS, **theirs)
    engine, metrics = update(run, AlgorithmSettings(**OUR_CLIPS, **ours))
    assert metrics["clip_low"] > 0 and metrics["clip_high"] > 0
    assert_equal_update(run, engine, metrics)
    assert metrics["entropy"] == pytest.approx(run.logged["entropy"], rel=1e-5)
    if "kl_coef" in ours:
        assert metrics["kl"] == pytest.approx(run.logged["kl"], rel=1e-4) and metrics["kl"] > 1e-3
    if case in ("grpo", "bnpo", "dr_grpo", "dapo"):
        assert metrics["clip_low"] == pytest.approx(run.logged["clip_ratio/low_mean"], abs=1e-6)
        assert metrics["clip_high"] == pytest.approx(run.logged["clip_ratio/high_mean"], abs=1e-6)


def test_cispo_equals_trls() -> None:
    """TRL's bound is that of the ratio itself, and there is none from below."""
    run = shifted_run(loss_type="cispo", epsilon_high=1.3)
    engine, metrics = update(run, AlgorithmSettings(loss="cispo", clip_low=1.0, clip_high=0.3, **TOKEN_MEAN))
    assert metrics["clip_high"] > 0 and metrics["ratio_min"] < 0.8
    assert_equal_update(run, engine, metrics)


@pytest.mark.parametrize(
    "wrong", [{"clip_high": 0.5}, {"ratio_level": "sequence"}, {"loss_average": "sequence_mean"}, {"dual_clip": 1.5}]
)
def test_any_other_loss_would_be_noticed(wrong: dict[str, Any]) -> None:
    """These runs tell every setting's neighbours apart, by far more than the tolerance."""
    run = shifted_run(**CLIPS, loss_type="dapo")
    engine, metrics = update(run, AlgorithmSettings(**(OUR_CLIPS | TOKEN_MEAN | wrong)))
    assert metrics["loss"] != pytest.approx(run.losses[0], rel=1e-3)
    assert largest_error(engine.gradients[0], run.gradients[0])[0] > 1e-2


@pytest.mark.parametrize(
    ("loss_type", "average"), [("grpo", "sequence_mean"), pytest.param("dapo", "token_mean", marks=pytest.mark.matrix)]
)
def test_truncated_responses_are_in_the_statistics_and_out_of_the_loss(loss_type: str, average: str) -> None:
    """Where responses are averaged, TRL divides by those that it masks too; ours by those that train."""
    run = shifted_run(**CLIPS, loss_type=loss_type, mask_truncated_completions=True)
    lengths = run.inputs[0]["completion_mask"].sum(-1)
    training = float((lengths > 0).float().mean())
    assert 0 < training < 1
    engine, metrics = update(run, AlgorithmSettings(mask_truncated=True, loss_average=average, **OUR_CLIPS))
    assert metrics["response_tokens"] == lengths.sum()
    assert metrics["clip_low"] > 0 and metrics["clip_high"] > 0
    share = training if average == "sequence_mean" else 1.0
    assert metrics["loss"] * share == pytest.approx(run.losses[0], rel=1e-5, abs=1e-6)
    mine = {name: share * gradient for name, gradient in engine.gradients[0].items()}
    error, name = largest_error(mine, run.gradients[0])
    assert error <= 1e-5, name


def test_several_updates_of_one_batch_equal_trls(tmp_path: Path) -> None:
    """Two passes: the second one starts from updated weights and is measured from those that sampled."""
    run = trained(tmp_path, num_iterations=2, max_steps=2, epsilon=0.005, loss_type="dapo")
    algorithm: dict[str, Any] = {"num_iterations": 2, "clip_low": 0.005, "clip_high": 0.005, **TOKEN_MEAN}
    config = tiny_config(algorithm, rollout={"temperature": TEMPERATURE, "max_new_tokens": MAX_NEW_TOKENS})
    policy = starting_policy()
    engine = RecordingEngine(policy, SETTINGS)
    groups = rollout_groups(run, run.inputs[0], policy, config.algorithm)
    metrics = run_updates(engine, None, Update(groups, SETTINGS.learning_rate), config)
    assert metrics["updates"] == 2.0
    assert metrics["clip_low"] > 0 and metrics["clip_high"] > 0
    assert metrics["loss"] == pytest.approx(sum(run.losses) / 2, abs=1e-5)
    for mine, expected in zip(engine.gradients, run.gradients, strict=True):
        error, name = largest_error(mine, expected)
        assert error <= 1e-3, name
    assert_same_weights(dict(policy.model.named_parameters()), run.weights)


def test_leave_one_out_equals_trls(tmp_path: Path) -> None:
    """TRL's ratio is that of whole responses, which on-policy has the gradient of ours."""
    run = trained(tmp_path, trainer_class=trl.RLOOTrainer, config_class=trl.RLOOConfig, beta=0.0)
    algorithm = AlgorithmSettings(
        baseline="leave_one_out", scale_advantages="none", loss_average="sequence_sum", clip_low=0.2, clip_high=0.2
    )
    engine, _ = update(run, algorithm)
    error, name = largest_error(engine.gradients[0], run.gradients[0])
    assert error <= 1e-5, name


# Responses of one prompt in a pass -> per_device_train_batch_size, gradient_accumulation_steps
CUTS = {4: (4, 1), 2: (2, 2), 1: (1, 4)}
PER_PASS = [2, *(pytest.param(other, marks=pytest.mark.matrix) for other in (4, 1))]


@cache
def cut_run(trainer_class: type, per_pass: int) -> Recorded:
    """One prompt, four responses of equal length, in micro-batches of ``per_pass``."""
    rows, steps = CUTS[per_pass]
    batches: dict[str, Any] = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
    lengths = never_sampled("<|im_end|>")
    with TemporaryDirectory() as folder:
        return trained(Path(folder), trainer_class=trainer_class, loss_type="dapo", **batches, **lengths)


def all_inputs(run: Recorded) -> Inputs:
    """The inputs of all its calls of the loss as one, in an order that does not depend on TRL's shuffling."""
    together = dict(run.inputs[0])
    for name, value in together.items():
        if isinstance(value, torch.Tensor) and value.dim():
            together[name] = torch.cat([inputs[name] for inputs in run.inputs])
    together["num_images"] = [count for inputs in run.inputs for count in inputs["num_images"]]
    # Prompt and picture are the same in every row.
    order = sorted(range(NUM_GENERATIONS), key=lambda row: together["completion_ids"][row].tolist())
    return together | {name: together[name][order] for name in ("completion_ids", "advantages")}


@pytest.mark.parametrize("per_pass", PER_PASS)
def test_trls_micro_batches_do_not_change_the_update(per_pass: int) -> None:
    """Through TRL's own arguments, in both trainers: the same rollouts, gradients and updated weights."""
    whole = cut_run(trl.GRPOTrainer, 4)
    for trainer_class in (trl.GRPOTrainer, GroupedGRPOTrainer):
        cut = cut_run(trainer_class, per_pass)
        assert len(cut.losses) == CUTS[per_pass][1]
        assert torch.equal(all_inputs(cut)["completion_ids"], all_inputs(whole)["completion_ids"])
        assert sum(cut.losses) == pytest.approx(sum(whole.losses), abs=1e-6)
        error, name = largest_error(cut.gradients[0], whole.gradients[0])
        assert error <= 1e-5, name
        assert_same_weights(cut.weights, whole.weights)


@pytest.mark.parametrize("per_pass", PER_PASS)
def test_our_micro_batches_give_trls_update(per_pass: int) -> None:
    run = cut_run(trl.GRPOTrainer, per_pass)
    policy = starting_policy()
    algorithm = AlgorithmSettings(**TOKEN_MEAN)
    (group,) = rollout_groups(run, all_inputs(run), policy, algorithm)
    # The last token of a response is predicted and never read.
    budget = group.prompt.num_tokens + per_pass * (MAX_NEW_TOKENS - 1)
    engine, metrics = update(run, algorithm, [group], budget)
    chunks = NUM_GENERATIONS // per_pass
    assert metrics["micro_batches"] == 1
    assert metrics["groups_chunked"] == (chunks > 1)
    assert metrics["backward_calls"] == (chunks + 1 if chunks > 1 else 1), "each chunk, and once through the prompt"
    assert_equal_update(run, engine, metrics)
    assert_same_weights(dict(engine.policy.model.named_parameters()), run.weights)
