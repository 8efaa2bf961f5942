"""Supervised training: grouped equals repeated, loss and every gradient.

The oracle is transformers' own forward over every question with its response, one at a time, and a cross-entropy over
the tokens that the assistant wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from tests.support.groups import (
    Case,
    gradient_errors,
    make_case,
    plain_model,
    random_group,
    repeated_logprobs,
    tiny_policy,
)
from tests.support.tiny import FAMILY_NAMES, VL_FAMILY_NAMES
from tests.support.training import RecordingEngine
from vlm_pg.algorithms.losses import nll
from vlm_pg.algorithms.settings import AlgorithmSettings, LossAverage
from vlm_pg.models.policy import Policy
from vlm_pg.training.groups import Update
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import UpdateSettings, update_policy
from vlm_pg.types import Rollout, RolloutGroup, Sample


@pytest.fixture(autouse=True)
def share_short_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Videos this short would not be worth the calls."""
    monkeypatch.setattr("vlm_pg.batching.plan.TOKENS_PER_CALL", 0)


SETTINGS = TrainingSettings(steps=1, objective="sft", max_grad_norm=1e9)
# Kind, media and length of the response of each question: three on one video, two on another.
QUESTIONS = (
    ("video", 9, 9),
    ("video", 12, 3),
    ("video", 9, 14),
    ("text", None, 7),
    ("video", 12, 11),
    ("video", 9, 1),
    ("image", 6, 4),
)


def questions(policy: Policy) -> tuple[list[Case], list[RolloutGroup]]:
    """Every other response is a conversation, of whose tokens a third are the user's."""
    cases, groups = [], []
    for seed, (kind, media_seed, length) in enumerate(QUESTIONS):
        case = make_case(policy, kind, seed, media_seed=media_seed, max_side=8)
        (token_ids,) = random_group(policy, case, [length], seed).responses
        mask = torch.arange(length) % 3 != 1 if seed % 2 == 0 else None
        sample = Sample(case.prompt.sample_id, "?", (), (), "A", "exact", "test", "test")
        rollout = Rollout(token_ids, torch.zeros(length), "stop", loss_mask=mask)
        cases.append(case)
        groups.append(RolloutGroup(sample, case.prompt, (rollout,), 0, advantages=(1.0,), order=seed))
    return cases, groups


def expected_loss(
    model: torch.nn.Module, cases: Sequence[Case], groups: Sequence[RolloutGroup], average: str
) -> torch.Tensor:
    sums, counts = [], []
    for case, group in zip(cases, groups, strict=True):
        (rollout,) = group.rollouts
        (logprobs,) = repeated_logprobs(model, case, [rollout.token_ids])
        kept = logprobs if rollout.loss_mask is None else logprobs[rollout.loss_mask]
        sums.append(-kept.sum())
        counts.append(len(kept))
    if average == "token_mean":
        return torch.stack(sums).sum() / sum(counts)
    return torch.stack([total / count for total, count in zip(sums, counts, strict=True)]).mean()


def assert_equal(family: str, average: LossAverage, budget: int, train_vision: bool = True) -> dict[str, float]:
    policy = tiny_policy(train_vision=train_vision, family=family)
    cases, groups = questions(policy)
    oracle = plain_model(policy)
    loss = expected_loss(oracle, cases, groups, average)
    loss.backward()
    engine = RecordingEngine(policy, SETTINGS)
    algorithm = AlgorithmSettings(loss_average=average)
    settings = UpdateSettings(algorithm, budget, objective_loss=partial(nll, settings=algorithm))
    metrics = update_policy(engine, None, Update(groups, 1e-4), settings)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in policy.model.named_parameters():
        parameter.grad = engine.gradients.get(name)
    errors = gradient_errors(policy.model, oracle)
    assert errors and max(errors.values()) < 1e-4, max(errors.items(), key=lambda item: item[1])
    return metrics


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_step_equals_repeated_sequences(family: str) -> None:
    metrics = assert_equal(family, "token_mean", 10_000, train_vision=family in VL_FAMILY_NAMES)
    trained = sum(length - (length + 1) // 3 if i % 2 == 0 else length for i, (_, _, length) in enumerate(QUESTIONS))
    assert metrics["response_tokens"] == trained
    assert metrics["nll"] == pytest.approx(metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
@pytest.mark.parametrize("average", ["token_mean", "sequence_mean"])
def test_micro_batches_change_nothing(average: LossAverage, train_vision: bool) -> None:
    whole = assert_equal("qwen2_5_vl", average, 10_000, train_vision)
    assert whole["questions_sharing"] == 5 and whole["micro_batches"] == 1
    cut = assert_equal("qwen2_5_vl", average, 190, train_vision)
    assert cut["micro_batches"] > 2
