"""One optimizer step: how a batch is cut, and over how many processes, cannot change the updated weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.groups import make_case, tiny_policy
from tests.support.training import RecordingEngine, make_groups, random_rollouts
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.batching.plan import MicroBatch
from vlm_pg.models.micro_batches import Slot
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.training.engines import TorchEngine
from vlm_pg.training.parallel import Parallel
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import Update, UpdateSettings, update_policy
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
def test_checkpointing_does_not_change_the_update_of_chunked_groups(train_vision: bool) -> None:
    cut = updated(train_vision, 102, gradient_checkpointing=True)
    assert cut[2]["groups_chunked"] == 1
    assert_same_update(cut, updated(train_vision, 10_000))


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
def test_passes_for_other_ranks_are_worth_nothing(train_vision: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another rank had two chunks more, a chunked micro-batch more and a single pass more."""

    class WithAnother(Parallel):
        def slots(self, micro_batches: Sequence[MicroBatch]) -> list[Slot]:
            own = super().slots(micro_batches)
            assert own[0].chunks == 2
            return [replace(own[0], chunks=4), Slot(None, 3), *own[1:], Slot(None, 1)]

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


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
def test_tower_once_per_group_and_version_prefix_once_in_training(train_vision: bool) -> None:
    """Counting what goes through tower and language model over two steps of generation and training."""
    policy = tiny_policy(train_vision=train_vision)
    prompts = [make_case(policy, "video", seed=i).prompt for i in range(3)]
    tower_patches: list[int] = []
    stream_tokens: list[int] = []
    policy.model.model.visual.register_forward_hook(lambda m, args, out: tower_patches.append(args[0].shape[0]))
    policy.language_model.layers[0].mlp.register_forward_hook(
        lambda m, args, out: stream_tokens.append(args[0].shape[-2])
    )
    engine = TorchEngine(policy, SETTINGS)
    rollouts = RolloutEngine(policy, RolloutSettings(num_generations=4, max_new_tokens=6), seed=0)
    patches_per_pass = sum(p.pixel_values.shape[0] for p in prompts)
    prefix_tokens = sum(p.num_tokens for p in prompts)
    for step in (1, 2):
        stream_tokens.clear()
        policy.vision.encode(prompts, with_graph=train_vision, keep_graph=True)
        sampled = rollouts.generate(prompts, step)
        assert stream_tokens[0] == prefix_tokens, "one prefill per group"
        groups = make_groups(policy, list(zip(prompts, sampled, strict=True)))
        stream_tokens.clear()
        update_policy(engine, None, Update(groups, 1e-3), UpdateSettings(AlgorithmSettings(), 10_000))
        response_tokens = sum(len(r.token_ids) - 1 for rollouts_ in sampled for r in rollouts_)
        assert stream_tokens == [prefix_tokens + response_tokens], "each prefix once in training"
        expected_passes = step if train_vision else 1
        assert sum(tower_patches) == expected_passes * patches_per_pass


def test_features_of_older_weights_are_refused() -> None:
    policy = tiny_policy(train_vision=True)
    prompt = make_case(policy, "video", seed=0).prompt
    groups = make_groups(policy)[:1]
    old = policy.vision.encode([prompt], with_graph=True)
    policy.weights_changed()
    with pytest.raises(ValueError, match=r"come from version \d+ of the vision tower, which is now at \d+; encode"):
        policy.logprobs([ResponseGroup(prompt, (groups[0].rollouts[0].token_ids,))], old)
