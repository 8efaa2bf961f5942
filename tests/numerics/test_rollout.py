"""Shared-prefix generation equals transformers' `generate`, and its log-probabilities are the policy's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.groups import KINDS, Case, make_case, plain_model, positions_4P, tiny_policy
from tests.support.tiny import FAMILY_NAMES, VL_FAMILY_NAMES
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.admission import TokenCosts
from vlm_pg.rollout.decoding import Cohort, DecodeContext
from vlm_pg.rollout.engine import RolloutEngine, stop_token_ids
from vlm_pg.rollout.prefill import Prefill
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt, ResponseGroup, Rollout

VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}


def engine(policy: Policy, **settings: object) -> RolloutEngine:
    return RolloutEngine(policy, RolloutSettings(**{"max_new_tokens": 24, **settings}), seed=7)


def mixed_case(policy: Policy, number: int) -> Case:
    """Kinds, sizes and frame rates in turn."""
    seconds = (0.5, 2.0, 0.25, 30.0)[number % 4]
    return make_case(policy, KINDS[number % len(KINDS)], 100 + number, seconds)


def ragged_stops(policy: Policy) -> list[int]:
    """Every seventh token ends a response from now on, so that rollouts of one batch finish at different lengths."""
    policy.model.generation_config.eos_token_id = list(range(0, policy.vocab_size, 7))
    return list(stop_token_ids(policy))


def generated(policy: Policy, oracle: Any, case: Case, stops: Sequence[int]) -> list[int]:
    """transformers' greedy response, at the policy's positions; at its own where the policy counts as it does."""
    inputs = {k: v for k, v in case.inputs.items() if k != "video_metadata"}
    if policy.settings.positions != "transformers" and policy.family.reads_media:
        inputs["position_ids"] = positions_4P(case.prompt)
    response = oracle.generate(
        **inputs,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=list(stops),
        suppress_tokens=list(policy.media_token_ids) or None,
    )
    return response[0, inputs["input_ids"].shape[1] :].tolist()


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """A list that grows by one with every call of the method."""
    calls: list[None] = []
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


# Prompts of text alone differ less, and so do the lengths of what follows them.
@pytest.mark.parametrize(
    "family, count",
    [
        *((family, 16) for family in VL_FAMILY_NAMES),
        *((family, 40) for family in ("qwen2", "qwen3_5_text")),
        *(pytest.param(family, 100, marks=pytest.mark.matrix) for family in FAMILY_NAMES),
    ],
)
def test_greedy_equals_generate_on_mixed_prompts(family: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family=family)
    stops = ragged_stops(policy)
    oracle = plain_model(policy)
    cases = [mixed_case(policy, i) for i in range(count)]
    evicted = count_calls(monkeypatch, Cohort, "evict_finished")
    sampler = engine(policy, num_generations=2, temperature=0.0, max_batch_rollouts=max(6, count // 5))
    ours = sampler.generate([case.prompt for case in cases], step=0)
    lengths = set()
    for case, rollouts in zip(cases, ours, strict=True):
        expected = generated(policy, oracle, case, stops)
        for rollout in rollouts:
            assert rollout.token_ids.tolist() == expected
            assert (rollout.finish_reason == "stop") == (expected[-1] in stops)
        lengths.add(len(expected))
    assert len(lengths) > (4 if policy.family.reads_media else 3), (
        "the prompts should have finished at different lengths"
    )
    assert len(evicted) > 2, "finished rollouts should have left the batch before the others were done"
    assert sampler.stats.cohorts > count // 10, "waiting prompts should have entered as others left"


@pytest.mark.parametrize("family", VL_FAMILY_NAMES)
def test_transformers_positions_are_those_of_generate(family: str) -> None:
    """Prompt and response, with videos whose seconds reach beyond their space (positions or words say the time)."""
    policy = tiny_policy(family=family, positions="transformers")
    oracle = plain_model(policy)
    seen: list[torch.Tensor] = []
    oracle.model.language_model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    for seed, kind in enumerate(KINDS):
        case = make_case(policy, kind, seed, seconds_per_frame=30.0)
        seen.clear()
        response = generated(policy, oracle, case, stop_token_ids(policy))
        prefill, *steps = (positions[-3:, 0] for positions in seen)
        assert torch.equal(prefill, case.prompt.positions_3P)
        assert len(steps) == len(response) - 1 > 2
        for index, positions in enumerate(steps):
            assert positions.flatten().tolist() == [case.prompt.next_position + index] * 3


@pytest.mark.parametrize("family, temperature", [*((family, 0.7) for family in FAMILY_NAMES), ("qwen2_5_vl", 1.0)])
def test_what_is_recorded_of_a_rollout_is_the_policys(family: str, temperature: float) -> None:
    """Log-probabilities and entropies of the policy; sampling's own are higher behind a filter."""
    policy = tiny_policy(family=family)
    ragged_stops(policy)
    prompts = [make_case(policy, kind, seed=i).prompt for i, kind in enumerate(KINDS)]
    sampled = engine(policy, num_generations=3, temperature=temperature, top_p=0.9, top_k=50).generate(prompts, step=3)
    rollouts = [rollout for group in sampled for rollout in group]
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 3
    groups = [ResponseGroup(p, tuple(r.token_ids for r in rs)) for p, rs in zip(prompts, sampled, strict=True)]
    features = policy.join_features(groups, policy.vision.encode(prompts)) if policy.family.reads_media else None
    with torch.no_grad():
        logprobs, entropies = policy(Policy.stream_logprobs, policy.pack(groups), features, temperature)
    assert (torch.cat([rollout.rollout_logprobs for rollout in rollouts]) - logprobs).abs().max() < 1e-4
    assert (torch.cat([rollout.entropies for rollout in rollouts]) - entropies).abs().max() < 1e-4
    for rollout in rollouts:
        assert bool((rollout.sampling_logprobs > rollout.rollout_logprobs).all())


def assert_same(ours: Sequence[Sequence[Rollout]], others: Sequence[Sequence[Rollout]]) -> None:
    for a, b in zip(ours, others, strict=True):
        for one, other in zip(a, b, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
            assert (one.rollout_logprobs - other.rollout_logprobs).abs().max() < 1e-4


def questions(policy: Policy) -> list[Prompt]:
    """All kinds, two more questions on one of two videos, and one question twice, in mixed order."""
    cases = [make_case(policy, kind, seed=i) for i, kind in enumerate(KINDS)]
    cases += [make_case(policy, seed=seed, **VIDEO) for seed in (20, 21)]
    cases.insert(1, make_case(policy, seed=22, **VIDEO))
    prompts = [case.prompt for case in cases]
    return [*prompts, replace(prompts[1], sample_id="again")]


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2"),
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe")),
    ],
)
def test_how_prompts_are_cut_admitted_and_shared_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family=family)
    ragged_stops(policy)
    prompts = questions(policy)
    alone = [engine(policy, num_generations=3).generate([prompt], step=4)[0] for prompt in prompts]
    together = engine(policy, num_generations=3)
    assert_same(together.generate(prompts, step=4), alone)
    assert together.stats.cohorts == 1
    assert together.stats.prefill_tokens < together.stats.prompt_tokens
    in_passes = engine(policy, num_generations=3, prefill_tokens=64)
    passes = count_calls(monkeypatch, Prefill, "_run")
    assert_same(in_passes.generate(prompts, step=4), alone)
    assert len(passes) > 5
    few_at_a_time = engine(policy, num_generations=3, max_batch_rollouts=7)
    assert_same(few_at_a_time.generate(prompts, step=4), alone)
    assert few_at_a_time.stats.cohorts > 3
    assert few_at_a_time.stats.prefill_tokens == together.stats.prefill_tokens, "what is shared should stay"
    (other_step,) = engine(policy, num_generations=3).generate(prompts[:1], step=5)
    ids = [[rollout.token_ids.tolist() for rollout in group] for group in (alone[0], other_step)]
    assert ids[0] != ids[1] and ids[0][0] != ids[0][1], "random numbers depend on step and rollout"


def test_memory_is_held_to_its_budget() -> None:
    policy = tiny_policy()
    ragged_stops(policy)
    prompts = questions(policy)
    free = engine(policy, num_generations=3)
    expected = free.generate(prompts, step=4)
    largest = max(prompt.num_tokens for prompt in prompts)
    costs = TokenCosts.of(policy)
    budget = (largest + 7 * 64) * costs.per_token
    assert free.stats.peak_bytes > budget
    tight = engine(policy, num_generations=3, memory_gb=budget / GIB)
    assert_same(tight.generate(prompts, step=4), expected)
    assert budget / 2 < tight.stats.peak_bytes <= budget
    assert tight.stats.cohorts > 2
    too_small = engine(policy, num_generations=3, memory_gb=(largest + 2 * 64) * costs.per_token / GIB)
    with pytest.raises(ConfigError, match=r"One group needs .* Raise rollout.memory_gb to at least"):
        too_small.generate(prompts, step=4)


def test_memory_of_the_prompt_does_not_grow_with_the_number_of_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    prompt = make_case(policy, seed=0, **VIDEO).prompt
    stored: list[set[int]] = []
    original = DecodeContext.attend

    def attend(self: Any, layer_index: int, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        stored[-1].add(self._store.keys[layer_index].untyped_storage().nbytes())
        return original(self, layer_index, q, *rest)

    monkeypatch.setattr(DecodeContext, "attend", attend)
    for count in (1, 32):
        stored.append(set())
        engine(policy, num_generations=count, max_new_tokens=3).generate([prompt], step=0)
    assert stored[0] == stored[1] and len(stored[0]) == 1


def test_stop_strings_end_a_response_and_are_cut_from_its_text() -> None:
    policy = tiny_policy()
    prompt = make_case(policy, "image", seed=1).prompt
    settings = {"num_generations": 4, "max_new_tokens": 40}
    free = engine(policy, **settings).generate([prompt], step=0)[0]
    string = free[0].text[3:5]
    stopped = engine(policy, stop_strings=(string,), **settings).generate([prompt], step=0)[0]
    ends = set()
    for one, other in zip(stopped, free, strict=True):
        assert other.token_ids[: len(one.token_ids)].tolist() == one.token_ids.tolist()
        assert string not in one.text and other.text.startswith(one.text)
        ends.add(len(one.token_ids) < len(other.token_ids))
        assert one.finish_reason == "stop" or string not in other.text
    assert True in ends


def test_a_response_has_its_fewest_tokens_before_it_may_stop() -> None:
    policy = tiny_policy()
    ragged_stops(policy)
    prompt = make_case(policy, "image", seed=1).prompt
    settings = {"num_generations": 16, "max_new_tokens": 20}
    lengths = [len(r.token_ids) for r in engine(policy, **settings).generate([prompt], step=0)[0]]
    assert min(lengths) < 6
    longer = engine(policy, min_new_tokens=6, **settings).generate([prompt], step=0)[0]
    assert min(len(rollout.token_ids) for rollout in longer) == 7, "the stop token comes after the fewest tokens"
    free = engine(policy, num_generations=1, max_new_tokens=20, temperature=0.0)
    free.stop_token_ids = ()
    text = free.generate([prompt], step=0)[0][0].text
    string = next(a for a in text if text.count(a) > 1 and text.index(a) < 4)
    settings = {"num_generations": 1, "max_new_tokens": 20, "min_new_tokens": 6, "stop_strings": (string,)}
    late = engine(policy, temperature=0.0, **settings)
    late.stop_token_ids = ()
    rollout = late.generate([prompt], step=0)[0][0]
    assert len(rollout.token_ids) >= 6 and string in rollout.text, "an early one stays in the text"


def test_more_stop_tokens_can_be_named() -> None:
    policy = tiny_policy()
    prompt = make_case(policy, "image", seed=1).prompt
    free = engine(policy, num_generations=2).generate([prompt], step=0)[0]
    named = int(free[0].token_ids[4])
    stopped = engine(policy, num_generations=2, stop_token_ids=(named,)).generate([prompt], step=0)[0]
    expected = free[0].token_ids.tolist()
    assert stopped[0].token_ids.tolist() == expected[: expected.index(named) + 1]
    assert stopped[0].finish_reason == "stop"


def test_media_tokens_are_never_sampled() -> None:
    policy = tiny_policy()
    with torch.no_grad():  # make media tokens by far the most probable ones
        embedding = policy.model.get_input_embeddings().weight
        embedding[list(policy.media_token_ids)] = 50 * embedding.mean(0)
    prompt = make_case(policy, "text", seed=0).prompt
    for rollout in engine(policy, num_generations=8).generate([prompt], step=0)[0]:
        assert not set(rollout.token_ids.tolist()) & set(policy.media_token_ids)


@pytest.mark.parametrize("family", VL_FAMILY_NAMES)
def test_one_pass_of_the_tower_and_of_the_prefix_per_group(family: str) -> None:
    policy = tiny_policy(family=family)
    prompts = [make_case(policy, "video", seed=i).prompt for i in range(3)]
    tower_patches: list[int] = []
    policy.model.model.visual.register_forward_hook(lambda m, args, out: tower_patches.append(args[0].shape[0]))
    rows: dict[int, list[int]] = {}
    for layer in policy.language_model.layers:
        layer.register_forward_hook(lambda m, args, out: rows.setdefault(id(m), []).append(args[0].shape[1]))
    engine(policy, num_generations=4, max_new_tokens=5).generate(prompts, step=0)
    assert sum(tower_patches) == sum(p.pixel_values.shape[0] for p in prompts if p.pixel_values is not None)
    *layers, last = rows.values()
    for prefill, *steps in layers:
        assert prefill == sum(p.num_tokens for p in prompts)
        assert steps == last[1:] and 0 < len(steps) < 5 and max(steps) <= 12
    assert last[0] == len(prompts), "of the last layer only each prefix's last row is read"
    engine(policy, num_generations=4, max_new_tokens=5).generate(prompts, step=1)
    assert len(tower_patches) == 3, "a frozen tower's output is cached"


def test_a_video_is_encoded_once_for_questions_that_come_one_after_the_other() -> None:
    """Features are not cached: the question behind a stored video must not need them."""
    policy = tiny_policy(vision_cache_mb=0)
    prompts = [make_case(policy, seed=seed, **VIDEO).prompt for seed in range(3)]
    runs: list[None] = []
    policy.model.model.visual.register_forward_hook(lambda *_: runs.append(None))
    one_by_one = engine(policy, num_generations=2, max_batch_rollouts=2)
    one_by_one.generate(prompts, step=0)
    assert one_by_one.stats.cohorts == 3 and len(runs) == 1


def test_a_stop_request_is_honoured_between_tokens() -> None:
    policy = tiny_policy()
    prompt = make_case(policy, "text", seed=0).prompt
    polls = iter([False] * (len(policy.language_model.layers) + 3) + [True])
    stopping = RolloutEngine(policy, RolloutSettings(max_new_tokens=50), seed=0, should_stop=lambda: next(polls))
    with pytest.raises(InterruptedError):
        stopping.generate([prompt], step=0)


def test_in_lockstep_no_rank_stops_within_a_module() -> None:
    """A layer's weights are gathered on all ranks: one that left before it would let the others wait for ever."""

    class Recorded:
        inside = False

        def run(self, part: str, work: Callable[[], Any]) -> Any:
            self.inside = True
            try:
                return work()
            finally:
                self.inside = False

    policy = tiny_policy()
    prompts = [make_case(policy, "image", seed=seed).prompt for seed in range(8)]
    policy.lockstep = turns = Recorded()  # type: ignore[assignment]
    polls: list[bool] = []
    settings = RolloutSettings(max_new_tokens=3, prefill_tokens=64)
    stopping = RolloutEngine(policy, settings, seed=0, should_stop=lambda: bool(polls.append(turns.inside)))  # type: ignore[func-returns-value]
    stopping.generate(prompts, step=0)
    passes = -(-sum(prompt.num_tokens for prompt in prompts) // 64)
    assert passes > 2 and len(polls) >= passes + 3 and not any(polls)
