"""Grouped equals repeated: values, and the gradient of every parameter.

A batch of groups scored in one packed stream, each prefix once, gives the log-probabilities that transformers' own
forward gives on every prompt + response sequence by itself, and the same gradient for every parameter.
"""

from __future__ import annotations

import pytest

from tests.support.groups import (
    Case,
    gradient_errors,
    make_case,
    plain_model,
    random_group,
    repeated_logprobs,
    tiny_policy,
    weighted_sum,
)
from vlm_pg.models.policy import Policy
from vlm_pg.types import ResponseGroup

# (prompt kind, response lengths): groups of different sizes, ragged, length 1 included, G = 1 included.
MIXED = [("video", [5, 1, 9, 3]), ("image", [1]), ("images", [7, 7]), ("text", [4, 1, 1]), ("image+video", [12, 2, 6])]
LAYOUTS = {
    "mixed": MIXED,
    "video": [("video", [3, 8, 1]), ("video", [2, 2])],
    "image": [("image", [6, 1, 4])],
    "images": [("images", [1, 5])],
    "text": [("text", [3, 1, 2]), ("text", [9])],
    "one response": [("video", [7])],
    "one token": [("video", [1])],
    "only first tokens": [("image", [1, 1, 1])],
}


def build(policy: Policy, layout: str) -> list[tuple[Case, ResponseGroup]]:
    pairs = []
    for index, (kind, lengths) in enumerate(LAYOUTS[layout]):
        case = make_case(policy, kind, seed=10 * index + len(lengths))
        pairs.append((case, random_group(policy, case, lengths, seed=index)))
    return pairs


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_every_gradient(layout: str, train_vision: bool) -> None:
    policy = tiny_policy(train_vision=train_vision)
    oracle = plain_model(policy)
    pairs = build(policy, layout)

    logprobs = policy.logprobs([group for _, group in pairs])
    expected = [repeated_logprobs(oracle, case, group.responses) for case, group in pairs]

    for ours, theirs in zip(logprobs, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() < 1e-5
    weighted_sum(logprobs).backward()
    weighted_sum(expected).backward()
    errors = gradient_errors(policy.model, oracle)
    assert len(errors) > 20 and max(errors.values()) < 1e-4, max(errors, key=lambda name: errors[name])


@pytest.mark.parametrize("saver", ["gradient_checkpointing", "chunked_logits"])
def test_memory_savers_change_nothing(saver: str) -> None:
    policy = tiny_policy(train_vision=True, gradient_checkpointing=saver == "gradient_checkpointing")
    if saver == "chunked_logits":
        policy.logits_chunk_rows = 3
    oracle = plain_model(policy)
    pairs = build(policy, "mixed")
    weighted_sum(policy.logprobs([group for _, group in pairs])).backward()
    weighted_sum([repeated_logprobs(oracle, case, group.responses) for case, group in pairs]).backward()
    errors = gradient_errors(policy.model, oracle)
    assert len(errors) > 20 and max(errors.values()) < 1e-4, max(errors, key=lambda name: errors[name])
