"""A step's batch: its questions, and which of their rollouts train."""

from __future__ import annotations

import pytest
import torch

from tests.support.collecting import made_up_collector, tiny_config
from tests.support.groups import tiny_policy
from vlm_pg.algorithms.advantages import batch_advantages
from vlm_pg.models.policy import Policy
from vlm_pg.rewards.parts import Response
from vlm_pg.training.collect import FULL_ENOUGH
from vlm_pg.training.groups import all_tokens, group_metrics, kept_tokens
from vlm_pg.training.updates import Update, run_updates
from vlm_pg.types import ResponseGroup, RolloutGroup


def number(response: Response) -> int:
    return int(response.sample.sample_id.split("-")[-1])


def by_index(response: Response, index: int) -> float:
    return float(index)


def test_an_ordinary_step_takes_its_questions_in_order_and_keeps_everything() -> None:
    collector = made_up_collector(tiny_policy(), tiny_config(), by_index)
    first, second = collector.collect(1, 0), collector.collect(2, 0)
    assert [g.sample.sample_id for g in first.groups] == ["text-0", "text-1", "text-2", "text-3"]
    assert [g.sample.sample_id for g in second.groups] == ["text-4", "text-5", "text-6", "text-7"]
    assert first.sampled == [g.without_features() for g in first.groups] and first.values["questions"] == 4.0
    expected = batch_advantages([[0.0, 1.0, 2.0, 3.0]], "group_mean", "std")[0]
    assert all(list(group.advantages) == expected and not group.kept for group in first.groups)


def test_groups_without_spread_are_replaced_by_further_questions() -> None:
    """Of 12 questions every third has spread: 4, of which 2 are flat, 2 more, and so on."""

    def reward(response: Response, index: int) -> float:
        return float(index) if number(response) % 3 == 0 else 1.0

    collector = made_up_collector(tiny_policy(), tiny_config({"resample_rounds": 10}), reward)
    batch = collector.collect(1, 0)
    assert [number_of(g) for g in batch.groups] == [0, 3, 6, 9]
    # 0 to 3 hold two; 4 and 5 none; 6 and 7 one; 8 none; 9 the last one
    assert batch.values.items() >= {"resampled_groups": 6.0, "unfilled_groups": 0.0, "questions": 10.0}.items()
    assert sorted(number_of(g) for g in batch.sampled) == list(range(10))
    assert [number_of(g) for g in collector.collect(2, 0).groups] == [12, 15, 18, 21]
    metrics = group_metrics(batch.sampled, batch.groups)
    assert metrics["groups_without_spread"] == pytest.approx(0.6)


def test_resampling_ends_after_its_rounds_and_says_what_is_missing() -> None:
    collector = made_up_collector(tiny_policy(), tiny_config({"resample_rounds": 2}), lambda response, index: 1.0)
    batch = collector.collect(1, 0)
    assert batch.groups == [] and len(batch.sampled) == 12
    assert batch.values["resampled_groups"] == 8.0 and batch.values["unfilled_groups"] == 4.0


def number_of(group: RolloutGroup) -> int:
    return int(group.sample.sample_id.split("-")[-1])


def test_pruning_keeps_the_largest_advantages_of_each_question() -> None:
    config = tiny_config({"prune_rate": 0.5, "prune_fill": False})
    batch = made_up_collector(tiny_policy(), config, by_index).collect(1, 0)
    assert [group.kept for group in batch.groups] == [(1.0, 0.0, 0.0, 1.0)] * 4
    metrics = group_metrics(batch.sampled, batch.groups)
    assert metrics["pruned_share"] == 0.5
    assert metrics["kept_tokens"] == sum(kept_tokens(group) for group in batch.groups)


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.75])
def test_freed_tokens_go_to_further_questions(rate: float) -> None:
    config = tiny_config(
        {"prune_rate": rate}, rollout={"num_generations": 8, "max_new_tokens": 24}, training={"prompts_per_step": 8}
    )
    collector = made_up_collector(tiny_policy(), config, by_index, num_samples=400)
    batch = collector.collect(1, 0)
    questions = [number_of(group) for group in batch.sampled]
    assert len(set(questions)) == len(questions) > 8, "no question twice"
    budget = sum(all_tokens(group) for group in batch.sampled[:8])
    used = sum(kept_tokens(group) for group in batch.groups)
    assert batch.values["token_budget"] == budget and batch.values["kept_tokens"] == used
    largest = max(kept_tokens(group) for group in batch.groups)
    assert abs(used - budget) <= max(largest / 2, FULL_ENOUGH * budget)
    count = round(8 * (1 - rate))
    assert all(sum(weight > 0 for weight in group.kept) == count for group in batch.groups)
    assert batch.values["filled_groups"] == len(batch.groups) - 8
    again = made_up_collector(tiny_policy(), config, by_index, num_samples=400).collect(1, 0)
    assert [number_of(group) for group in again.groups] == [number_of(group) for group in batch.groups]


def test_filling_ends_where_questions_do() -> None:
    collector = made_up_collector(tiny_policy(), tiny_config({"prune_rate": 0.75}), by_index, num_samples=5)
    batch = collector.collect(1, 0)
    assert sorted(number_of(group) for group in batch.groups) == [0, 1, 2, 3, 4]


def test_a_correction_counts_groups_of_which_nothing_was_drawn() -> None:
    """Flat groups have no advantage, so nothing of them is drawn; the loss averages over them all the same."""

    def reward(response: Response, index: int) -> float:
        return float(index) if number(response) % 2 else 1.0

    for fill in (False, True):
        config = tiny_config({"prune_rate": 0.5, "prune_fill": fill, "prune_correction": True})
        batch = made_up_collector(tiny_policy(), config, reward).collect(1, 0)
        flat = [group for group in batch.groups if number_of(group) % 2 == 0]
        assert flat and all(not any(group.kept) for group in flat)
        if not fill:
            assert len(batch.groups) == 4
            metrics = group_metrics(batch.sampled, batch.groups)
            assert metrics["pruned_share"] == pytest.approx(
                sum(weight == 0 for group in batch.groups for weight in group.kept) / 16
            )
        # What was drawn trains, also where its log-probabilities are scored before several updates.
        updates = tiny_config({"num_iterations": 2, "prune_rate": 0.5, "prune_correction": True, "prune_fill": fill})
        config = updates.model_copy(update={"rollout": updates.rollout.model_copy(update={"logprobs": "recompute"})})
        policy = tiny_policy()
        collector = made_up_collector(policy, config, reward)
        batch = collector.collect(1, 0)
        values = run_updates(collector.engine, None, Update(batch.groups, 1e-4), config)
        assert values["updates"] == 2.0 and values["grad_norm"] > 0


def test_filling_is_bounded_where_pruning_leaves_next_to_nothing() -> None:
    """One question of 16 has spread, and the correction draws from no other: the others cost 0."""
    config = tiny_config({"prune_rate": 0.5, "prune_correction": True}, training={"prompts_per_step": 16})
    collector = made_up_collector(
        tiny_policy(), config, lambda response, index: float(index) if number(response) == 3 else 1.0, num_samples=400
    )
    assert len(collector.collect(1, 0).sampled) == 64  # 16 questions, G / k = 2, at most twice that


def test_spread_is_that_of_the_task_whatever_the_kl_adds() -> None:
    algorithm = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1", "scale_advantages": "none"}
    collector = made_up_collector(
        tiny_policy(), tiny_config(algorithm), lambda response, index: 1.0, reference=slightly_different()
    )
    batch = collector.collect(1, 0)
    assert len({reward.total for reward in batch.groups[0].rewards}) > 1
    assert group_metrics(batch.sampled, batch.groups)["groups_without_spread"] == 1.0


def test_pruning_ranks_by_the_advantages_that_train() -> None:
    """Whitened by token after the KL: a reward of 0 is as far from the mean as one of 1."""
    algorithm = {
        "baseline": "none",
        "scale_advantages": "whiten",
        "kl_coef": 0.1,
        "kl_in": "token_reward",
        "prune_rate": 0.5,
        "prune_fill": False,
    }
    collector = made_up_collector(
        tiny_policy(), tiny_config(algorithm), lambda response, index: float(index < 3), reference=slightly_different()
    )
    for group in collector.collect(1, 0).groups:
        sizes = [float(values.abs().mean()) for values in group.token_advantages]
        largest = sorted(range(4), key=lambda i: -sizes[i])[:2]
        assert [weight > 0 for weight in group.kept] == [i in largest for i in range(4)]
        assert group.kept[3] == 1.0, "the only wrong one trains most"


def test_parts_are_normalised_one_by_one_and_a_rank_may_have_no_group() -> None:
    config = tiny_config({"normalise_parts": True, "resample_rounds": 1})
    collector = made_up_collector(tiny_policy(), config, lambda response, index: 1.0)
    assert collector.collect(1, 0).groups == []
    config = tiny_config({"normalise_parts": True})
    batch = made_up_collector(tiny_policy(), config, by_index).collect(1, 0)
    assert list(batch.groups[0].advantages) == batch_advantages([[0.0, 1.0, 2.0, 3.0]], "group_mean", "std")[0]


def test_every_question_is_found_where_two_orders_overlap() -> None:
    config = tiny_config(data={"shuffle": True}, training={"prompts_per_step": 3})
    collector = made_up_collector(tiny_policy(), config, by_index, num_samples=10)
    collector.stages.stream.take(3)
    assert len(collector.stages.stream.take(10)) == 10
    assert collector.stages.stream.take(10, without={f"text-{i}" for i in range(10)}) == []


def test_what_was_cut_off_is_in_the_statistics_and_does_not_train() -> None:
    config = tiny_config({"mask_truncated": True}, rollout={"num_generations": 16, "max_new_tokens": 6})
    policy = tiny_policy()
    with torch.no_grad():  # some responses end early
        policy.model.lm_head.weight[policy.model.generation_config.eos_token_id] *= 6
    batch = made_up_collector(policy, config, by_index).collect(1, 0)
    cut_off = [r.finish_reason == "length" for group in batch.sampled for r in group.rollouts]
    assert any(cut_off) and not all(cut_off)
    trained = [r for group in batch.groups for r in group.rollouts]
    assert len(trained) == cut_off.count(False) and all(r.finish_reason == "stop" for r in trained)
    for group in batch.groups:
        whole = next(g for g in batch.sampled if g.sample is group.sample)
        complete = [a for a, r in zip(whole.advantages, whole.rollouts, strict=True) if r.finish_reason != "length"]
        assert list(group.advantages) == complete, "the advantages of the whole group"


def test_the_temporal_bonus_compares_with_shuffled_frames_of_videos_only() -> None:
    """Video 1 is answered better in order, video 3 only out of order; images and texts have no control."""

    def reward(response: Response, index: int) -> float:
        control = response.num_tokens is not None and counts[response.sample.sample_id] > 4
        counts[response.sample.sample_id] += 1
        if number(response) == 3:
            return 1.0 if control or index == 0 else 0.0
        return float(index % 2)

    kinds = ("text", "video", "image", "video")
    counts = {f"{kind}-{i}": 1 for i, kind in enumerate(kinds * 10)}
    config = tiny_config({"temporal_bonus": 0.3, "temporal_ratio": 0.8})
    collector = made_up_collector(tiny_policy(), config, reward, kinds=kinds)
    batch = collector.collect(1, 0)
    assert [len(group.rollouts) for group in batch.sampled] == [4] * 4, "controls are not trained on"
    assert collector.stages.stream._source.tampered == ["video-1", "video-3"]
    bonus = {group.sample.sample_id: [r.parts["temporal"] for r in group.rewards] for group in batch.groups}
    assert bonus["video-1"] == [0.0, 0.3, 0.0, 0.3]
    assert bonus["video-3"] == bonus["text-0"] == bonus["image-2"] == [0.0] * 4
    video = next(group for group in batch.groups if group.sample.sample_id == "video-1")
    assert [reward.total for reward in video.rewards] == [0.0, 1.3, 0.0, 1.3]
    assert batch.values["temporal/bonus_share"] == 0.5
    assert batch.values["temporal/accuracy_control"] == 0.75  # 0, 1 of video 1 and 1, 1 of video 3


def slightly_different() -> Policy:
    reference = tiny_policy()
    with torch.no_grad():
        for parameter in reference.model.model.language_model.parameters():
            parameter.mul_(1.05)
    return reference.requires_grad_(False)


@pytest.mark.parametrize("where", ["reward", "token_reward"])
def test_a_kl_in_the_reward_is_that_of_the_reference_by_token(where: str) -> None:
    policy = tiny_policy()
    reference = slightly_different()
    algorithm = {"kl_coef": 0.5, "kl_in": where, "kl_estimator": "k1", "scale_advantages": "none"}
    batch = made_up_collector(policy, tiny_config(algorithm), by_index, reference=reference).collect(1, 0)
    plain = made_up_collector(tiny_policy(), tiny_config({"scale_advantages": "none"}), by_index).collect(1, 0)
    total, tokens = 0.0, 0
    for group, without in zip(batch.groups, plain.groups, strict=True):
        with torch.no_grad():
            (ref,) = reference.logprobs([_responses(group)])
        kl = [r.rollout_logprobs - values for r, values in zip(group.rollouts, ref, strict=True)]
        total, tokens = total + sum(float(v.sum()) for v in kl), tokens + sum(map(len, kl))
        if where == "reward":
            rewards = [float(i) - 0.5 * float(values.sum()) for i, values in enumerate(kl)]
            assert group.advantages == pytest.approx(batch_advantages([rewards], "group_mean", "none")[0], abs=1e-5)
        else:
            assert group.advantages == without.advantages
            for advantage, values, found in zip(group.advantages, kl, group.token_advantages, strict=True):
                by_hand = [advantage - 0.5 * float(values[t:].sum()) for t in range(len(values))]
                assert found.tolist() == pytest.approx(by_hand, abs=1e-5)
    assert batch.values["kl"] == pytest.approx(total / tokens, abs=1e-6)


def _responses(group: RolloutGroup) -> ResponseGroup:
    return ResponseGroup(group.prompt, tuple(r.token_ids for r in group.rollouts))


def test_whitened_token_advantages_have_mean_zero_and_deviation_one() -> None:
    policy = tiny_policy()
    config = tiny_config({"preset": "reinforce_pp", "kl_coef": 0.3})
    batch = made_up_collector(policy, config, by_index, reference=slightly_different()).collect(1, 0)
    values = torch.cat([advantages for group in batch.groups for advantages in group.token_advantages]).double()
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(values.std()) == pytest.approx(1.0, abs=1e-4)
