"""Shared-prefix generation equals transformers' `generate`, and its log-probabilities are the policy's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.groups import KINDS, Case, make_case, plain_model, tiny_policy
from tests.support.tiny import FAMILY_NAMES
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.decode import DecodeContext
from vlm_pg.rollout.engine import RolloutEngine, stop_token_ids
from vlm_pg.rollout.kv import PrefillContext
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import ResponseGroup


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
    """transformers' greedy response."""
    inputs = {k: v for k, v in case.inputs.items() if k != "video_metadata"}
    response = oracle.generate(
        **inputs,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=list(stops),
        suppress_tokens=list(policy.media_token_ids),
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


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_greedy_equals_generate_on_mixed_prompts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family=family)
    stops = ragged_stops(policy)
    oracle = plain_model(policy)
    count = 50 if family == "qwen2_5_vl" else 15
    cases = [mixed_case(policy, i) for i in range(count)]
    compactions = count_calls(monkeypatch, DecodeContext, "keep")
    ours = engine(policy, num_generations=2, temperature=0.0, max_batch_rollouts=20).generate(
        [case.prompt for case in cases], step=0
    )
    lengths = set()
    for case, rollouts in zip(cases, ours, strict=True):
        expected = generated(policy, oracle, case, stops)
        for rollout in rollouts:
            assert rollout.token_ids.tolist() == expected
            assert (rollout.finish_reason == "stop") == (expected[-1] in stops)
        lengths.add(len(expected))
    assert len(lengths) > 4, "the prompts should have finished at different lengths"
    assert len(compactions) > 2, "finished rollouts should have left the batch before the others were done"


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_positions_are_those_of_generate(family: str) -> None:
    """Prompt and response, with videos whose seconds reach beyond their space (positions or words say the time)."""
    policy = tiny_policy(family=family)
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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_sampled_logprobs_are_the_policys(family: str, temperature: float) -> None:
    policy = tiny_policy(family=family)
    ragged_stops(policy)
    prompts = [make_case(policy, kind, seed=i).prompt for i, kind in enumerate(KINDS)]
    sampled = engine(policy, num_generations=3, temperature=temperature, top_p=0.9, top_k=50).generate(prompts, step=3)
    assert len({len(rollout.token_ids) for rollouts in sampled for rollout in rollouts}) > 3
    groups = [ResponseGroup(p, tuple(r.token_ids for r in rs)) for p, rs in zip(prompts, sampled, strict=True)]
    scored = policy.logprobs(groups, temperature=temperature)
    for rollouts, logprobs in zip(sampled, scored, strict=True):
        for rollout, expected in zip(rollouts, logprobs, strict=True):
            assert (rollout.rollout_logprobs - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_how_prefixes_are_cut_for_the_prefill_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family=family)
    prompts = [make_case(policy, kind, seed=i).prompt for i, kind in enumerate(KINDS)]
    together = engine(policy, num_generations=2).generate(prompts, step=0)
    monkeypatch.setattr("vlm_pg.rollout.engine.PREFILL_TOKENS", 150)
    prefills = count_calls(monkeypatch, PrefillContext, "__init__")
    in_parts = engine(policy, num_generations=2).generate(prompts, step=0)
    assert 1 < len(prefills) < len(prompts)
    for a, b in zip(together, in_parts, strict=True):
        for one, other in zip(a, b, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert (one.rollout_logprobs - other.rollout_logprobs).abs().max() < 1e-4


def test_sampling_is_keyed_by_name_not_by_order() -> None:
    policy = tiny_policy()
    prompts = [make_case(policy, kind, seed=i).prompt for i, kind in enumerate(KINDS)]
    together = engine(policy, num_generations=3).generate(prompts, step=5)
    alone = [engine(policy, num_generations=3).generate([p], step=5)[0] for p in reversed(prompts)][::-1]
    for a, b in zip(together, alone, strict=True):
        assert [r.token_ids.tolist() for r in a] == [r.token_ids.tolist() for r in b]
    other_step = engine(policy, num_generations=3).generate(prompts, step=6)
    assert [r.token_ids.tolist() for r in other_step[0]] != [r.token_ids.tolist() for r in together[0]]
    assert together[0][0].token_ids.tolist() != together[0][1].token_ids.tolist()


def test_media_tokens_are_never_sampled() -> None:
    policy = tiny_policy()
    with torch.no_grad():  # make media tokens by far the most probable ones
        embedding = policy.model.get_input_embeddings().weight
        embedding[list(policy.media_token_ids)] = 50 * embedding.mean(0)
    prompt = make_case(policy, "text", seed=0).prompt
    for rollout in engine(policy, num_generations=8).generate([prompt], step=0)[0]:
        assert not set(rollout.token_ids.tolist()) & set(policy.media_token_ids)


@pytest.mark.parametrize("family", FAMILY_NAMES)
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
    assert len(tower_patches) == 3, "a frozen tower's output is kept"


def test_a_stop_request_is_honoured_between_tokens() -> None:
    policy = tiny_policy()
    prompt = make_case(policy, "text", seed=0).prompt
    asked = iter([False, False, True])
    stopping = RolloutEngine(policy, RolloutSettings(max_new_tokens=50), seed=0, should_stop=lambda: next(asked))
    with pytest.raises(InterruptedError):
        stopping.generate([prompt], step=0)
