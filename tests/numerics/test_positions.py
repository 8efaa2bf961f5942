"""A video whose time passes its space, and prompts that end in a medium: one count of positions in every path.

The oracle is transformers' forward at positions written down here by hand, from the rule.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.numerics.test_rollout import engine
from tests.support.groups import (
    Case,
    chunk_loss,
    gradient_errors,
    make_case,
    outcome,
    plain_model,
    random_group,
    repeated_logprobs,
    tiny_policy,
)
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.types import ResponseGroup

# One or two visual tokens high and wide; temporal grids of a minute each (Qwen2.5-VL), or more of them (Qwen2-VL).
LONG_VIDEO: dict[str, Any] = {"kind": "video", "seed": 5, "seconds_per_frame": 30.0, "max_side": 2}
FAMILIES = ("qwen2_vl", "qwen2_5_vl")


def long_case(policy: Policy) -> Case:
    case = make_case(policy, **LONG_VIDEO)
    assert case.prompt.positions_3P[0].max() > 0
    return case


def by_hand(policy: Policy, case: Case, more: int) -> torch.Tensor:
    """int64 [4, 1, P + more] for a prompt of text, one video, text: the rule, written down a second time."""
    types = case.inputs["mm_token_type_ids"][0]
    before, visual = int((types != 0).int().argmax()), int((types != 0).sum())
    times, height, width = case.inputs["video_grid_thw"][0].tolist()
    step = 1
    if policy.family.model_type == "qwen2_5_vl":
        step = 2 * round(float(case.inputs["second_per_grid_ts"][0]))
    inside = [
        (before + time * step, before + row, before + column)
        for time in range(times)
        for row in range(height // 2)
        for column in range(width // 2)
    ]
    assert len(inside) == visual and max(inside)[0] > max(max(rest) for _, *rest in inside)
    after = max(inside)[0] + 1
    tail = len(types) - before - visual + more
    columns = [(n,) * 3 for n in range(before)] + inside + [(after + n,) * 3 for n in range(tail)]
    positions = torch.tensor(columns).T
    return torch.cat([torch.arange(len(types) + more)[None], positions])[:, None]


def oracle_logprobs(oracle: Any, policy: Policy, case: Case, response: torch.Tensor) -> torch.Tensor:
    prompt_length = case.inputs["input_ids"].shape[1]
    inputs = {k: v for k, v in case.inputs.items() if k not in ("video_metadata", "attention_mask")}
    inputs["input_ids"] = torch.cat([inputs["input_ids"], response[None]], dim=1)
    inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(response)))
    logits = oracle(**inputs, position_ids=by_hand(policy, case, len(response))).logits[0, prompt_length - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, response[:, None])[:, 0]


@pytest.mark.parametrize("decoder", ["cohorts", "ragged", "in passes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_are_scored_at_the_positions_they_were_sampled_at(
    family: str, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(family=family)
    case, other = long_case(policy), make_case(policy, "images", seed=1)
    oracle = plain_model(policy)
    if decoder == "ragged":
        monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", RaggedDecoder)
    settings = {"prefill_tokens": 64} if decoder == "in passes" else {}
    sampled = engine(policy, num_generations=3, **settings).generate([case.prompt, other.prompt], step=0)[0]
    group = ResponseGroup(case.prompt, tuple(rollout.token_ids for rollout in sampled))
    whole = policy.logprobs([group])[0]
    in_parts = PolicyScorer(policy, case.prompt.num_tokens + 30).score([group], 1.0)[0]
    for rollout, trained, rescored in zip(sampled, whole, in_parts, strict=True):
        expected = oracle_logprobs(oracle, policy, case, rollout.token_ids)
        for ours in (rollout.rollout_logprobs, trained, rescored):
            assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("chunk_tokens", [None, 6], ids=["whole", "chunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_at_qwens_positions(family: str, chunk_tokens: int | None) -> None:
    policy = tiny_policy(family=family, train_vision=True)
    oracle = plain_model(policy)
    case = long_case(policy)
    group = random_group(policy, case, [5, 1, 4], seed=0)
    expected = [oracle_logprobs(oracle, policy, case, response) for response in group.responses]
    loss = chunk_loss([list(enumerate(expected))])
    loss.backward()
    ours = policy.logprobs([group])[0]
    assert max(float((a - b).detach().abs().max()) for a, b in zip(ours, expected, strict=True)) < 1e-5
    total, _ = outcome(policy, [group], chunk_tokens)
    assert abs(float(total - loss.detach())) < 1e-3
    errors = gradient_errors(policy.model, oracle)
    assert len(errors) > 20 and max(errors.values()) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_that_is_set_decides(family: str) -> None:
    """Both rules, one policy each: other positions behind a long video, other log-probabilities."""
    scored = {}
    for rule in ("qwen", "transformers"):
        policy = tiny_policy(family=family, positions=rule)
        case = long_case(policy)
        group = random_group(policy, case, [6], seed=0)
        scored[rule] = (case.prompt.next_position, policy.logprobs([group])[0][0])
    assert scored["qwen"][0] > scored["transformers"][0]
    assert (scored["qwen"][1] - scored["transformers"][1]).abs().max() > 1e-3


def test_transformers_rule_scores_what_generate_sampled() -> None:
    policy = tiny_policy(positions="transformers")
    case = make_case(policy, "video", seed=5, seconds_per_frame=60.0)
    assert case.prompt.positions_3P.max() > case.prompt.positions_3P[:, -1].max()
    inputs = {k: v for k, v in case.inputs.items() if k != "video_metadata"}
    out = plain_model(policy).generate(
        **inputs, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    response = out.sequences[0, inputs["input_ids"].shape[1] :]
    expected = torch.cat(out.logits).float().log_softmax(-1).gather(-1, response[:, None])[:, 0]
    ours = policy.logprobs([ResponseGroup(case.prompt, (response,))])[0][0]
    assert (ours - expected).abs().max() < 1e-5


def ends_in_a_medium(policy: Policy, kind: str) -> Case:
    """A prompt cut after its last visual token, whose medium is wider than it is high."""
    case = next(
        case
        for case in (make_case(policy, kind, seed, 30.0) for seed in range(20))
        if case.prompt.grid_thw[-1, 2] > case.prompt.grid_thw[-1, 1]
    )
    stop = int(case.inputs["mm_token_type_ids"][0].nonzero().max()) + 1
    cut = {name: case.inputs[name][:, :stop] for name in ("input_ids", "mm_token_type_ids", "attention_mask")}
    inputs = case.inputs | cut
    return Case(prompt_from_processor(inputs, policy.positions, "cut"), inputs)


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("rule", ["qwen", "transformers"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_prompt_may_end_in_a_medium(family: str, rule: str, kind: str) -> None:
    """Response positions are those of the whole sequence, in scoring and generation: transformers' forward agrees."""
    policy = tiny_policy(family=family, positions=rule)
    case = ends_in_a_medium(policy, kind)
    assert case.prompt.mm_token_type_ids[-1] != 0
    sampled = engine(policy, num_generations=2, max_new_tokens=6).generate([case.prompt], step=0)[0]
    group = ResponseGroup(case.prompt, tuple(rollout.token_ids for rollout in sampled))
    oracle = plain_model(policy)
    if rule == "transformers":  # it counts by itself
        oracle.forward = partial(_without_positions, oracle.forward)
    expected = repeated_logprobs(oracle, case, group.responses)
    for rollout, ours, theirs in zip(sampled, policy.logprobs([group])[0], expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5
        assert (rollout.rollout_logprobs - theirs).abs().max() < 1e-4


def _without_positions(forward: Any, *args: Any, position_ids: torch.Tensor, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def test_a_prompt_that_ends_in_a_medium_needs_its_response_start() -> None:
    policy = tiny_policy()
    prompt = ends_in_a_medium(policy, "image").prompt
    object.__setattr__(prompt, "response_start", None)
    group = ResponseGroup(prompt, (torch.tensor([5, 6]),))
    words = r"Prompt 'cut' ends in a visual token, .* and response_start is not set. Build prompts with prompt_from_pro"
    with pytest.raises(ValueError, match=words):
        policy.logprobs([group])
    with pytest.raises(ValueError, match=words):
        engine(policy).generate([prompt], step=0)
