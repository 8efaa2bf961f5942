"""A step's batch: questions, rollouts, rewards, advantages, and what of it trains.

A step begins with ``training.prompts_per_step`` questions. Further ones are asked where groups without spread are
replaced (DAPO's dynamic sampling) and where pruning has freed tokens (CPPO's dynamic completion allocation). Which
ones, and how many, is decided over all ranks together, so it does not depend on how many ranks there are (except where
rollouts are pruned rank by rank).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from vlm_pg.algorithms.losses import KL, kl_penalty
from vlm_pg.algorithms.pruning import fits, num_kept, questions_needed
from vlm_pg.config import RunConfig
from vlm_pg.distributed import agree_to_go_on, gather_objects, sum_over_ranks
from vlm_pg.media.controls import shuffle_frames
from vlm_pg.metrics import Chart, Metric
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.contracts import Sampler, Scorer
from vlm_pg.tally import Tally
from vlm_pg.training.engines import Engine
from vlm_pg.training.group_advantages import (
    advantage_groups,
    all_tokens,
    kept_tokens,
    prune_groups,
    token_advantage_groups,
    trains,
    without_truncated,
)
from vlm_pg.training.group_metrics import KEPT_TOKENS
from vlm_pg.training.group_rewards import add_parts, has_spread, responses_of, reward_groups, shape_rewards
from vlm_pg.training.phases import Phases
from vlm_pg.training.questions import QuestionStream
from vlm_pg.training.sequence_ranks import (
    SharedPrompts,
    rollouts_together,
    sampler_of_all,
    scores_together,
    shared_prompts,
)
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.types import Prompt, ResponseGroup, RolloutGroup, Sample

# Costs of questions vary, so what a round leaves free is filled by another one; few rounds get within half a question.
FILL_ROUNDS = 16
# Where pruning leaves much less than usual (a correction that draws nothing of flat groups), filling ends at this many
# times the questions that equally long responses would need.
MOST_QUESTIONS = 2
# A budget short by less than this share is full: a round for a question or two decodes at a poor rate.
FULL_ENOUGH = 0.03

_ASKED = Chart("Questions per step", 16)
QUESTIONS = Metric("questions", "questions", "same", _ASKED)
RESAMPLED = Metric("resampled_groups", "groups", "same", _ASKED)
UNFILLED = Metric("unfilled_groups", "groups", "same")
FILLED = Metric("filled_groups", "groups", "same", _ASKED)
UNUSED = Metric("unused_groups", "groups", "same", _ASKED)
TOKEN_BUDGET = Metric("token_budget", "tokens", "same")
# T-GRPO: share of the groups with a control that earned the bonus, and how often the control was right.
TEMPORAL_BONUS = Metric("temporal/bonus_share", "share of groups")
TEMPORAL_CONTROL = Metric("temporal/accuracy_control", "share of rollouts")


@dataclass(frozen=True)
class Stages:
    """What a step's questions go through.

    ``control``: samples T-GRPO's control groups. ``reference``: what a KL in the reward measures from. None where the
    algorithm asks for neither. ``around_reference``: the state all ranks are in while they ask the reference.
    """

    stream: QuestionStream
    sampler: Sampler
    control: Sampler | None
    rewarder: Rewarder
    reference: Scorer | None
    around_reference: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass
class StepBatch:
    """What a step works on, on this rank.

    ``sampled``: every complete group, for metrics and logs. ``groups``: what trains, pruned rollouts marked in
    ``kept``. ``vision``: visual features of ``groups``, in order, where they were made before generation.
    ``counts``: of all ranks together. ``sampling``: what the samplers did on this rank. ``held``: features of all that
    was asked: while somebody holds them, the step's media are not encoded again, whatever the encoder's cache keeps.
    ``prompts``: by sample id, those of this process and of its sequence group.
    """

    sampled: list[RolloutGroup]
    groups: list[RolloutGroup]
    vision: StepFeatures | None
    counts: dict[str, float]
    sampling: Tally
    held: Sequence[StepFeatures] = ()
    prompts: Mapping[str, Prompt] = field(default_factory=dict)


class Collector:
    """Makes the batch of a step."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        stages: Stages,
        phases: Phases,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self.config, self.algorithm = config, config.algorithm
        self.engine, self.policy, self.stages, self.phases = engine, engine.policy, stages, phases
        self._should_stop = should_stop
        self._asked: dict[str, int] = {}  # sample id -> place among the step's questions
        self._held: list[StepFeatures] = []
        self._prompts: dict[str, Prompt] = {}
        self._controls: dict[str, list[float | None]] = {}
        self._seen, self._sampling = Tally(), Tally()

    def collect(self, step: int, steps_ahead: int) -> StepBatch:
        """Sample step ``step``. Media of the next ``steps_ahead`` steps are decoded meanwhile.

        Raises:
            InterruptedError: a stop was asked for.
        """
        self._asked, self._held, self._controls, self._seen, self._sampling = {}, [], {}, Tally(), Tally()
        self._prompts = {}
        if self._kl_in_reward:
            self._seen.add(KL, 0, 0)  # known, even where nothing was sampled
        groups, vision = self._first_round(step, steps_ahead)
        dropped: list[RolloutGroup] = []
        counts: dict[str, float] = {}
        if self.algorithm.resample_rounds:
            groups, dropped, counts = self._replace_without_spread(step, groups)
        groups = self._with_advantages(step, groups)
        if self.algorithm.prune_rate and self.algorithm.prune_fill:
            more, refused, filled = self._fill(step, groups)
            groups, dropped, counts = groups + more, dropped + refused, counts | filled
        if self.algorithm.temporal_bonus:
            self._count_controls(groups + dropped)
        sampled = groups + dropped
        if self.algorithm.mask_truncated:
            groups = [without_truncated(group) for group in groups]
        # Corrected for pruning, the loss averages over what was sampled: also over groups of which nothing was drawn.
        counts_anyway = self.algorithm.prune_correction
        held, self._held, prompts, self._prompts = self._held, [], self._prompts, {}
        places = [place for place, group in enumerate(groups) if group.rollouts and (counts_anyway or trains(group))]
        return StepBatch(
            sampled,
            [groups[place] for place in places],
            None if vision is None else vision.of(places),
            {QUESTIONS: self._sum(len(sampled)), **counts, **self._seen.reduced()},
            self._sampling,
            held,
            prompts,
        )

    @property
    def _fixed_questions(self) -> bool:
        """Whether the first round's groups are what one update trains on, so that the tower need not run again."""
        algorithm = self.algorithm
        further = algorithm.resample_rounds > 0 or (algorithm.prune_rate > 0 and algorithm.prune_fill)
        return not further and algorithm.minibatches == 1

    @property
    def _kl_in_reward(self) -> bool:
        return self.algorithm.kl_coef > 0 and self.algorithm.kl_in != "loss"

    def _first_round(self, step: int, steps_ahead: int) -> tuple[list[RolloutGroup], StepFeatures | None]:
        samples = self._take(self.config.training.prompts_per_step)
        return self._round(step, samples, steps_ahead, to_train=self._fixed_questions)

    def _take(self, count: int) -> list[Sample]:
        samples = self.stages.stream.take(count, self._asked)
        self._asked |= {sample.sample_id: len(self._asked) + place for place, sample in enumerate(samples)}
        return samples

    def _round(
        self, step: int, samples: Sequence[Sample], steps_ahead: int = 0, to_train: bool = False
    ) -> tuple[list[RolloutGroup], StepFeatures | None]:
        """Complete groups of this rank's share of ``samples``, with rewards, and their features if they train."""
        with self.phases.timed("prompts"):
            questions = self.stages.stream.load(samples)
            videos = [sample for sample, _ in questions if any(ref.kind == "video" for ref in sample.media)]
            controlled = self.algorithm.temporal_bonus > 0
            shuffled = self.stages.stream.load_tampered(videos, shuffle_frames) if controlled else []
            if steps_ahead:
                self.stages.stream.decode_ahead(steps_ahead)
        prompts = shared_prompts(self.engine.sequence, [prompt for _, prompt in questions])
        self._prompts |= {prompt.sample_id: prompt for prompt in prompts.everybody}
        trains, share = self.policy.vision.trains, self.policy.settings.share_prefix
        # A trained tower runs here, once, with its graph, and all ranks enter it together. Generation and training use
        # its output. Where it is not known yet which questions train, it runs without for generation. Where nothing is
        # shared, it runs for every rollout wherever its output is needed.
        with self.phases.timed("vision"):
            vision = self._features(prompts) if trains and to_train and share else None
        with self.phases.timed("rollout"), self.engine.weights_at_hand():
            # A frozen tower may be entered by each rank as often as it needs, so it runs where all weights are at hand.
            features = vision if trains or not share else self._features(prompts)
            groups = self._sample(self.stages.sampler, questions, step, prompts)
            controls = self._sample(self.stages.control, shuffled, f"{step}/control") if controlled else []
        groups, features = self._answered(groups, features)
        with self.phases.timed("rewards"):
            groups = reward_groups(groups, self.stages.rewarder, self._should_stop)
            by_id = {
                control.sample.sample_id: self.stages.rewarder.accuracies(responses_of([control]), self._should_stop)
                for control in controls
            }
            longest = self.config.rollout.max_new_tokens
            groups = [
                shape_rewards(group, by_id.get(group.sample.sample_id), self.algorithm, longest) for group in groups
            ]
            self._controls |= by_id
        with self.phases.waiting():
            agree_to_go_on()
        return groups, features if to_train else None

    def _features(self, prompts: SharedPrompts) -> StepFeatures:
        """Of this process's prompts; made together with those of the other sequence ranks."""
        features = StepFeatures(self.policy, prompts.everybody, self.engine.sequence, self.engine.everyone)
        self._held.append(features)
        return features.of(prompts.own)

    def _sample(
        self,
        sampler: Sampler | None,
        questions: Sequence[tuple[Sample, Prompt]],
        key: int | str,
        prompts: SharedPrompts | None = None,
    ) -> list[RolloutGroup]:
        """Rollouts of every question under the policy as it is now; none of one where a server failed.

        ``prompts``: those of the questions, with the other sequence ranks'.
        """
        assert sampler is not None
        sequence, version = self.engine.sequence, self.policy.weights_version
        of_all = None
        if prompts is not None:
            of_all = sampler_of_all(sequence, sampler, prompts, self.config.rollout.split)
        if prompts is not None and of_all is not None:
            rollouts = rollouts_together(sequence, of_all, prompts, key)
        else:
            rollouts = sampler.generate([prompt for _, prompt in questions], key)
        sampler.report(self._sampling)
        return [
            RolloutGroup(sample, prompt, of_prompt, version, order=self._asked[sample.sample_id])
            for (sample, prompt), of_prompt in zip(questions, rollouts, strict=True)
        ]

    def _answered(
        self, groups: list[RolloutGroup], features: StepFeatures | None
    ) -> tuple[list[RolloutGroup], StepFeatures | None]:
        """Without the questions for which a server had no usable rollouts; those are recorded."""
        faults = self.stages.sampler.take_faults()
        if faults is not None:  # on all ranks or on none
            self.stages.stream.record(faults)
        places = [place for place, group in enumerate(groups) if group.rollouts]
        if len(places) == len(groups):
            return groups, features
        return [groups[place] for place in places], None if features is None else features.of(places)

    def _replace_without_spread(
        self, step: int, groups: list[RolloutGroup]
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], dict[str, float]]:
        """DAPO's dynamic sampling: groups with spread, those without, and how many came from further questions."""
        dropped: list[RolloutGroup] = []
        resampled = 0.0
        for _ in range(self.algorithm.resample_rounds):
            dropped += [group for group in groups if not has_spread(group)]
            missing = int(self._sum(sum(not has_spread(group) for group in groups)))
            groups = [group for group in groups if has_spread(group)]
            samples = self._take(missing) if missing else []
            if not samples:
                break
            more, _ = self._round(step, samples)
            resampled += self._sum(len(more))
            groups = groups + more
        dropped += [group for group in groups if not has_spread(group)]
        groups = [group for group in groups if has_spread(group)]
        unfilled = self.config.training.prompts_per_step - self._sum(len(groups))
        return groups, dropped, {RESAMPLED: resampled, UNFILLED: max(0.0, unfilled)}

    def _count_controls(self, groups: Sequence[RolloutGroup]) -> None:
        compared = [group for group in groups if group.sample.sample_id in self._controls]
        earned = [any((reward.parts.get("temporal") or 0.0) > 0 for reward in group.rewards) for group in compared]
        valued = [value for of_control in self._controls.values() for value in of_control if value is not None]
        if compared:
            self._seen.add(TEMPORAL_BONUS, sum(earned), len(compared))
        if valued:
            self._seen.add(TEMPORAL_CONTROL, sum(valued), len(valued))

    def _with_advantages(self, step: int, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """The groups with advantages, and pruned."""
        algorithm = self.algorithm
        kl = self._kl(groups) if self._kl_in_reward else []
        if self._kl_in_reward and algorithm.kl_in == "reward":
            groups = [
                add_parts(group, {"kl": [-algorithm.kl_coef * float(values.sum()) for values in of_group]})
                for group, of_group in zip(groups, kl, strict=True)
            ]
        groups = advantage_groups(groups, algorithm, self.stages.rewarder.weights, self.engine.ranks)
        if self._kl_in_reward and algorithm.kl_in == "token_reward":
            groups = token_advantage_groups(groups, kl, algorithm, self.policy.device)
        return prune_groups(groups, algorithm, f"{self.config.run.seed}/{step}")

    def _kl(self, groups: Sequence[RolloutGroup]) -> list[list[torch.Tensor]]:
        """Per token of each rollout: the KL of the policy that sampled to the reference."""
        assert self.stages.reference is not None
        algorithm = self.algorithm
        asked = [ResponseGroup(group.prompt, tuple(r.token_ids for r in group.rollouts)) for group in groups]
        with (
            self.phases.timed("reference"),
            self.stages.around_reference(),
            self.engine.weights_at_hand(),
        ):
            scored = scores_together(
                self.engine, self.stages.reference, asked, self._prompts, self.config.rollout.temperature
            )
        found = [
            [
                kl_penalty(rollout.rollout_logprobs, ref, algorithm.kl_estimator, algorithm.log_ratio_clamp)
                for rollout, ref in zip(group.rollouts, of_group, strict=True)
            ]
            for group, of_group in zip(groups, scored, strict=True)
        ]
        for values in (values for of_group in found for values in of_group):
            self._seen.add(KL, float(values.sum()), len(values))
        return found

    def _fill(
        self, step: int, groups: Sequence[RolloutGroup]
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], dict[str, float]]:
        """CPPO's dynamic completion allocation: further questions until an update has its tokens back.

        Returns:
            Groups that train too; groups that were sampled and did not fit any more; counts.
        """
        first = int(self._sum(len(groups)))
        # With equally long responses, G / k times as many questions have as many tokens at the most.
        kept = num_kept(self.config.rollout.num_generations, self.algorithm.prune_rate)
        most = math.ceil(MOST_QUESTIONS * first * self.config.rollout.num_generations / kept)
        budget = int(self._sum(sum(map(all_tokens, groups))))
        used = int(self._sum(sum(map(kept_tokens, groups))))
        asked = sampled = first
        accepted: list[RolloutGroup] = []
        refused: list[RolloutGroup] = []
        for _ in range(FILL_ROUNDS):
            needed = questions_needed(used, budget, used / asked) if used < (1 - FULL_ENOUGH) * budget and used else 0
            samples = self._take(min(needed, most - sampled)) if needed and sampled < most else []
            if not samples:
                break
            sampled += len(samples)
            more, _ = self._round(step, samples)
            if self.algorithm.resample_rounds:
                refused += [group for group in more if not has_spread(group)]
                more = [group for group in more if has_spread(group)]
            more = self._with_advantages(step, more)
            fitting, used = self._fitting(samples, more, used, budget)
            asked += len(fitting)
            accepted += [group for group in more if group.sample.sample_id in fitting]
            refused += [group for group in more if group.sample.sample_id not in fitting]
        counts: dict[str, float] = {FILLED: self._sum(len(accepted)), UNUSED: self._sum(len(refused))}
        return accepted, refused, counts | {TOKEN_BUDGET: float(budget), KEPT_TOKENS: float(used)}

    def _fitting(
        self, samples: Sequence[Sample], groups: Sequence[RolloutGroup], used: int, budget: int
    ) -> tuple[set[str], int]:
        """Which of a round's questions still fit, in the order of the stream, and the tokens used then."""
        here = {group.sample.sample_id: kept_tokens(group) for group in groups}
        cost = {name: tokens for of_rank in gather_objects(here) for name, tokens in of_rank.items()}
        fitting: set[str] = set()
        for sample in samples:
            tokens = cost.get(sample.sample_id)
            if tokens is None:
                continue
            if fits(used, budget, tokens) or (tokens == 0 and self.algorithm.prune_correction):
                fitting.add(sample.sample_id)
                used += tokens
        return fitting, used

    def _sum(self, count: float) -> float:
        return sum_over_ranks({"count": float(count)}, self.policy.device)["count"]
