"""Complete groups with rollouts, rewards and advantages, without a data set."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.groups import Case, make_case, random_group
from vlm_pg.models.policy import Policy
from vlm_pg.training.engines import TorchEngine
from vlm_pg.types import Prompt, RewardBreakdown, Rollout, RolloutGroup, Sample

_LAYOUT = [("video", [5, 1, 9]), ("image", [4, 4]), ("text", [3, 8, 2]), ("images", [6, 2])]


def make_groups(
    policy: Policy, sampled: Sequence[tuple[Prompt, Sequence[Rollout]]] | None = None
) -> list[RolloutGroup]:
    """Groups of mixed media with advantages that differ; by default of random responses a little off-policy."""
    if sampled is None:
        sampled = [
            random_rollouts(policy, make_case(policy, kind, seed=seed), lengths, seed)
            for seed, (kind, lengths) in enumerate(_LAYOUT)
        ]
    groups = []
    for index, (prompt, rollouts) in enumerate(sampled):
        sample = Sample(prompt.sample_id, "?", (), (), "A", "multiple_choice", "test", "test")
        rewards = tuple(RewardBreakdown(float(i), {"accuracy": float(i), "format": 1.0}) for i in range(len(rollouts)))
        advantages = tuple(0.7 - 0.6 * i + 0.1 * index for i in range(len(rollouts)))
        groups.append(RolloutGroup(sample, prompt, tuple(rollouts), 0, rewards, advantages))
    return groups


def random_rollouts(policy: Policy, case: Case, lengths: list[int], seed: int) -> tuple[Prompt, list[Rollout]]:
    """Random responses to a prompt, recorded a little off-policy."""
    group = random_group(policy, case, lengths, seed=seed)
    with torch.no_grad():
        (logprobs,) = policy.logprobs([group])
    rollouts = [
        Rollout(response, values + 0.05 * (-1) ** i, "stop")
        for i, (response, values) in enumerate(zip(group.responses, logprobs, strict=True))
    ]
    return case.prompt, rollouts


class RecordingEngine(TorchEngine):
    """Stores the gradients that the optimizer is about to use."""

    def step(self, learning_rate: float) -> float:
        self.gradients = {name: p.grad.clone() for name, p in self._named if p.grad is not None}
        return super().step(learning_rate)
