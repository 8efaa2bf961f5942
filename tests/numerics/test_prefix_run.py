"""Prefixes once, responses in chunks: the same log-probabilities and gradients as everything in one stream."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import check_equal, outcome, random_groups, tiny_policy
from vlm_pg.models.packing import pack_chunk, pack_prefixes
from vlm_pg.models.policy import Policy

SHAPES = {"video": [5, 1, 9, 3, 2], "image": [1, 1], "text": [70, 4], "images": [6, 130, 1]}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe"])
def test_chunks_equal_the_whole(family: str, train_vision: bool, checkpointing: bool) -> None:
    policy = tiny_policy(family=family, train_vision=train_vision, gradient_checkpointing=checkpointing)
    groups = random_groups(policy, SHAPES.items())
    expected = outcome(policy, groups, None)
    check_equal(outcome(policy, groups, chunk_tokens=12), expected)


def test_no_gradient_no_graph() -> None:
    policy = tiny_policy()
    groups = random_groups(policy, SHAPES.items())
    expected = policy.logprobs(groups)
    with torch.no_grad():
        prefixes = pack_prefixes(groups, policy.device)
        features = policy.join_features(groups, policy.vision.encode([group.prompt for group in groups]))
        states = policy(Policy.prefix_states, prefixes, features)
        batch = pack_chunk(prefixes, groups, [[4, 0], [], [1], [0]], policy.device)
        logprobs, _ = policy(Policy.chunk_logprobs, batch, states, 1.0)
    assert not logprobs.requires_grad
    video, image, text, images = batch.split(logprobs)
    assert image == []
    wanted = [expected[0][4], expected[0][0], expected[2][1], expected[3][0]]
    for ours, theirs in zip([*video, *text, *images], wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-5
