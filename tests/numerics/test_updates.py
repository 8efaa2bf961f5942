"""One optimizer step: how a batch is cut, and over how many processes, cannot change the updated weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.collecting import tiny_config
from tests.support.groups import make_case, plain_model, tiny_policy
from tests.support.training import RecordingEngine, make_groups, random_rollouts
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.batching.plan import MicroBatch
from vlm_pg.models.micro_batches import Slot
from vlm_pg.models.policy import Policy
from vlm_pg.training.engines import TorchEngine
from vlm_pg.training.parallel import Parallel
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import Update, UpdateSettings, run_updates, update_policy
from vlm_pg.types import ResponseGroup, RolloutGroup

# Adam divides each gradient by its own size, so an element whose gradient is rounding noise may move by a sizeable part
# of the learning rate either way, on one kind of processor and not on another: the epsilon is above that noise.
# Gradients are compared as well, before Adam sees them.
SETTINGS = TrainingSettings(steps=1, learning_rate=1e-4, adam_epsilon=1e-5)


def reference_for(policy: Policy) -> Policy:
    """A slightly different model, so that the KL term has a gradient."""
    reference = tiny_policy()
    with torch.no_grad():
        for parameter in reference.model.model.language_model.parameters():
            parameter.mul_(1.01)
    return reference.requires_grad_(False)


def updated(
    train_vision: bool,
    budget: int,
    average: str = "token_mean",
    dtype: torch.dtype = torch.float32,
    make: Callable[[Policy], list[RolloutGroup]] = make_groups,
    **settings: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float]]:
    """Weights after one step, the gradients it used, and its metrics."""
    policy = tiny_policy(train_vision=train_vision, dtype=dtype, **settings)
    groups = make(policy)
    algorithm = AlgorithmSettings(kl_coef=0.05, loss_average=average)
    reference = reference_for(policy) if dtype == torch.float32 else None
    engine = RecordingEngine(policy, SETTINGS)
    metrics = update_policy(
        engine, reference, Update(groups, SETTINGS.learning_rate), UpdateSettings(algorithm, budget)
    )
    return {name: p.detach() for name, p in policy.model.named_parameters()}, engine.gradients, metrics


Updated = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float]]


def assert_same_update(cut: Updated, whole: Updated) -> None:
    for name, weight in whole[0].items():
        assert (cut[0][name] - weight).abs().max() < 1e-6, name
    for name, gradient in whole[1].items():
        assert (cut[1][name] - gradient).norm() < 1e-5 * gradient.norm(), name
    for name in ("loss", "kl", "entropy", "ratio_mean", "response_tokens", "tokens_repeated"):
        assert cut[2][name] == pytest.approx(whole[2][name], abs=1e-6), name
    assert cut[2]["grad_norm"] == pytest.approx(whole[2]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("average", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
def test_micro_batches_do_not_change_the_update(train_vision: bool, average: str) -> None:
    whole = updated(train_vision, 10_000, average)
    assert whole[2]["micro_batches"] == 1
    # With the last budget the largest group runs as prompt, two chunks of responses, and back through the prompt.
    for budget, micro_batches, calls in ((180, 2, 2), (110, 4, 4), (102, 4, 6)):
        cut = updated(train_vision, budget, average)
        assert (cut[2]["micro_batches"], cut[2]["backward_calls"]) == (micro_batches, calls)
        assert cut[2]["groups_chunked"] == (budget == 102)
        assert cut[2]["tokens_computed"] == whole[2]["tokens_computed"], "a prompt is never computed twice"
        assert_same_update(cut, whole)


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
def test_passes_for_other_ranks_are_worth_nothing(train_vision: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another rank had two chunks more, a chunked micro-batch more and a single pass more."""

    class WithAnother(Parallel):
        def slots(self, micro_batches: Sequence[MicroBatch], recorded: Collection[MicroBatch]) -> list[Slot]:
            own = super().slots(micro_batches, recorded)
            assert own[0].chunks == 2
            return [own[0]._replace(chunks=4), Slot(None, 3), *own[1:], Slot(None, 1)]

    whole = updated(train_vision, 10_000)
    monkeypatch.setattr(RecordingEngine, "parallel", property(WithAnother))
    padded = updated(train_vision, 102)
    assert padded[2]["backward_calls"] == 5 + 4 + 3 + 1
    assert padded[2]["tokens_computed"] == whole[2]["tokens_computed"]
    assert_same_update(padded, whole)


def questions_on_videos(policy: Policy) -> list[RolloutGroup]:
    """Three questions on one video, one on another, one without: as rollouts a little off-policy."""
    media = (("video", 9), ("video", 6), ("video", 9), ("text", None), ("video", 9))
    lengths = ([5, 1, 9], [4, 4], [3, 8, 2], [6, 2], [7, 3])
    shapes = enumerate(zip(media, lengths, strict=True))
    cases = [
        (make_case(policy, kind, seed, media_seed=media_seed, max_side=8), of_group)
        for seed, ((kind, media_seed), of_group) in shapes
    ]
    sampled = [random_rollouts(policy, case, of_group, seed) for seed, (case, of_group) in enumerate(cases)]
    return make_groups(policy, sampled)


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
def test_questions_on_one_video_are_updated_together_or_in_chunks(
    train_vision: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, by video, and with the three questions as one prefix tree and chunks behind it."""
    # Videos this short would not be worth the calls.
    monkeypatch.setattr("vlm_pg.batching.plan.TOKENS_PER_CALL", 0)
    whole = updated(train_vision, 10_000, make=questions_on_videos)
    assert whole[2]["questions_sharing"] == 3
    assert whole[2]["tokens_shared_across_questions"] >= 2 * 112  # the video has 112 visual tokens
    assert whole[2]["sharing_ratio"] == whole[2]["sharing_ratio_bound"]
    for budget, chunked in ((390, 0), (300, 3)):
        cut = updated(train_vision, budget, make=questions_on_videos)
        assert cut[2]["groups_chunked"] == chunked
        assert cut[2]["micro_batches"] > 1
        assert cut[2]["tokens_computed"] == whole[2]["tokens_computed"], "no video is computed twice"
        assert_same_update(cut, whole)


def test_bf16_weights_follow_their_fp32_copy() -> None:
    """Updates far below bf16's resolution add up in the copy instead of being rounded away."""
    policy = tiny_policy(dtype=torch.bfloat16)
    groups = make_groups(policy)
    settings = SETTINGS.model_copy(update={"learning_rate": 1e-5})
    engine = TorchEngine(policy, settings)
    masters = [master.clone() for master in engine._masters]
    for _ in range(3):
        update_policy(engine, None, Update(groups, 1e-5), UpdateSettings(AlgorithmSettings(), 10_000))
    moved = [(new - old).abs().max() for new, old in zip(engine._masters, masters, strict=True)]
    assert max(moved) > 2e-5
    for weight, master in zip(engine._weights, engine._masters, strict=True):
        assert torch.equal(weight, master.to(torch.bfloat16))


def test_a_loss_that_is_not_finite_stops_before_the_weights_change() -> None:
    policy = tiny_policy()
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    groups = make_groups(policy)
    broken = [replace(groups[0], advantages=(float("nan"),) * len(groups[0].rollouts)), *groups[1:]]
    with pytest.raises(FloatingPointError, match="the step was not taken"):
        update_policy(
            TorchEngine(policy, SETTINGS), None, Update(broken, 1e-3), UpdateSettings(AlgorithmSettings(), 10_000)
        )
    assert all(torch.equal(before[name], p) for name, p in policy.model.named_parameters())


def test_features_of_older_weights_are_refused() -> None:
    policy = tiny_policy(train_vision=True)
    prompt = make_case(policy, "video", seed=0).prompt
    groups = make_groups(policy)[:1]
    old = policy.vision.encode([prompt], with_graph=True)
    policy.weights_changed()
    with pytest.raises(ValueError, match=r"come from version \d+ of the vision tower, which is now at \d+; encode"):
        policy.logprobs([ResponseGroup(prompt, (groups[0].rollouts[0].token_ids,))], old)


def one_update(
    groups: list[RolloutGroup], policy: Policy, algorithm: AlgorithmSettings, budget: int = 10_000, **more: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float]]:
    engine = RecordingEngine(policy, SETTINGS)
    metrics = update_policy(
        engine, None, Update(groups, SETTINGS.learning_rate), UpdateSettings(algorithm, budget, **more)
    )
    return {name: p.detach() for name, p in policy.model.named_parameters()}, engine.gradients, metrics


def pruned(groups: list[RolloutGroup], weights: tuple[float, ...]) -> list[RolloutGroup]:
    """The first rollouts of every group get these weights."""
    return [replace(group, kept=weights[: len(group.rollouts)]) for group in groups]


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
def test_pruned_rollouts_are_as_if_they_had_not_been_sampled(train_vision: bool) -> None:
    algorithm = AlgorithmSettings(loss_average="sequence_mean")
    policy = tiny_policy(train_vision=train_vision)
    marked = one_update(pruned(make_groups(policy), (1.0, 0.0, 1.0)), policy, algorithm)
    policy = tiny_policy(train_vision=train_vision)
    cut = [group.only([i for i in (0, 2) if i < len(group.rollouts)]) for group in make_groups(policy)]
    expected = one_update(cut, policy, algorithm)
    assert_same_update(marked, expected)
    assert marked[2]["tokens_computed"] == expected[2]["tokens_computed"], "no forward sees them"


def test_a_group_of_which_nothing_is_kept_takes_no_part() -> None:
    policy = tiny_policy(train_vision=True)
    groups = make_groups(policy)
    gone = [replace(groups[0], kept=(0.0,) * len(groups[0].rollouts)), *groups[1:]]
    marked = one_update(gone, policy, AlgorithmSettings())
    policy = tiny_policy(train_vision=True)
    assert_same_update(marked, one_update(make_groups(policy)[1:], policy, AlgorithmSettings()))


def test_nothing_pruned_is_grpo_bit_for_bit() -> None:
    policy = tiny_policy()
    plain = one_update(make_groups(policy), policy, AlgorithmSettings())
    policy = tiny_policy()
    all_kept = one_update(pruned(make_groups(policy), (1.0,) * 9), policy, AlgorithmSettings(prune_rate=0.0))
    assert all(torch.equal(all_kept[0][name], weight) for name, weight in plain[0].items())
    assert all_kept[2] == plain[2]


def test_corrected_weights_estimate_the_whole_batch() -> None:
    """Each of two draws keeps one rollout of two with weight 2: their mean is the gradient of both."""
    algorithm = AlgorithmSettings(prune_rate=0.5, prune_correction=True, loss_average="sequence_mean")
    gradients = []
    for weights in ((2.0, 0.0), (0.0, 2.0), (1.0, 1.0)):
        policy = tiny_policy()
        groups = pruned([group.only([0, 1]) for group in make_groups(policy)], weights)
        gradients.append(one_update(groups, policy, algorithm)[1])
    for name, whole in gradients[2].items():
        mean = (gradients[0][name] + gradients[1][name]) / 2
        assert (mean - whole).norm() <= 1e-5 * whole.norm() + 1e-9, name


def uneven(group: RolloutGroup) -> RolloutGroup:
    """Ratios that differ within a response, and a negative advantage with ratios above 1, on which dual_clip acts."""
    rollouts = [
        replace(r, rollout_logprobs=r.rollout_logprobs + 0.04 * torch.arange(len(r.token_ids)).sin())
        for r in group.rollouts
    ]
    return replace(group, rollouts=tuple(rollouts), advantages=tuple(-a for a in group.advantages))


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio_level": "sequence", "clip_low": 0.01, "clip_high": 0.02},
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.02},
        {"dual_clip": 1.01, "clip_low": 0.02, "clip_high": 0.02},
        {"loss_average": "sequence_sum"},
        {"loss_average": "constant_length"},
        {"entropy_coef": 0.3},
        {"kl_estimator": "k1"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_member_of_the_family_is_cut_without_changing_the_update(settings: dict[str, Any]) -> None:
    """Whole, and as a prompt with two chunks of responses; the reference takes part."""

    def update(budget: int, without: str = "") -> Any:
        policy = tiny_policy()
        engine = RecordingEngine(policy, SETTINGS)
        chosen = {name: value for name, value in settings.items() if name != without}
        algorithm = AlgorithmSettings(kl_coef=0.05, **chosen)
        groups = [uneven(group) for group in make_groups(policy)]
        reference = reference_for(policy)
        metrics = update_policy(
            engine,
            reference,
            Update(groups, SETTINGS.learning_rate),
            UpdateSettings(algorithm, budget, max_new_tokens=9),
        )
        return engine.gradients, metrics

    (whole, metrics), (cut, cut_metrics) = update(10_000), update(102)
    assert cut_metrics["groups_chunked"] == 1
    for name in ("loss", "kl", "entropy", "ratio_mean", "ratio_min", "ratio_max", "clip_low", "clip_high"):
        assert cut_metrics[name] == pytest.approx(metrics[name], abs=1e-6), name
    for name, gradient in whole.items():
        assert (cut[name] - gradient).norm() < 1e-5 * gradient.norm(), name
    plain, _ = update(10_000, without=next(iter(settings)))
    assert any((whole[name] - plain[name]).norm() > 1e-3 * plain[name].norm() for name in plain), settings


def test_the_entropy_bonus_has_the_entropys_gradient() -> None:
    policy = tiny_policy()
    groups = [replace(group, advantages=(0.0,) * len(group.rollouts)) for group in make_groups(policy)]
    _, gradients, metrics = one_update(groups, policy, AlgorithmSettings(entropy_coef=0.5))
    assert metrics["loss"] == pytest.approx(-0.5 * metrics["entropy"], rel=1e-5)
    # Independently: transformers' logits, autograd through softmax.
    policy = tiny_policy()
    model = plain_model(policy)
    total, tokens = torch.zeros(()), 0
    for group in make_groups(policy):
        if group.prompt.pixel_values is not None:
            continue
        for rollout in group.rollouts:
            ids = torch.cat([group.prompt.input_ids, rollout.token_ids])[None]
            logits = model(input_ids=ids).logits[0, group.prompt.num_tokens - 1 : -1].double()
            total = total + torch.distributions.Categorical(logits=logits).entropy().sum()
            tokens += len(rollout.token_ids)
    policy = tiny_policy()
    text = [
        replace(group, advantages=(0.0,) * len(group.rollouts))
        for group in make_groups(policy)
        if group.prompt.pixel_values is None
    ]
    _, gradients, _ = one_update(text, policy, AlgorithmSettings(entropy_coef=0.5))
    (-0.5 * total / tokens).backward()
    for name, parameter in model.named_parameters():
        if name in gradients and parameter.grad is not None:
            assert (gradients[name] - parameter.grad).norm() < 1e-4 * parameter.grad.norm() + 1e-7, name


def test_advantages_by_token_reach_their_tokens() -> None:
    policy = tiny_policy()
    flat = make_groups(policy)
    by_token = [
        replace(g, token_advantages=tuple(torch.full((len(r.token_ids),), a) for r, a in zip(g.rollouts, g.advantages)))
        for g in flat
    ]
    same = one_update([replace(g, advantages=(0.0,) * len(g.rollouts)) for g in by_token], policy, AlgorithmSettings())
    policy = tiny_policy()
    assert_same_update(same, one_update(flat, policy, AlgorithmSettings()))


def recorded_anew(policy: Policy, groups: list[RolloutGroup], shift: float) -> list[RolloutGroup]:
    """The groups as if generation had recorded what the training forward computes, less ``shift``."""
    with torch.no_grad():
        scored = policy.logprobs([ResponseGroup(g.prompt, tuple(r.token_ids for r in g.rollouts)) for g in groups])
    return [
        replace(g, rollouts=tuple(replace(r, rollout_logprobs=v - shift) for r, v in zip(g.rollouts, of, strict=True)))
        for g, of in zip(groups, scored, strict=True)
    ]


@pytest.mark.parametrize(
    "train_vision, logprobs", [(False, "reuse"), (True, "recompute")], ids=["frozen tower", "training tower, recompute"]
)
def test_several_updates_are_updates_one_after_the_other(train_vision: bool, logprobs: str) -> None:
    """Two passes of two mini-batches: the same weights as four updates by hand, all measured from the first weights."""
    config = tiny_config(
        {"num_iterations": 2, "minibatches": 2, "clip_low": 0.01, "clip_high": 0.01}, rollout={"logprobs": logprobs}
    )
    policy = tiny_policy(train_vision=train_vision)
    groups = make_groups(policy)
    if logprobs == "recompute":  # what was recorded is not looked at
        groups = [
            replace(g, rollouts=tuple(replace(r, rollout_logprobs=r.rollout_logprobs - 3) for r in g.rollouts))
            for g in groups
        ]
    metrics = run_updates(RecordingEngine(policy, SETTINGS), None, Update(groups, SETTINGS.learning_rate), config)
    assert metrics["updates"] == 4.0 and policy.weights_version == 4
    got = {name: p.detach() for name, p in policy.model.named_parameters()}

    policy = tiny_policy(train_vision=train_vision)
    groups = make_groups(policy)
    if logprobs == "recompute":
        groups = recorded_anew(policy, groups, 0.0)
    engine = RecordingEngine(policy, SETTINGS)
    clipped = 0.0
    for part in (groups[:2], groups[2:]) * 2:
        values = update_policy(
            engine, None, Update(part, SETTINGS.learning_rate), UpdateSettings(config.algorithm, 10_000)
        )
        clipped += values["clip_low"] + values["clip_high"]
    assert metrics["clip_low"] + metrics["clip_high"] == pytest.approx(clipped / 4, abs=1e-6)
    for name, parameter in policy.model.named_parameters():
        assert (got[name] - parameter).abs().max() < 1e-6, name


@pytest.mark.parametrize("budget", [10_000, 110], ids=["one pass", "several passes"])
@pytest.mark.parametrize(
    "level, mode, floor",
    [
        ("token", "truncate", None),
        ("token", "mask", None),
        ("sequence", "truncate", 0.7),
        ("sequence", "mask", 0.7),
        ("geometric", "reject", 0.7),
    ],
)
def test_importance_weights_scale_the_terms_of_their_responses(
    level: str, mode: str, floor: float | None, budget: int
) -> None:
    """The same update as with advantages times the factors: what is masked still counts in the denominator."""
    cap, shifts = 1.5, (0.1, 0.5, -0.5)
    policy = tiny_policy()
    groups = [
        replace(
            g, rollouts=tuple(replace(r, rollout_logprobs=r.rollout_logprobs - s) for r, s in zip(g.rollouts, shifts))
        )
        for g in recorded_anew(policy, make_groups(policy), 0.0)
    ]
    counts, ratios, factors, scaled = [], [], [], []
    for group in groups:
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        of_group = [math.exp(s * (n if level == "sequence" else 1)) for n, s in zip(lengths, shifts)]
        if mode == "truncate":
            kept = [min(max(r, floor or 0.0), cap) for r in of_group]
        else:
            kept = [(r if mode == "mask" else 1.0) if (floor or 0.0) <= r <= cap else 0.0 for r in of_group]
        scaled.append(replace(group, advantages=tuple(a * f for a, f in zip(group.advantages, kept, strict=True))))
        counts, ratios, factors = counts + lengths, ratios + of_group, factors + kept
    algorithm = AlgorithmSettings(
        importance_cap=cap, importance_level=level, importance_mode=mode, importance_floor=floor
    )
    got = one_update(groups, policy, algorithm, budget, logprobs="recompute")
    plain = one_update(scaled, tiny_policy(), AlgorithmSettings(), logprobs="recompute")
    assert got[2]["loss"] == pytest.approx(plain[2]["loss"], rel=1e-4)
    for name, gradient in plain[1].items():
        assert (got[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name

    def mean(values: list[float]) -> float:
        return sum(n * value for n, value in zip(counts, values, strict=True)) / sum(counts)

    expected = {
        "importance_mean": mean(factors),
        "importance_ess": mean(factors) ** 2 / mean([f**2 for f in factors]),
        "importance_low": mean([float(r < (floor or 0.0)) for r in ratios]),
        "importance_high": mean([float(r > cap) for r in ratios]),
        "importance_min": min(ratios),
        "importance_max": max(ratios),
    }
    found = {name: value for name, value in got[2].items() if name.startswith("importance_")}
    assert found == pytest.approx(expected, rel=1e-4)
