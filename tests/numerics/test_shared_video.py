"""Prompts that begin alike are computed alike: sharing across questions equals transformers' repeated forward.

Two questions on one video, and conversations that continue one another, put what they have in common into the language
model once. Values and every gradient are those of transformers' own forward over each prompt + response by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.support.groups import (
    Case,
    check_equal,
    chunk_loss,
    continued_case,
    gradient_errors,
    make_case,
    outcome,
    plain_model,
    random_group,
    repeated_logprobs,
    tiny_policy,
    weighted_sum,
)
from vlm_pg.models.packing import pack, pack_chunk, pack_prefixes
from vlm_pg.models.policy import Policy
from vlm_pg.types import ResponseGroup

LENGTHS = ([5, 1, 9], [4, 4], [2, 7, 1, 3], [1], [6, 2], [3])
# Media that are long enough to be worth a node of their own.
VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}


def text(policy: Policy, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([t for t in range(policy.vocab_size) if t not in policy.media_token_ids])
    return allowed[torch.randint(len(allowed), (tokens,), generator=generator)]


def two_questions(policy: Policy) -> list[Case]:
    return [make_case(policy, seed=seed, **VIDEO) for seed in (1, 2)]


def three_questions_and_another_video(policy: Policy) -> list[Case]:
    other = make_case(policy, "video", seed=9, media_seed=6, max_side=8)
    first, *others = (make_case(policy, seed=seed, **VIDEO) for seed in (1, 2, 3))
    return [first, other, *others]


def follow_ups(policy: Policy) -> list[Case]:
    """A long question, its continuation, two continuations of that, and a second question on the video."""
    first, second = (make_case(policy, seed=seed, max_words=words, **VIDEO) for seed, words in ((1, 80), (2, 20)))
    more = continued_case(policy, first, text(policy, 80, 1))
    return [continued_case(policy, more, text(policy, 70, seed)) for seed in (2, 3)] + [more, first, second]


def same_prompt_twice(policy: Policy) -> list[Case]:
    first, second = two_questions(policy)
    return [first, second, first]


def first_of_two_media(policy: Policy) -> list[Case]:
    """The same pictures behind different words, and other pictures behind the same words."""
    return [make_case(policy, "images", seed=s, media_seed=m, max_side=8) for s, m in ((1, 3), (2, 3), (1, 4))]


# Builder of cases -> levels of their tree, the responses' included.
LAYOUTS = {
    two_questions: 3,
    three_questions_and_another_video: 3,
    follow_ups: 5,
    same_prompt_twice: 3,
    first_of_two_media: 3,
}


def build(policy: Policy, cases: Sequence[Case]) -> list[ResponseGroup]:
    return [random_group(policy, case, LENGTHS[index], seed=index) for index, case in enumerate(cases)]


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_values_and_every_gradient(layout: object, train_vision: bool) -> None:
    policy = tiny_policy(train_vision=train_vision)
    oracle = plain_model(policy)
    cases = layout(policy)  # type: ignore[operator]
    groups = build(policy, cases)
    batch = pack(groups, policy.device)
    assert len(batch.tree.level_nodes) == LAYOUTS[layout]  # type: ignore[index]
    assert batch.num_tokens < pack(groups, policy.device, share=False).num_tokens
    logprobs = policy.logprobs(groups)
    expected = [repeated_logprobs(oracle, case, g.responses) for case, g in zip(cases, groups, strict=True)]
    for ours, theirs in zip(logprobs, expected, strict=True):
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(ours, theirs, strict=True))
    for values in (logprobs, expected):
        weighted_sum(values).backward()
    errors = gradient_errors(policy.model, oracle)
    assert len(errors) > 20 and max(errors.values()) < 1e-4, max(errors, key=lambda name: errors[name])


@pytest.mark.parametrize("chunked", [False, True], ids=["one pass", "chunks"])
def test_a_video_of_two_questions_passes_the_language_model_once(chunked: bool) -> None:
    """Counted where it costs: rows that enter a decoder layer."""
    policy = tiny_policy()
    cases = two_questions(policy)
    groups = build(policy, cases)
    first, second = (case.prompt for case in cases)
    shorter = min(first.num_tokens, second.num_tokens)
    common = int((first.input_ids[:shorter] != second.input_ids[:shorter]).nonzero()[0])
    visual = int((first.mm_token_type_ids != 0).nonzero()[-1]) + 1
    assert 64 <= visual <= common
    rows: list[int] = []
    policy.language_model.layers[0].mlp.register_forward_hook(lambda m, args, out: rows.append(args[0].shape[-2]))
    features = policy.join_features(groups, policy.vision.encode([case.prompt for case in cases]))
    if chunked:
        prefixes = pack_prefixes(groups, policy.device)
        states = policy(Policy.prefix_states, prefixes, features)
        for chosen in ([[0, 1], []], [[2], [0]], [[], [1]]):
            policy(Policy.chunk_logprobs, pack_chunk(prefixes, groups, chosen, policy.device), states, 1.0)
    else:
        policy(Policy.stream_logprobs, policy.pack(groups), features, 1.0)
    responses = sum(len(r) - 1 for group in groups for r in group.responses)
    assert sum(rows) == first.num_tokens + second.num_tokens - common + responses


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_chunks_behind_shared_prompts_equal_one_pass(layout: object, checkpointing: bool) -> None:
    """The prompts once, responses in chunks (one of them without rows of its own), one backward through the prompts."""
    policy = tiny_policy(train_vision=True, gradient_checkpointing=checkpointing)
    groups = build(policy, layout(policy))  # type: ignore[operator]
    expected = outcome(policy, groups, None)
    policy.zero_grad()
    policy.vision.weights_changed()
    prefixes = pack_prefixes(groups, policy.device)
    features = policy.vision.encode([group.prompt for group in groups], with_graph=True)
    states = policy(Policy.prefix_states, prefixes, policy.join_features(groups, features))
    ones = [[i for i, r in enumerate(group.responses) if len(r) == 1] for group in groups]
    rest = [[i for i, r in enumerate(group.responses) if len(r) > 1] for group in groups]
    total = torch.zeros(())
    for chosen in ([of_group[:1] for of_group in rest], [of_group[1:] for of_group in rest], ones):
        if any(chosen):
            chunk = pack_chunk(prefixes, groups, chosen, policy.device)
            logprobs = chunk.split(policy(Policy.chunk_logprobs, chunk, states, 1.0)[0])
            loss = chunk_loss([list(zip(*pair, strict=True)) for pair in zip(chosen, logprobs, strict=True)])
            loss.backward()
            total += loss.detach()
    states.surrogate_loss(1.0).backward()
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    check_equal((total, gradients), expected, 1e-4)


@pytest.mark.parametrize("kind, lengths", [("video", [7]), ("video", [1]), ("image", [1, 1, 1])])
def test_single_responses_and_single_tokens(kind: str, lengths: list[int]) -> None:
    """Streams in which few or no rows are a response's own."""
    policy = tiny_policy(train_vision=True)
    oracle = plain_model(policy)
    case = make_case(policy, kind, seed=1)
    group = random_group(policy, case, lengths, seed=0)
    logprobs, expected = policy.logprobs([group])[0], repeated_logprobs(oracle, case, group.responses)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    for values in (logprobs, expected):
        weighted_sum([values]).backward()
    assert max(gradient_errors(policy.model, oracle).values()) < 1e-4
