"""The training loop: questions -> rollouts -> rewards -> update -> what is seen of it -> checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from vlm_pg.batching.cost import CostModel
from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.distributed import gather_objects, sum_over_ranks
from vlm_pg.errors import SampleError, TooManyBadSamples, VlmPgError
from vlm_pg.metrics import SECONDS_CHART, THROUGHPUT_CHART, Chart, Metric
from vlm_pg.models.memory_sizes import LanguageShape
from vlm_pg.models.reference import ScoringPolicy, answering
from vlm_pg.observe.console import Console
from vlm_pg.observe.metrics import MetricsLog
from vlm_pg.observe.presence import FolderGone, Presence
from vlm_pg.observe.rollouts import RolloutsLog
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.sharing import generation_line, sharing_line
from vlm_pg.observe.trace import Timeline
from vlm_pg.observe.trackers.trackers import Trackers
from vlm_pg.plan.flops import cost_model
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.engine import NEW_TOKENS, RolloutEngine
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.threads import CoreWatch, waiting_warning
from vlm_pg.training import checkpoints
from vlm_pg.training.behaviour import mismatch_due, mismatch_warning
from vlm_pg.training.best import RunningScore, point_to_best
from vlm_pg.training.collect import Collector, Stages, StepBatch
from vlm_pg.training.engines import Engine
from vlm_pg.training.fit import checkpoint_settings
from vlm_pg.training.group_advantages import trains
from vlm_pg.training.group_metrics import group_metrics
from vlm_pg.training.phases import Phases
from vlm_pg.training.questions import QuestionStream, TrainingData
from vlm_pg.training.reward_errors import RewardErrors
from vlm_pg.training.samplers import make_control_sampler, make_sampler
from vlm_pg.training.saving import save_checkpoint
from vlm_pg.training.schedule import learning_rate
from vlm_pg.training.step import Update
from vlm_pg.training.stop import StopRequest
from vlm_pg.training.updates import run_updates
from vlm_pg.types import BadSample, RolloutGroup

PREFETCH_STEPS = 2

STEP_SECONDS = Metric("step_seconds", "s", "same", SECONDS_CHART)
PHASE_SECONDS = Metric("seconds/", "s", "same", SECONDS_CHART)
SAMPLED_PER_SECOND = Metric("generation/tokens_per_second", "new tokens per second", "same")
TOKENS_PER_SECOND = Metric("tokens_per_second", "tokens per second", "same", THROUGHPUT_CHART)
_ACCURACY_CHART = Chart("Accuracy on evaluation sets", 3)
EVAL_ACCURACY = Metric("eval/accuracy", "share right", "same", _ACCURACY_CHART)
SET_ACCURACY = Metric("eval/accuracy/", "share right", "same", _ACCURACY_CHART)
CORE_WAIT = Metric("core_wait_share", "share of the step", "same")


@dataclass
class Progress:
    """What a checkpoint carries beside weights and optimizer state; randomness follows from ``step``.

    ``questions``: places of the data's order that are behind. ``updates``: of the optimizer.
    """

    step: int = 0
    questions: int = 0
    updates: int = 0
    tokens_computed: float = 0.0
    tokens_repeated: float = 0.0

    @classmethod
    def read(cls, state: Mapping[str, Any], prompts_per_step: int) -> Progress:
        """From a checkpoint's state; one without counts is of a run in which every step was one update."""
        step = state["step"]
        questions = state.get("questions", step * prompts_per_step)
        updates = state.get("updates", step)
        return cls(step, questions, updates, state.get("tokens_computed", 0.0), state.get("tokens_repeated", 0.0))


@dataclass(frozen=True)
class Surroundings:
    """Where a run writes, what it says, who ends it, and who evaluates its weights (given what they are called).

    ``bad_log`` and ``presence`` (of the run's folder) are those of the rank that writes; None elsewhere.
    """

    folder: RunFolder
    console: Console
    stop: StopRequest
    phases: Phases
    timeline: Timeline
    bad_log: BadSampleLog | None = None
    presence: Presence | None = None
    evaluate: Callable[[str], Mapping[str, Any]] | None = None


class Trainer:
    """Owns nothing heavy itself; ``run`` takes a policy from one step to the last."""

    # While a step is sampled, its weights are those of the step before; within its updates they are those of no step.
    _doing: Literal["sampling", "updating", "evaluating", "showing"] = "sampling"

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        reference: ScoringPolicy | None,
        data: TrainingData,
        rewarder: Rewarder,
        around: Surroundings,
        progress: Progress,
    ):
        self.config, self.engine, self.policy, self.progress = config, engine, engine.policy, progress
        self.folder, self.console, self.stop, self.phases = around.folder, around.console, around.stop, around.phases
        self.timeline = around.timeline
        self._bad_log, self._presence, self._digests = around.bad_log, around.presence, dict(data.digests)
        should_stop = around.stop.between_tokens
        self.stream = QuestionStream(config, data, progress.questions, self._record_bad, engine.ranks, should_stop)
        self.sampler = make_sampler(config, self.policy, data.samples, self.folder.path, around.stop, self.console.warn)
        control = make_control_sampler(config, self.policy, should_stop)
        in_loss = config.algorithm.kl_in == "loss"
        scorer = None
        if reference is not None and not in_loss:
            scorer = PolicyScorer(reference, config.rollout.prefill_tokens, should_stop)
        stages = Stages(self.stream, self.sampler, control, rewarder, scorer, partial(answering, reference))
        self.collector = Collector(config, engine, stages, self.phases, should_stop)
        self._reference_in_loss = reference if in_loss else None
        self._told_sharing = False
        self._groups_sampled, self._first_place = 0, progress.questions
        self._costs = self._costs_of_work() if config.training.balance and engine.ranks.data_size > 1 else None
        self._reward_errors = RewardErrors(rewarder, self.console.warn)
        self._cores, self._told_waiting = CoreWatch(), False
        self._evaluate = around.evaluate if config.eval.every else None
        self._score = RunningScore(config.training.keep_best, latest=config.training.keep_best == EVAL_ACCURACY)

    def run(
        self, metrics: MetricsLog | None, rollouts_log: RolloutsLog | None, trackers: Trackers | None = None
    ) -> bool:
        """Train up to ``training.steps``. False if a stop was asked for; the work so far is in a checkpoint then."""
        steps = self.config.training.steps
        first = self.progress.step + 1
        self._cores.waiting_share()  # of the steps alone
        if isinstance(self.sampler, RolloutEngine):
            self.sampler.warm_up(meanwhile=partial(self.stream.decode_ahead, 1))
        try:
            with self.console.progress("training", steps) as bar:
                bar.advance(self.progress.step)
                while self.progress.step < steps:
                    if self.stop.agreed(self.policy.device):
                        raise InterruptedError("training was asked to stop")
                    with self.timeline.step(self.progress.step + 1):
                        self._next_step(metrics, rollouts_log, trackers)
                    bar.advance()
                    self._refuse_nothing_usable(first)
        except InterruptedError:
            return self._stopped()
        except Exception as error:
            if self._is_worth_keeping(error):
                self._keep_finished_steps()
            raise
        return True

    def _next_step(
        self, metrics: MetricsLog | None, rollouts_log: RolloutsLog | None, trackers: Trackers | None
    ) -> None:
        with self.stop.together():
            values, groups = self._step(self.progress.step + 1)
        values[CORE_WAIT] = self._core_wait_share(self.progress.step + 1)
        self.progress.step += 1
        self.progress.questions = self.stream.place
        self._doing = "evaluating"
        stopped = self._evaluate_if_due(values)
        self._doing = "showing"
        self._score.add(values)
        if self._presence is not None:
            self._presence.check()
        with self.phases.timed("logs"):
            self._show(values, groups, metrics, rollouts_log)
            if trackers is not None:
                trackers.step_done(self.progress.step)
        if stopped is not None:
            raise stopped
        self._checkpoint_if_due()
        with self.phases.waiting():
            self.timeline.hand_in()
        self._doing = "sampling"

    def _evaluate_if_due(self, values: dict[str, float | None]) -> InterruptedError | None:
        """Add accuracies to the step's values. A stop that was asked for meanwhile is returned: the step is over, and
        its values are written without them."""
        step = self.progress.step
        if self._evaluate is None or step % self.config.eval.every != 0:
            return None
        try:
            results = self._evaluate(f"step-{step:06d}")
        except InterruptedError as stop:
            self.console.warn(f"stopped on request during the evaluation after step {step}, which is left out")
            return stop
        values[EVAL_ACCURACY] = results["accuracy"]
        values |= {SET_ACCURACY.of(name): figures["accuracy"] for name, figures in results["sets"].items()}
        return None

    def _core_wait_share(self, step: int) -> float | None:
        """How much of the step this process waited for a processor core; said once if that slows a CPU's threads."""
        share = self._cores.waiting_share()
        said = waiting_warning(share, torch.get_num_threads()) if self.policy.device.type == "cpu" else None
        if said is not None and not self._told_waiting:
            self._told_waiting = True
            self.console.warn(f"step {step}: {said}")
        return share

    def _refuse_nothing_usable(self, first: int) -> None:
        """Once every sample has been tried in vain, or the last step is over, there is nothing to wait for."""
        tried_all = self.stream.place - self._first_place >= self.stream.num_samples
        if self._groups_sampled or not (tried_all or self.progress.step == self.config.training.steps):
            return
        raise TooManyBadSamples(
            f"No question of steps {first} to {self.progress.step} could be used, so nothing was trained. The cause of "
            f"each is in {self.folder.bad_samples}; repair the data, or choose other records with data.train."
        )

    def _stopped(self) -> bool:
        """A step that was interrupted is sampled again, identically, after the resume."""
        self.save()
        self.console.warn(f"stopped on request after step {self.progress.step}; run.resume=auto continues from there")
        return False

    def _is_worth_keeping(self, error: Exception) -> bool:
        """Whether the weights are those of the last finished step, and that step is not what is at fault."""
        if self._doing == "evaluating":
            return True
        if self._doing == "sampling":
            return self.progress.step > 0 or isinstance(error, ServerError | SampleError)
        return self._doing == "showing" and isinstance(error, OSError | FolderGone)

    def _keep_finished_steps(self) -> None:
        """Saving is for all ranks together, and with several the others may still be waiting for their answers."""
        if self.engine.ranks.world_size > 1:
            return
        try:
            if self._presence is not None:
                self.folder = RunFolder(self._presence.refuge())
            self.save()
        except (OSError, VlmPgError) as error:
            self.console.warn(f"the checkpoint of step {self.progress.step} could not be written: {error}")
            return
        where = "" if self._presence is None else f" in {self.folder.checkpoints}"
        self.console.warn(f"the checkpoint of step {self.progress.step} is written{where}")

    def _step(self, step: int) -> tuple[dict[str, float | None], list[RolloutGroup]]:
        start_seconds = time.perf_counter()
        self.phases.begin_step()
        ahead = min(PREFETCH_STEPS, self.config.training.steps - step)
        batch = self.collector.collect(step, ahead)
        values: dict[str, float | None] = group_metrics(batch.sampled, batch.groups)
        values |= batch.counts
        values |= self._reward_errors.count()
        values |= self._sampling_metrics(batch)
        self._groups_sampled += int(values["groups"] or 0)
        here = float(sum(trains(group) for group in batch.groups))
        if not sum_over_ranks({"groups": here}, self.policy.device)["groups"]:
            none = "no question could be used" if not values["groups"] else "no group had anything to learn from"
            self.console.warn(f"step {step}: {none}, so there was no update")
            return values | {STEP_SECONDS: time.perf_counter() - start_seconds}, batch.sampled
        with self.phases.timed("train"):
            self._doing = "updating"
            values |= self._update(batch, step)
        if not self._told_sharing:
            self._told_sharing = True
            share = self.config.model.share_prefix
            self.console.info(sharing_line(values, share))
            if "generation/prefill_tokens" in values:
                self.console.info(generation_line(values, share))
        seconds = time.perf_counter() - start_seconds
        values |= {PHASE_SECONDS.of(name): seconds for name, seconds in self.phases.of_step.items()}
        values |= {STEP_SECONDS: seconds, TOKENS_PER_SECOND: (values["tokens_computed"] or 0.0) / seconds}
        return values, batch.sampled

    def _costs_of_work(self) -> CostModel:
        policy = self.policy
        return cost_model(LanguageShape.of(policy.family, policy.model.config), policy.checkpointing)

    def _sampling_metrics(self, batch: StepBatch) -> dict[str, float | None]:
        """What the samplers did, or what a server owed. A collective."""
        found: dict[str, float | None] = batch.sampling.reduced()
        if NEW_TOKENS in found:
            found[SAMPLED_PER_SECOND] = (found[NEW_TOKENS] or 0.0) / self.phases.of_step["rollout"]
        return found

    def _update(self, batch: StepBatch, step: int) -> dict[str, float]:
        compared = self.sampler.scores_itself and mismatch_due(self.config.rollout, step)
        rate = learning_rate(self.config.training, step)
        update = Update(
            batch.groups, rate, batch.vision, compared, batch.prompts, self._costs, waiting=self.phases.waiting
        )
        values = run_updates(self.engine, self._reference_in_loss, update, self.config)
        if self._reference_in_loss is None:
            values.pop("kl")  # of the reward, if anywhere
        warning = mismatch_warning(values)
        if warning is not None:
            self.console.warn(f"step {step}: {warning}")
        if values["updates"] < self.config.algorithm.updates:
            self.console.warn(
                f"step {step}: {values['updates']:.0f} of {self.config.algorithm.updates} updates, because fewer "
                "groups train than algorithm.minibatches asks for; raise training.prompts_per_step"
            )
        self.progress.updates += int(values["updates"])
        self.progress.tokens_computed += values["tokens_computed"]
        self.progress.tokens_repeated += values["tokens_repeated"]
        return values

    def _record_bad(self, seen: int, bad: Sequence[BadSample]) -> None:
        """All ranks' faults go into one file, and count against one limit."""
        everything = gather_objects((seen, list(bad)))
        if self._bad_log is not None:
            faults = [fault for _, of_rank in everything for fault in of_rank]
            self._bad_log.record_tried(sum(count for count, _ in everything), faults)

    def _show(
        self,
        values: dict[str, float | None],
        groups: list[RolloutGroup],
        metrics: MetricsLog | None,
        rollouts_log: RolloutsLog | None,
    ) -> None:
        step = self.progress.step
        self.console.step_line(step, self.config.training.steps, values)
        every = self.config.observe.print_rollouts_every
        if every and (step == 1 or step % every == 0):
            self.console.rollout_table(groups, limit=3)
        if metrics is not None:
            metrics.write(step, values)
        if rollouts_log is not None:
            rollouts_log.write(step, groups)

    def _checkpoint_if_due(self) -> None:
        every = self.config.training.checkpoint_every
        step = self.progress.step
        if (every and step % every == 0) or step == self.config.training.steps:
            self.save()

    def save(self) -> None:
        """Write the checkpoint of the step just finished, unless it is there already, and remove the oldest ones."""
        path = checkpoints.checkpoint_path(self.folder.checkpoints, self.progress.step)
        if self.engine.ranks.first_says(lambda: checkpoints.problem_with(path)) is None:
            return
        with self.phases.timed("checkpoint"):
            state: dict[str, Any] = {
                "questions": self.progress.questions,
                "updates": self.progress.updates,
                "tokens_computed": self.progress.tokens_computed,
                "tokens_repeated": self.progress.tokens_repeated,
                "seconds": self.phases.seconds,
                "settings": checkpoint_settings(self.config),
                "data": self._digests,
                **self._score.entry(),
            }
            save_checkpoint(self.folder.checkpoints, self.progress.step, self.policy, self.engine, state)
            self._score.begin_again()
            if self.engine.ranks.is_first:
                best = point_to_best(self.folder.checkpoints, self.config.training.keep_best, self.console.warn)
                checkpoints.prune(self.folder.checkpoints, self.config.training.keep_checkpoints, best)
        self.sampler.use_checkpoint(path)
