"""Distillation: grouped equals repeated, loss and every gradient, with the teacher's prefix read once.

The oracle is transformers' own forward over each question with each response, one at a time, under both models, and the
divergence of whole distributions as the formulas have it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.groups import Case, gradient_errors, make_case, plain_model, random_group, tiny_policy
from tests.support.tiny import FAMILY_NAMES, VL_FAMILY_NAMES
from tests.support.training import RecordingEngine
from vlm_pg.algorithms.losses import divergence_term, no_loss
from vlm_pg.algorithms.settings import AlgorithmSettings, DistillationSettings
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.scoring import TeacherScorer
from vlm_pg.training.groups import Update
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import UpdateSettings, update_policy
from vlm_pg.types import Rollout, RolloutGroup, Sample

TRAINING = TrainingSettings(steps=1, objective="distill", max_grad_norm=1e9)
QUESTIONS = (("video", 9, (9, 4, 1)), ("image", 6, (3, 7, 5)), ("text", None, (5, 5, 8)), ("video", 9, (2, 12, 3)))


@pytest.fixture(autouse=True)
def share_short_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Videos this short would not be worth the calls."""
    monkeypatch.setattr("vlm_pg.batching.plan.TOKENS_PER_CALL", 0)


def teacher_of(policy: Policy) -> Policy:
    """Another model of the family, tower included."""
    teacher = tiny_policy(family=policy.family.model_type)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in teacher.model.parameters():
            weight.add_(0.3 * weight.std() * torch.randn(weight.shape, generator=generator))
    return teacher.requires_grad_(False)


def taught_groups(policy: Policy, teacher: Policy, top_k: int) -> tuple[list[Case], list[RolloutGroup]]:
    cases = [make_case(policy, kind, i, media_seed=m, max_side=8) for i, (kind, m, _) in enumerate(QUESTIONS)]
    responses = [random_group(policy, case, QUESTIONS[i][2], i) for i, case in enumerate(cases)]
    found = TeacherScorer(teacher, 10_000, top_k=top_k or policy.vocab_size).score(responses, 1.0)
    groups = []
    for number, (case, group, taught) in enumerate(zip(cases, responses, found, strict=True)):
        sample = Sample(case.prompt.sample_id, "?", (), (), "A", "exact", "test", "test")
        # As of a dialogue, one response is the policy's in part.
        masks = [torch.arange(len(ids)) % 3 != 1 if i == 1 else None for i, ids in enumerate(group.responses)]
        both = zip(group.responses, masks, strict=True)
        rollouts = tuple(Rollout(ids, torch.zeros(len(ids)), "stop", loss_mask=mask) for ids, mask in both)
        groups.append(
            RolloutGroup(
                sample, case.prompt, rollouts, 0, advantages=(0.5, -1.0, 0.2), order=number, teacher=tuple(taught)
            )
        )
    return cases, groups


def distributions(model: Any, case: Case, response: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [R, V] of a response's positions."""
    from tests.support import groups

    everything: list[torch.Tensor] = []
    softmax = torch.Tensor.log_softmax

    def recorded(logits: torch.Tensor, *args: Any) -> torch.Tensor:
        everything.append(softmax(logits, *args))
        return everything[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "log_softmax", recorded)
        groups.batched_logprobs(model, case, [response])
    return everything[0][0]


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum(-1)


def divergence(policy: torch.Tensor, teacher: torch.Tensor, settings: DistillationSettings) -> torch.Tensor:
    """[R] of whole distributions, or of the teacher's k and the rest."""
    if settings.top_k:
        chosen = teacher.topk(settings.top_k, -1).indices
        policy, teacher = (
            torch.cat([one.gather(-1, chosen), (1 - one.exp().gather(-1, chosen).sum(-1, keepdim=True)).log()], -1)
            for one in (policy, teacher)
        )
    if settings.divergence == "reverse_kl":
        return kl(policy, teacher)
    if settings.divergence == "forward_kl":
        return kl(teacher, policy)
    mixed = (settings.jsd_weight * teacher.exp() + (1 - settings.jsd_weight) * policy.exp()).log()
    return settings.jsd_weight * kl(teacher, mixed) + (1 - settings.jsd_weight) * kl(policy, mixed)


def assert_equal(family: str, settings: DistillationSettings, budget: int) -> dict[str, float]:
    policy = tiny_policy(train_vision=family in VL_FAMILY_NAMES, family=family)
    teacher = teacher_of(policy)
    cases, groups = taught_groups(policy, teacher, settings.top_k)
    student, expert = plain_model(policy), plain_model(teacher)
    values = []
    for case, group in zip(cases, groups, strict=True):
        for rollout in group.rollouts:
            with torch.no_grad():
                expected = distributions(expert, case, rollout.token_ids)
            found = divergence(distributions(student, case, rollout.token_ids), expected, settings)
            values.append(found if rollout.loss_mask is None else found[rollout.loss_mask])
    loss = settings.coef * torch.cat(values).mean()
    loss.backward()
    engine = RecordingEngine(policy, TRAINING)
    update = UpdateSettings(AlgorithmSettings(), budget, objective_loss=no_loss, distillation=settings)
    metrics = update_policy(engine, None, Update(groups, 1e-4), update)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert metrics["distillation/divergence"] == pytest.approx(loss.item() / settings.coef, rel=1e-5, abs=1e-7)
    for name, parameter in policy.model.named_parameters():
        parameter.grad = engine.gradients.get(name)
    errors = gradient_errors(policy.model, student)
    assert errors and max(errors.values()) < 1e-4, max(errors.items(), key=lambda item: item[1])
    return metrics


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_step_equals_repeated_sequences(family: str) -> None:
    assert_equal(family, DistillationSettings(teacher="t", top_k=16), 10_000)


@pytest.mark.parametrize("top_k", [0, 8])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_micro_batches_and_chunks_change_nothing(kind: Any, top_k: int) -> None:
    settings = DistillationSettings(teacher="t", divergence=kind, top_k=top_k, coef=0.3, jsd_weight=0.3)
    whole = assert_equal("qwen2_5_vl", settings, 10_000)
    assert whole["micro_batches"] == 1 and whole["questions_sharing"] == 2
    for budget in (230, 185):
        cut = assert_equal("qwen2_5_vl", settings, budget)
        assert cut["micro_batches"] > 1 or cut["groups_chunked"]


def test_it_is_added_to_the_reward() -> None:
    """The update's gradient is that of the rewards plus coef times that of the teacher."""
    gradients = []
    for loss, distillation in (
        (None, None),
        (no_loss, DistillationSettings(teacher="t", top_k=8, coef=2.0)),
        (None, DistillationSettings(teacher="t", top_k=8, coef=2.0)),
    ):
        policy = tiny_policy()
        _, groups = taught_groups(policy, teacher_of(policy), 8)
        engine = RecordingEngine(policy, TRAINING)
        update = UpdateSettings(AlgorithmSettings(), 10_000, objective_loss=loss, distillation=distillation)
        update_policy(engine, None, Update(groups, 1e-4), update)
        gradients.append(engine.gradients)
    of_reward, of_teacher, both = gradients
    for name, gradient in both.items():
        expected = of_reward[name] + of_teacher[name]
        assert (gradient - expected).norm() <= 1e-4 * expected.norm().clamp_min(1e-6), name


def test_the_teacher_reads_each_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in its layers: prompts once for all responses, and one video once for its two questions."""
    policy = tiny_policy()
    teacher = teacher_of(policy)
    rows: list[int] = []
    layer = teacher.language_model.layers[0]
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append((args[0] if args else kwargs["hidden_states"]).shape[-2]),
        with_kwargs=True,
    )
    cases, groups = taught_groups(policy, teacher, 8)
    prompts = [case.prompt.num_tokens for case in cases]
    responses = sum(len(rollout.token_ids) - 1 for group in groups for rollout in group.rollouts)
    assert sum(rows) <= sum(prompts) - 112 + responses, "the video of 112 tokens once"
    repeated = sum(3 * length for length in prompts) + responses
    assert sum(rows) < repeated / 2


def test_tokens_that_only_the_teacher_has_are_left_out() -> None:
    """Sizes of one family pad the same tokenizer to different numbers of logits."""
    policy = tiny_policy()
    group = random_group(policy, make_case(policy, "text", 0, media_seed=None, max_side=8), (5, 3), 0)
    common = policy.vocab_size - 100
    [found] = TeacherScorer(teacher_of(policy), 10_000, top_k=common, vocabulary=common).score([group], 1.0)
    for taught in found:
        assert taught.token_ids.max() < common
        assert taught.logprobs.exp().sum(-1).sub(1).abs().max() < 1e-5


def test_divergences_equal_trls() -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")
    student, teacher = torch.randn(2, 7, 31, generator=torch.Generator().manual_seed(0)).unbind(0)
    for weight in (0.1, 0.5):
        theirs = gkd.GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=weight, reduction="sum")
        settings = DistillationSettings(teacher="t", divergence="jsd", jsd_weight=weight, top_k=0)
        ours, _ = divergence_term(student.log_softmax(-1), teacher.log_softmax(-1), torch.ones(7), settings)
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    for kind, weight in (("forward_kl", 0.0), ("reverse_kl", 1.0)):
        theirs = gkd.GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=weight, reduction="sum")
        settings = DistillationSettings(teacher="t", divergence=kind, top_k=0)  # type: ignore[arg-type]
        term = partial(divergence_term, settings=settings)
        ours, _ = term(student.log_softmax(-1), teacher.log_softmax(-1), torch.ones(7))
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
