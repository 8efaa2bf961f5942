"""Preference pairs: grouped equals repeated, loss and every gradient, and a pair is never divided.

The oracle is transformers' own forward over each question with each response, one at a time, under both models.
"""

from __future__ import annotations

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
from vlm_pg.algorithms.losses import preference
from vlm_pg.algorithms.settings import AlgorithmSettings, PreferenceSettings
from vlm_pg.batching.plan import MicroBatch, Piece
from vlm_pg.models.micro_batches import plan_groups
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.training.groups import Update
from vlm_pg.training.parallel import _group_parts, _GroupInfo
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import UpdateSettings, update_policy
from vlm_pg.types import Rollout, RolloutGroup, Sample

TRAINING = TrainingSettings(steps=1, objective="dpo", max_grad_norm=1e9)
# Kind and media of each question, lengths of its chosen and its rejected response: two questions on one video.
PAIRS = (("video", 9, (9, 4)), ("image", 6, (3, 7)), ("text", None, (5, 5)), ("video", 9, (1, 12)))


@pytest.fixture(autouse=True)
def share_short_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Videos this short would not be worth the calls."""
    monkeypatch.setattr("vlm_pg.batching.plan.TOKENS_PER_CALL", 0)


def reference_of(policy: Policy) -> Policy:
    reference = tiny_policy(family=policy.family.model_type)
    with torch.no_grad():
        for name, weight in reference.model.named_parameters():
            if policy.family.part_of(name) == "language":
                weight.mul_(1.02)
    return reference.requires_grad_(False)


def pairs(policy: Policy, reference: Policy) -> tuple[list[Case], list[RolloutGroup]]:
    cases = [make_case(policy, kind, i, media_seed=m, max_side=8) for i, (kind, m, _) in enumerate(PAIRS)]
    responses = [random_group(policy, case, PAIRS[i][2], i) for i, case in enumerate(cases)]
    scored = PolicyScorer(reference, 10_000).score(responses, 1.0)
    groups = []
    for number, (case, group, of_reference) in enumerate(zip(cases, responses, scored, strict=True)):
        sample = Sample(case.prompt.sample_id, "?", (), (), "A", "exact", "test", "test")
        both = zip(group.responses, of_reference, strict=True)
        rollouts = tuple(Rollout(ids, logprobs, "stop") for ids, logprobs in both)
        groups.append(RolloutGroup(sample, case.prompt, rollouts, 0, advantages=(1.0, 1.0), order=number, is_pair=True))
    return cases, groups


def expected_loss(
    policy: torch.nn.Module,
    reference: torch.nn.Module,
    cases: list[Case],
    groups: list[RolloutGroup],
    settings: PreferenceSettings,
) -> tuple[torch.Tensor, float]:
    losses, right = [], 0
    for case, group in zip(cases, groups, strict=True):
        responses = [rollout.token_ids for rollout in group.rollouts]
        own = repeated_logprobs(policy, case, responses)
        with torch.no_grad():
            theirs = repeated_logprobs(reference, case, responses)
        chosen, rejected = (a - b for a, b in zip(own, theirs, strict=True))
        right += int(chosen.sum() > rejected.sum())
        if settings.loss == "sigmoid":
            losses.append(-torch.log(torch.sigmoid(settings.beta * (chosen.sum() - rejected.sum()))))
        else:
            losses.append((chosen.mean() - rejected.mean() - 1 / (2 * settings.beta)) ** 2)
    return torch.stack(losses).mean(), right / len(losses)


def assert_equal(family: str, settings: PreferenceSettings, budget: int) -> dict[str, float]:
    policy = tiny_policy(train_vision=family in VL_FAMILY_NAMES, family=family)
    reference = reference_of(policy)
    cases, groups = pairs(policy, reference)
    oracle = plain_model(policy)
    loss, right = expected_loss(oracle, plain_model(reference), cases, groups, settings)
    loss.backward()
    engine = RecordingEngine(policy, TRAINING)
    algorithm = AlgorithmSettings(loss_average="sequence_sum")
    update = UpdateSettings(algorithm, budget, objective_loss=partial(preference, settings=settings))
    metrics = update_policy(engine, None, Update(groups, 1e-4), update)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["preference/accuracy"] == pytest.approx(right)
    for name, parameter in policy.model.named_parameters():
        parameter.grad = engine.gradients.get(name)
    errors = gradient_errors(policy.model, oracle)
    assert errors and max(errors.values()) < 1e-4, max(errors.items(), key=lambda item: item[1])
    return metrics


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_step_equals_repeated_sequences(family: str) -> None:
    assert_equal(family, PreferenceSettings(beta=0.5), 10_000)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_micro_batches_change_nothing(loss: str) -> None:
    settings = PreferenceSettings(loss=loss, beta=0.3)  # type: ignore[arg-type]
    whole = assert_equal("qwen2_5_vl", settings, 10_000)
    assert whole["micro_batches"] == 1 and whole["questions_sharing"] == 2
    cut = assert_equal("qwen2_5_vl", settings, 190)
    assert cut["micro_batches"] > 1


def test_a_pair_stays_in_one_pass_and_on_one_rank() -> None:
    """Chunks divide the responses of other groups, and ranks share them."""
    policy = tiny_policy()
    _, groups = pairs(policy, policy)
    budget = max(group.prompt.num_tokens + sum(PAIRS[i][2]) for i, group in enumerate(groups))
    for micro in plan_groups(groups, budget, True).micro_batches:
        assert all(piece.responses == (0, 1) for chunk in micro.chunks for piece in chunk)
    infos = [_GroupInfo.of(group, 0) for group in groups]
    assert [info.work.responses for info in infos] == [(sum(lengths) - 2,) for _, _, lengths in PAIRS]
    pieces = [(Piece(0, (0,)), Piece(3, (0,))), (Piece(1, (0,)), Piece(2, (0,)))]
    assignment = type("Assignment", (), {"pieces": pieces})()
    parts = _group_parts(infos, assignment, 2)
    assert parts == [[(0, (0, 1)), (3, (0, 1))], [(1, (0, 1)), (2, (0, 1))]]


def test_units_are_renumbered() -> None:
    micro = MicroBatch(((Piece(0, (0,)), Piece(1, (2, 0))), (Piece(1, (1,)),)))
    units = [((0, 1),), ((0,), (1,), (2,))]
    assert micro.of_units(units) == MicroBatch(((Piece(0, (0, 1)), Piece(1, (2, 0))), (Piece(1, (1,)),)))
