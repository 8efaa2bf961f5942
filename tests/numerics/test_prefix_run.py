"""Prefixes once, responses in chunks: the same log-probabilities and gradients as everything in one stream."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import make_case, random_group, tiny_policy
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.packing import pack_chunk, pack_prefixes
from vlm_pg.models.policy import Policy
from vlm_pg.types import ResponseGroup

SHAPES = {"video": [5, 1, 9, 3, 2], "image": [1, 1], "text": [70, 4], "images": [6, 130, 1]}
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe"]


def groups_of(policy: Policy) -> list[ResponseGroup]:
    return [
        random_group(policy, make_case(policy, kind, seed=i), lengths, seed=i)
        for i, (kind, lengths) in enumerate(SHAPES.items())
    ]


def weight(group: int, index: int, length: int) -> torch.Tensor:
    return (torch.arange(length) + 3.0 * index + group).cos() + 0.2


def whole(policy: Policy, groups: list[ResponseGroup]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.zero_grad()
    logprobs = policy.logprobs(groups)
    loss = sum(
        (weight(g, i, len(values)) * values).sum() for g, group in enumerate(logprobs) for i, values in enumerate(group)
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return loss.detach(), gradients(policy)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_equal_the_whole(family: str, train_vision: bool, checkpointing: bool) -> None:
    policy = tiny_policy(family=family, train_vision=train_vision, gradient_checkpointing=checkpointing)
    groups = groups_of(policy)
    expected_loss, expected = whole(policy, groups)
    policy.zero_grad()
    policy.vision.weights_changed()  # a fresh pass of a trained tower: its graph was used up

    def loss_of(chunk: list[list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        return torch.stack(
            [(weight(g, i, len(values)) * values).sum() for g, group in enumerate(chunk) for i, values in group]
        ).sum()

    loss = backward_in_chunks(policy, groups, loss_of, chunk_tokens=12)
    assert (loss - expected_loss).abs() < 1e-5 * expected_loss.abs().clamp_min(1)
    ours = gradients(policy)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-6), name


def test_no_gradient_no_graph() -> None:
    policy = tiny_policy()
    groups = groups_of(policy)
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
    for ours, theirs in zip(
        [*video, *text, *images], [expected[0][4], expected[0][0], expected[2][1], expected[3][0]], strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-5


def test_the_prefix_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    groups = groups_of(policy)
    rows: list[int] = []
    mlp = policy.language_model.layers[0].mlp
    mlp.register_forward_hook(lambda _module, inputs, _out: rows.append(inputs[0].shape[1]))
    backward_in_chunks(policy, groups, lambda chunk: sum(v.sum() for g in chunk for _, v in g), chunk_tokens=12)  # type: ignore[arg-type, return-value]
    assert rows[0] == sum(group.prompt.num_tokens for group in groups)
    assert sum(rows[1:]) == sum(len(r) - 1 for group in groups for r in group.responses)
    assert len(rows) > 4
