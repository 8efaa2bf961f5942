"""Whoever samples or scores is known by what it can do, not by its class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.collecting import made_up_collector, tiny_config
from tests.support.groups import tiny_policy
from vlm_pg.metrics import Metric
from vlm_pg.tally import Tally
from vlm_pg.training.updates import Update, run_updates
from vlm_pg.types import BadSample, Prompt, ResponseGroup, Rollout

REPLAYED = Metric("replayed", "rollouts", "sum")


class Replay:
    """Plays back the same two answers to every question, and has none for the question "text-1"."""

    scores_itself = False

    def __init__(self) -> None:
        self.played, self.faults = 0, [BadSample("text-1", "no_tape", "the tape is missing", "shelf 3")]

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        tapes = tuple(
            Rollout(torch.tensor(ids), torch.full((len(ids),), -2.0), "stop") for ids in ([15, 16, 17], [18, 19])
        )
        found = [() if prompt.sample_id == "text-1" else tapes for prompt in prompts]
        self.played += sum(map(len, found))
        return found

    def take_faults(self) -> list[BadSample]:
        faults, self.faults = self.faults, []
        return faults

    def report(self, tally: Tally) -> None:
        tally.add(REPLAYED, self.played)
        self.played = 0

    def use_checkpoint(self, checkpoint: Path) -> None:
        raise AssertionError("nothing is saved here")


class Zero:
    """Scores every token with probability 1."""

    def score(self, groups: Sequence[ResponseGroup], temperature: float) -> list[list[torch.Tensor]]:
        return [[torch.zeros(len(response)) for response in group.responses] for group in groups]


def test_a_step_is_trained_on_what_a_made_up_sampler_says_and_a_made_up_scorer_thinks() -> None:
    config = tiny_config({"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"}, training={"prompts_per_step": 3})
    policy = tiny_policy()
    collector = made_up_collector(policy, config, lambda response, index: float(index))
    collector.stages = replace(collector.stages, sampler=Replay(), reference=Zero())
    batch = collector.collect(1, 0)
    assert [group.sample.sample_id for group in batch.groups] == ["text-0", "text-2"]
    assert batch.sampling.reduced() == {"replayed": 4.0}
    # k1 of -2 against 0 is -2 a token, three and two of them, and half of it is taken from the reward.
    assert [reward.total for reward in batch.groups[0].rewards] == pytest.approx([0.0 + 3.0, 1.0 + 2.0])
    other = replace(batch.groups[0], advantages=(1.0, -1.0))
    before = policy.model.lm_head.weight.detach().clone()
    values = run_updates(collector.engine, None, Update([other], 1e-2), config)
    assert values["updates"] == 1 and not torch.equal(before, policy.model.lm_head.weight)
