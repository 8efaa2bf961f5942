"""The optimizer updates of one step: passes over its groups, each in as many mini-batches as were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vlm_pg.config import RunConfig
from vlm_pg.distributed import gather_objects, sum_over_ranks
from vlm_pg.metrics import Metric
from vlm_pg.models.reference import ScoringPolicy
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.tally import over_updates
from vlm_pg.training.dealing import step_order
from vlm_pg.training.engines import Engine
from vlm_pg.training.exchange import Share, dealt
from vlm_pg.training.group_advantages import trains
from vlm_pg.training.sequence_ranks import scores_together
from vlm_pg.training.step import Update, UpdateSettings, group_sizes, update_policy
from vlm_pg.types import ResponseGroup, RolloutGroup

UPDATES = Metric("updates", "of the optimizer", "same")


def run_updates(engine: Engine, reference: ScoringPolicy | None, step: Update, config: RunConfig) -> dict[str, float]:
    """``algorithm.num_iterations`` passes over the step's groups, ``algorithm.minibatches`` updates each.

    Mini-batches are runs of the step's groups in their order (``RolloutGroup.order``), equally long over all ranks as
    far as possible; their loss weights are their own. Where there are fewer groups than mini-batches there are fewer
    updates. Where log-probabilities are recomputed and there are several updates, they are scored before the first one.

    Args:
        reference: what a KL term of the loss measures from; None without one.
        step: this process's groups of the step; ``vision`` and ``measure_mismatch`` are for the first update.

    Returns:
        The step's metrics, equal on all ranks.
    """
    algorithm, settings = config.algorithm, UpdateSettings.of(config)
    groups = step.groups
    if settings.logprobs == "recompute" and algorithm.updates > 1:
        groups = _scored(engine, step, config)
    values: list[dict[str, float]] = []
    numbers = step_order(gather_objects([group.order for group in groups]))
    total = sum(map(len, numbers))
    parts = [number * algorithm.minibatches // total for number in numbers[engine.ranks.rank]]
    shares = _Shares(engine, reference, replace(step, groups=groups), settings, again=algorithm.num_iterations > 1)
    for _ in range(algorithm.num_iterations):
        for number in range(algorithm.minibatches):
            chosen = [place for place, part in enumerate(parts) if part == number]
            here = float(sum(trains(groups[place]) for place in chosen))
            if sum_over_ranks({"groups": here}, engine.policy.device)["groups"]:
                values.append(shares.update(number, chosen, first=not values))
    found = over_updates(values) | {UPDATES: float(len(values))}
    # A group that was split is one group all the same.
    return found | group_sizes(groups) if shares.are_dealt else found


class _Shares:
    """What this data rank trains on in each mini-batch: dealt when it is its turn, and the same ever after.

    ``are_dealt``: groups may have changed ranks.

    Args:
        step: as in ``run_updates``, its groups as they train.
        again: every mini-batch will be trained on more than once.
    """

    def __init__(
        self, engine: Engine, reference: ScoringPolicy | None, step: Update, settings: UpdateSettings, again: bool
    ):
        self._engine, self._reference, self._step, self._settings = engine, reference, step, settings
        self._again = again
        self._shares: dict[int, Share] = {}
        self.are_dealt = False

    def update(self, number: int, chosen: Sequence[int], first: bool) -> dict[str, float]:
        """One update on a mini-batch, of which ``chosen`` are the places of this process's groups; its metrics.

        Args:
            first: of the step.
        """
        share = self._share(number, chosen, first)
        update = Update(
            share.groups,
            self._step.learning_rate,
            share.vision,
            self._step.measure_mismatch and first,
            may_stop=first,
            waiting=self._step.waiting,
            reference_vision=share.reference_vision,
        )
        return update_policy(self._engine, self._reference, update, self._settings) | share.metrics

    def _share(self, number: int, chosen: Sequence[int], first: bool) -> Share:
        step, vision_trains = self._step, self._engine.policy.vision.trains
        known = self._shares.get(number)
        if known is not None:
            return replace(known, vision=known.encoded_anew(self._engine)) if vision_trains else known
        # Behind the first update the weights are others, and a trained tower's features too.
        made = None if vision_trains and not first else step.vision
        own = replace(
            step, groups=[step.groups[place] for place in chosen], vision=None if made is None else made.of(chosen)
        )
        share = dealt(self._engine, own, self._settings.micro_batch_tokens, self._reference)
        self.are_dealt |= bool(share.metrics)
        if self._again:
            # Of a trained tower's features none is kept over an update: its graph hangs on them.
            self._shares[number] = replace(share, vision=None) if vision_trains else share
        return share


def _scored(engine: Engine, step: Update, config: RunConfig) -> list[RolloutGroup]:
    """The groups with the log-probabilities of the training forward, under the weights that sampled.

    Those of pruned rollouts, which nobody will ask for, are empty.
    """
    rollout, groups = config.rollout, step.groups
    places = [[i for i, weight in enumerate(group.kept or (1.0,) * len(group.rollouts)) if weight] for group in groups]
    asked = [
        ResponseGroup(group.prompt, tuple(group.rollouts[i].token_ids for i in chosen))
        for group, chosen in zip(groups, places, strict=True)
        if chosen
    ]
    with engine.weights_at_hand():
        scorer = PolicyScorer(engine.policy, rollout.prefill_tokens)
        found = iter(scores_together(engine, scorer, asked, step.prompts, rollout.temperature))
    scored = []
    for group, chosen in zip(groups, places, strict=True):
        by_place = dict(zip(chosen, next(found), strict=True)) if chosen else {}
        logprobs = tuple(by_place.get(i, torch.empty(0)) for i in range(len(group.rollouts)))
        scored.append(replace(group, trainer_logprobs=logprobs))
    return scored
