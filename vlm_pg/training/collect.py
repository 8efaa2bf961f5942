"""A step's batch for reinforcement learning: questions, rollouts, rewards, advantages, pruning.

A step begins with ``training.prompts_per_step`` questions. Further ones replace groups without spread (DAPO's dynamic
sampling) and use the tokens that pruning freed (CPPO's dynamic completion allocation). They are chosen over all ranks
together, so they do not depend on the number of ranks (except where rollouts are pruned rank by rank).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch

from vlm_pg.algorithms.losses import KL, kl_penalty
from vlm_pg.algorithms.pruning import fits, num_kept, questions_needed
from vlm_pg.config import RunConfig
from vlm_pg.distributed import check_stop, gather_objects, sum_over_ranks
from vlm_pg.metrics import Chart, Metric
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.contracts import Sampler, Scorer, control_key
from vlm_pg.rollout.engine import NEW_TOKENS, RolloutEngine
from vlm_pg.rollout.scoring import TeacherScorer
from vlm_pg.tally import Tally
from vlm_pg.training.engines import Engine
from vlm_pg.training.groups import (
    KEPT_TOKENS,
    add_parts,
    advantage_groups,
    all_tokens,
    group_metrics,
    has_spread,
    kept_tokens,
    prune_groups,
    responses_of,
    reward_groups,
    shape_rewards,
    token_advantage_groups,
    trains,
    without_truncated,
)
from vlm_pg.training.phases import Phases
from vlm_pg.training.questions import QuestionStream
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.types import Prompt, Rollout, RolloutGroup, Sample, TopTokens

# Costs of questions vary, so another round fills the rest; few rounds get within half a question.
FILL_ROUNDS = 16
# Where pruning keeps much less than usual (a correction that draws nothing of flat groups), filling ends at this many
# times the questions that equally long responses would need.
MOST_QUESTIONS = 2
# A budget short by less than this share is full: a round for a question or two decodes at a poor rate.
FULL_ENOUGH = 0.03

_QUESTIONS_CHART = Chart("Questions per step", 16)
QUESTIONS = Metric("questions", "questions", "same", _QUESTIONS_CHART)
RESAMPLED = Metric("resampled_groups", "groups", "same", _QUESTIONS_CHART)
UNFILLED = Metric("unfilled_groups", "groups", "same")
FILLED = Metric("filled_groups", "groups", "same", _QUESTIONS_CHART)
UNUSED = Metric("unused_groups", "groups", "same", _QUESTIONS_CHART)
TOKEN_BUDGET = Metric("token_budget", "tokens", "same")
# T-GRPO: share of the groups with a control that earned the bonus, and how often the control was right.
TEMPORAL_BONUS = Metric("temporal/bonus_share", "share of groups")
TEMPORAL_CONTROL = Metric("temporal/accuracy_control", "share of rollouts")
SAMPLED_PER_SECOND = Metric("generation/tokens_per_second", "new tokens per second", "same")
REWARD_ERRORS = Metric("reward_errors/", "failures so far", "same")


@dataclass(frozen=True)
class Stages:
    """Processing of a step's questions.

    ``control``: samples T-GRPO's control groups; ``reference``: scores for a KL in the reward; ``teacher``: for
    distillation; None where there is none. ``around_reference``: context that all ranks enter around scoring by the
    reference.
    """

    stream: QuestionStream
    sampler: Sampler
    control: Sampler | None
    rewarder: Rewarder
    reference: Scorer | None
    teacher: TeacherScorer | None = None
    around_reference: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass
class StepBatch:
    """This rank's batch of a step.

    ``sampled``: every complete group, for logs, without visual features. ``groups``: those that train, pruned rollouts
    marked in ``kept``. ``vision``: the tower's run for training whose features the prompts of ``groups`` carry, if any.
    ``values``: the batch's metrics over all ranks.
    """

    sampled: list[RolloutGroup]
    groups: list[RolloutGroup]
    vision: StepFeatures | None
    values: dict[str, float | None]


class Batches(Protocol):
    """Makes the batch of each step for one objective (``training.objective``).

    ``position``: of the question stream behind the last step that was collected. ``scores_itself``: as of ``Sampler``.
    """

    position: int

    @property
    def scores_itself(self) -> bool: ...

    def warm_up(self) -> None:
        """Prepare for the first step; its media are decoded meanwhile."""

    def collect(self, step: int, steps_ahead: int) -> StepBatch:
        """The batch of ``step``; media of the next ``steps_ahead`` steps are decoded meanwhile. A collective.

        Raises:
            InterruptedError: a stop was requested.
        """


class _Loaded(NamedTuple):
    """Questions of this rank; ``shuffled``: those of control groups, with frames in random order."""

    questions: Sequence[tuple[Sample, Prompt]]
    shuffled: Sequence[tuple[Sample, Prompt]]


@dataclass(frozen=True)
class _Started:
    """Questions of a later step whose sampling has begun. ``position``: of the stream, behind them."""

    loaded: _Loaded
    order: dict[str, int]
    position: int


class Collector(Batches):
    """Batches of rollouts with rewards and advantages; sampling of later steps may have begun."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        stages: Stages,
        phases: Phases,
        should_stop: Callable[[], bool] = lambda: False,
        warn: Callable[[str], None] = lambda message: None,
    ):
        self.config, self.algorithm = config, config.algorithm
        self.engine, self.policy, self.parallel = engine, engine.policy, engine.parallel
        self.stages, self.phases = stages, phases
        self._should_stop = should_stop
        self._order: dict[str, int] = {}  # sample id -> index among the step's questions
        self._started: dict[int, _Started] = {}
        self.position = stages.stream.position
        self._controls: dict[str, list[float | None]] = {}
        self._tally, self._sampling = Tally(), Tally()
        self._reward_errors = RewardErrors(stages.rewarder, warn)

    @property
    def scores_itself(self) -> bool:
        return self.stages.sampler.scores_itself

    def warm_up(self) -> None:
        """See ``Batches``."""
        if isinstance(self.stages.sampler, RolloutEngine):
            self.stages.sampler.warm_up(meanwhile=partial(self.stages.stream.decode_ahead, 1))

    def collect(self, step: int, steps_ahead: int) -> StepBatch:
        """See ``Batches``."""
        sampler = self.stages.sampler
        with self.phases.timed("weights") if self.config.rollout.engine == "server" else nullcontext():
            sampler.sync_weights(step)
        batch = self._collect(step, steps_ahead)
        sampler.release_memory()
        self.sample_ahead(step)
        values = group_metrics(batch.sampled, batch.groups) | batch.values | self._reward_errors.count()
        values |= self._sampling.reduced()
        if NEW_TOKENS in values:
            values[SAMPLED_PER_SECOND] = (values[NEW_TOKENS] or 0.0) / self.phases.of_step["rollout"]
        return replace(batch, values=values)

    def _collect(self, step: int, steps_ahead: int) -> StepBatch:
        self._order, self._controls, self._tally, self._sampling = {}, {}, Tally(), Tally()
        if self.parallel is not None:
            self.parallel.prompts = {}
        if self._kl_in_reward:
            self._tally.add(KL, 0, 0)  # known, even where nothing was sampled
        if (started := self._started.pop(step, None)) is not None:
            self._order = started.order
        first = self._take(self.config.training.prompts_per_step) if started is None else started.loaded
        # Whether the first round's groups are those of one update, so that the tower need not run again.
        algorithm = self.algorithm
        further = algorithm.resample_rounds > 0 or (algorithm.prune_rate > 0 and algorithm.prune_fill)
        fixed = not further and algorithm.minibatches == 1
        groups, vision = self._round(step, first, steps_ahead, fixed)
        dropped: list[RolloutGroup] = []
        counts: dict[str, float] = {}
        if self.algorithm.resample_rounds:
            groups, dropped, counts = self._replace_without_spread(step, groups)
        groups = self._with_advantages(step, groups)
        if self.algorithm.prune_rate and self.algorithm.prune_fill:
            added, surplus, filled = self._fill(step, groups)
            groups, dropped, counts = groups + added, dropped + surplus, counts | filled
        if self.algorithm.temporal_bonus:
            self._count_controls(groups + dropped)
        if self.stages.teacher is not None:
            groups = self._taught(groups, self.stages.teacher)
        self.position = self.stages.stream.position if started is None else started.position
        sampled = groups + dropped
        for group in groups:
            if group.rollouts and group.rollouts[0].forward is not None:
                group.release_forwards(pruned_only=True)
        if self.algorithm.mask_truncated:
            groups = [without_truncated(group) for group in groups]
        # With prune correction, the loss averages over all sampled groups, including fully pruned ones.
        counts_anyway = self.algorithm.prune_correction
        return StepBatch(
            [group.without_features() for group in sampled],
            [group for group in groups if group.rollouts and (counts_anyway or trains(group))],
            vision,
            {QUESTIONS: self._sum(len(sampled)), **counts, **self._tally.reduced()},
        )

    def sample_ahead(self, step: int) -> None:
        """Begin to sample the steps behind ``step``, as far as ``rollout.staleness`` allows."""
        last = min(step + self.config.rollout.staleness, self.config.training.steps)
        for later in range(step + 1, last + 1):
            if later in self._started or not self.stages.sampler.may_start(later):
                continue
            self._order = {}
            loaded = self._load(later, self._take(self.config.training.prompts_per_step))
            self._started[later] = _Started(loaded, self._order, self.stages.stream.position)
            self.stages.sampler.start([prompt for _, prompt in loaded.questions], later)

    @property
    def _kl_in_reward(self) -> bool:
        return self.algorithm.kl_coef > 0 and self.algorithm.kl_in != "loss"

    def _take(self, count: int) -> list[Sample]:
        samples = self.stages.stream.take(count, self._order)
        self._order |= {sample.sample_id: len(self._order) + index for index, sample in enumerate(samples)}
        return samples

    def _load(self, step: int, samples: Sequence[Sample]) -> _Loaded:
        """This rank's share of ``samples``. Sampling of control groups begins here, where the sampler allows that."""
        with self.phases.timed("prompts"):
            questions = self.stages.stream.load(samples)
            if (control := self.stages.control) is None:
                return _Loaded(questions, ())
            from vlm_pg.media.controls import shuffle_frames

            videos = [sample for sample, _ in questions if any(ref.kind == "video" for ref in sample.media)]
            shuffled = self.stages.stream.load_tampered(videos, shuffle_frames)
        if control.may_start(step):
            control.start([prompt for _, prompt in shuffled], control_key(step))
        return _Loaded(questions, shuffled)

    def _round(
        self, step: int, samples: Sequence[Sample] | _Loaded, steps_ahead: int = 0, to_train: bool = False
    ) -> tuple[list[RolloutGroup], StepFeatures | None]:
        """Complete groups of this rank's share of ``samples``, with rewards; and the tower's run, if they train."""
        questions, shuffled = samples if isinstance(samples, _Loaded) else self._load(step, samples)
        if steps_ahead:
            with self.phases.timed("prompts"):
                self.stages.stream.decode_ahead(steps_ahead)
        prompts = [prompt for _, prompt in questions]
        if self.parallel is not None:
            prompts = self.parallel.gather_prompts(prompts)
        trains, share = self.policy.vision.trains, self.policy.settings.share_prefix
        vision = None
        # A trained tower runs here, once, with its graph, on all ranks together, for generation and training. Where the
        # questions that train are not known yet, it runs without graph for generation. Without sharing, it runs for
        # every rollout wherever its output is needed.
        with self.phases.timed("vision"):
            if trains and to_train and share:
                vision = self._encoded(prompts)
        with self.phases.timed("rollout"), self.engine.gathered_parameters():
            # Each rank enters a frozen tower as often as it needs, so it runs where all weights are gathered.
            if share and not trains:
                vision = self._encoded(prompts)
            groups = self._sample(questions, prompts if vision is None else vision.prompts, step)
            controls = self._sample_controls(shuffled, step)
        # Without questions for which a server had no usable rollouts.
        for sampler in (self.stages.sampler, self.stages.control):
            faults = None if sampler is None else sampler.take_faults()
            if faults is not None:  # on all ranks or on none
                self.stages.stream.record(faults)
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
            check_stop()
        return groups, vision if to_train else None

    def _encoded(self, prompts: Sequence[Prompt]) -> StepFeatures:
        return StepFeatures(self.policy, prompts, self.engine.sequence, self.engine.everyone)

    def _sample(
        self, questions: Sequence[tuple[Sample, Prompt]], prompts: Sequence[Prompt], step: int
    ) -> list[RolloutGroup]:
        """Rollouts of every question under the present policy, without those where a server failed.

        Args:
            prompts: of the questions on all sequence ranks, with visual features if they exist.
        """
        sampler = self.stages.sampler
        if self.parallel is None:
            rollouts = sampler.generate(prompts, step)
        else:
            self.parallel.prompts |= {prompt.sample_id: prompt for prompt in prompts}
            rollouts = self.parallel.generate(sampler, prompts, step, self.config.rollout.split)
            prompts = self.parallel.own(prompts)
        sampler.report(self._sampling)
        return self._groups([sample for sample, _ in questions], prompts, rollouts)

    def _sample_controls(self, shuffled: Sequence[tuple[Sample, Prompt]], step: int) -> list[RolloutGroup]:
        """T-GRPO's control groups: rollouts of questions whose frames are shuffled."""
        control = self.stages.control
        if control is None:
            return []
        prompts = [prompt for _, prompt in shuffled]
        rollouts = control.generate(prompts, control_key(step))
        control.report(self._sampling)
        return self._groups([sample for sample, _ in shuffled], prompts, rollouts)

    def _groups(
        self, samples: Sequence[Sample], prompts: Sequence[Prompt], rollouts: Sequence[tuple[Rollout, ...]]
    ) -> list[RolloutGroup]:
        groups = []
        for sample, prompt, of_prompt in zip(samples, prompts, rollouts, strict=True):
            if not of_prompt:
                continue
            present = self.policy.weights_version
            version = min(present if one.weights_version is None else one.weights_version for one in of_prompt)
            groups.append(RolloutGroup(sample, prompt, of_prompt, version, order=self._order[sample.sample_id]))
        return groups

    def _replace_without_spread(
        self, step: int, groups: list[RolloutGroup]
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], dict[str, float]]:
        """DAPO's dynamic sampling: groups with spread, groups without, counts."""
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
            self._tally.add(TEMPORAL_BONUS, sum(earned), len(compared))
        if valued:
            self._tally.add(TEMPORAL_CONTROL, sum(valued), len(valued))

    def _with_advantages(self, step: int, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """The groups with advantages, and pruned."""
        algorithm = self.algorithm
        if self.config.training.objective == "distill":
            return [replace(group, advantages=(0.0,) * len(group.rollouts)) for group in groups]
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
        """Per token of each rollout: the KL of the behaviour policy to the reference."""
        assert self.stages.reference is not None
        algorithm = self.algorithm
        responses = [group.response_group for group in groups]
        score = self.stages.reference.score
        if self.parallel is not None:
            score = partial(self.parallel.score, self.stages.reference)
        with self.phases.timed("reference"), self.stages.around_reference(), self.engine.gathered_parameters():
            scored = score(responses, self.config.rollout.temperature)
        found = [
            [
                kl_penalty(rollout.rollout_logprobs, ref, algorithm.kl_estimator, algorithm.log_ratio_clamp)
                for rollout, ref in zip(group.rollouts, of_group, strict=True)
            ]
            for group, of_group in zip(groups, scored, strict=True)
        ]
        for values in (values for of_group in found for values in of_group):
            self._tally.add(KL, float(values.sum()), len(values))
        return found

    def _taught(self, groups: list[RolloutGroup], teacher: TeacherScorer) -> list[RolloutGroup]:
        """The groups with the teacher's tokens, which reads each prompt once."""
        score = teacher.score if self.parallel is None else partial(self.parallel.score, teacher)
        with self.phases.timed("teacher"):
            found = score([group.response_group for group in groups], self.config.rollout.temperature)
        pairs = zip(groups, found, strict=True)
        return [replace(group, teacher=cast("tuple[TopTokens, ...]", tuple(one))) for group, one in pairs]

    def _fill(
        self, step: int, groups: Sequence[RolloutGroup]
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], dict[str, float]]:
        """CPPO's dynamic completion allocation: further questions until the update's token budget is used.

        Returns:
            Groups that train too; groups that were sampled and did not fit; counts.
        """
        first = int(self._sum(len(groups)))
        # With equally long responses, G / k times as many questions have at most as many tokens.
        kept = num_kept(self.config.rollout.num_generations, self.algorithm.prune_rate)
        most = math.ceil(MOST_QUESTIONS * first * self.config.rollout.num_generations / kept)
        budget = int(self._sum(sum(map(all_tokens, groups))))
        used = int(self._sum(sum(map(kept_tokens, groups))))
        used_by = sampled = first
        accepted: list[RolloutGroup] = []
        surplus: list[RolloutGroup] = []
        for _ in range(FILL_ROUNDS):
            needed = questions_needed(used, budget, used / used_by) if used < (1 - FULL_ENOUGH) * budget and used else 0
            samples = self._take(min(needed, most - sampled)) if needed and sampled < most else []
            if not samples:
                break
            sampled += len(samples)
            more, _ = self._round(step, samples)
            if self.algorithm.resample_rounds:
                surplus += [group for group in more if not has_spread(group)]
                more = [group for group in more if has_spread(group)]
            more = self._with_advantages(step, more)
            fitting, used = self._fitting(samples, more, used, budget)
            used_by += len(fitting)
            accepted += [group for group in more if group.sample.sample_id in fitting]
            surplus += [group for group in more if group.sample.sample_id not in fitting]
        counts: dict[str, float] = {FILLED: self._sum(len(accepted)), UNUSED: self._sum(len(surplus))}
        return accepted, surplus, counts | {TOKEN_BUDGET: float(budget), KEPT_TOKENS: float(used)}

    def _fitting(
        self, samples: Sequence[Sample], groups: Sequence[RolloutGroup], used: int, budget: int
    ) -> tuple[set[str], int]:
        """Ids of a round's questions that fit, in the order of the stream, and the tokens then used."""
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


class RewardErrors:
    """Failures of user-defined reward functions. Only rank 0 prints, so a first error on another rank is shown here."""

    def __init__(self, rewarder: Rewarder, warn: Callable[[str], None]):
        self._rewarder, self._warn = rewarder, warn
        self._shown: set[str] = set()

    def count(self) -> dict[str, float | None]:
        """Failures so far of each function that has failed, over all ranks. A collective."""
        rewarder = self._rewarder
        self._shown |= set(rewarder.first_errors)  # shown by the rewarder itself
        counts: Counter[str] = Counter()
        for failures, messages in gather_objects((dict(rewarder.failures), dict(rewarder.first_errors))):
            counts.update(failures)
            for name in messages.keys() - self._shown:
                self._shown.add(name)
                self._warn(messages[name])
        return {REWARD_ERRORS.of(name): float(count) for name, count in counts.items()}
