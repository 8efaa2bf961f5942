"""The training loop: collect -> update -> evaluate -> log -> checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.distributed import gather_objects, sum_over_ranks
from vlm_pg.errors import SampleError, ServerError, TooManyBadSamples, VlmPgError
from vlm_pg.metrics import SECONDS_CHART, THROUGHPUT_CHART, Chart, Metric
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import ScoringPolicy
from vlm_pg.observe.console import Console, generation_line, sharing_line
from vlm_pg.observe.logs import MetricsLog, RolloutsLog
from vlm_pg.observe.run_folder import FolderGone, Presence, RunFolder
from vlm_pg.observe.timeline import Timeline
from vlm_pg.observe.trackers import Trackers
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.threads import CoreWatch, waiting_warning
from vlm_pg.training import checkpoints
from vlm_pg.training.checkpoints import RunningScore, point_to_best
from vlm_pg.training.collect import StepBatch
from vlm_pg.training.engines import Engine, learning_rate
from vlm_pg.training.groups import Update, trains
from vlm_pg.training.loss import mismatch_due, mismatch_warning
from vlm_pg.training.phases import Phases
from vlm_pg.training.questions import QuestionStream, TrainingData
from vlm_pg.training.saving import checkpoint_settings, save_checkpoint
from vlm_pg.training.setup import BatchParts, make_batches
from vlm_pg.training.stop import StopRequest
from vlm_pg.training.updates import run_updates
from vlm_pg.types import BadSample, RolloutGroup

PREFETCH_STEPS = 2

STEP_SECONDS = Metric("step_seconds", "s", "same", SECONDS_CHART)
PHASE_SECONDS = Metric("seconds/", "s", "same", SECONDS_CHART)
TOKENS_PER_SECOND = Metric("tokens_per_second", "tokens per second", "same", THROUGHPUT_CHART)
_ACCURACY_CHART = Chart("Accuracy on evaluation sets", 3)
EVAL_ACCURACY = Metric("eval/accuracy", "share right", "same", _ACCURACY_CHART)
SET_ACCURACY = Metric("eval/accuracy/", "share right", "same", _ACCURACY_CHART)
CORE_WAIT = Metric("core_wait_share", "share of the step", "same")


@dataclass
class Progress:
    """Counts in a checkpoint beside weights and optimizer state; random numbers derive from ``step``.

    ``questions``: position in the data's order. ``updates``: of the optimizer. ``reference_logprobs``: of preference
    pairs, see ``PairBatches``.
    """

    step: int = 0
    questions: int = 0
    updates: int = 0
    tokens_computed: float = 0.0
    tokens_repeated: float = 0.0
    reference_logprobs: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def read(cls, state: Mapping[str, Any], prompts_per_step: int) -> Progress:
        """From a checkpoint's state; one without counts is of a run in which every step was one update."""
        step = state["step"]
        questions, updates = state.get("questions", step * prompts_per_step), state.get("updates", step)
        computed, repeated = state.get("tokens_computed", 0.0), state.get("tokens_repeated", 0.0)
        return cls(step, questions, updates, computed, repeated, state.get("reference_logprobs", {}))


@dataclass(frozen=True)
class StepLogs:
    """Logs of every step; all None on other ranks than 0."""

    metrics: MetricsLog | None = None
    rollouts: RolloutsLog | None = None
    trackers: Trackers | None = None

    def write(self, step: int, values: Mapping[str, float | None], groups: Sequence[RolloutGroup]) -> None:
        if self.metrics is not None:
            self.metrics.write(step, values)
        if self.rollouts is not None:
            self.rollouts.write(step, groups)
        if self.trackers is not None:
            self.trackers.step_done(step)


class Trainer:
    """The training loop.

    Args:
        bad_log, presence: of the run's folder, on rank 0; None elsewhere.
        evaluate: evaluation of the present weights, given its tag.
    """

    # While a step is sampled, its weights are those of the step before; within its updates they are those of no step.
    _phase: Literal["sampling", "updating", "evaluating", "logging"] = "sampling"

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        reference: ScoringPolicy | None,
        teacher: Policy | None,
        data: TrainingData,
        rewarder: Rewarder,
        progress: Progress,
        *,
        folder: RunFolder,
        console: Console,
        stop: StopRequest,
        phases: Phases,
        timeline: Timeline,
        bad_log: BadSampleLog | None,
        presence: Presence | None,
        evaluate: Callable[[str], Mapping[str, Any]] | None,
    ):
        self.config, self.engine, self.policy, self.progress = config, engine, engine.policy, progress
        self.folder, self.console, self.stop = folder, console, stop
        self.phases, self.timeline = phases, timeline
        self._bad_log, self._presence = bad_log, presence
        self._evaluate = evaluate if config.eval.every else None
        self._digests = dict(data.digests)
        question_at, should_stop = progress.questions, stop.between_tokens
        self.stream = QuestionStream(config, data, question_at, self._record_bad, engine.ranks, should_stop)
        known = progress.reference_logprobs
        parts = BatchParts(self.stream, data.samples, rewarder, folder.path, phases, stop, console.warn, known)
        self.batches = make_batches(config, engine, reference, teacher, parts)
        in_loss = config.algorithm.kl_in == "loss" and config.training.objective == "rl"
        self._reference_in_loss = reference if in_loss else None
        if config.training.balance and engine.parallel is not None:
            engine.parallel.balance_work()
        self._logged_sharing = self._warned_of_cores = False
        self._groups_sampled, self._first_question = 0, progress.questions
        self._cores = CoreWatch()
        self._score = RunningScore(config.training.keep_best, latest=config.training.keep_best == EVAL_ACCURACY)

    def run(self, logs: StepLogs) -> bool:
        """Train up to ``training.steps``. False if a stop was requested; the work so far is in a checkpoint then."""
        steps = self.config.training.steps
        first = self.progress.step + 1
        self._cores.waiting_share()  # of the steps alone
        self.batches.warm_up()
        try:
            with self.console.progress("training", steps) as bar:
                bar.advance(self.progress.step)
                while self.progress.step < steps:
                    if self.stop.agreed(self.policy.device):
                        raise InterruptedError("stop requested")
                    with self.timeline.step(self.progress.step + 1):
                        self._next_step(logs)
                    bar.advance()
                    self._refuse_nothing_usable(first)
        except InterruptedError:
            # A step that was interrupted is sampled again, identically, after the resume.
            self.save()
            step = self.progress.step
            self.console.warn(f"stopped on request after step {step}; run.resume=auto continues from there")
            return False
        except Exception as error:
            if self._is_worth_saving(error):
                self._save_finished_steps()
            raise
        return True

    def _next_step(self, logs: StepLogs) -> None:
        with self.stop.together():
            values, groups = self._step(self.progress.step + 1)
        values[CORE_WAIT] = self._core_wait_share(self.progress.step + 1)
        self.progress.step += 1
        self.progress.questions = self.batches.position
        self._phase = "evaluating"
        stopped = self._evaluate_if_due(values)
        self._phase = "logging"
        self._score.add(values)
        if self._presence is not None:
            self._presence.check()
        step, every, of_steps = self.progress.step, self.config.observe.print_rollouts_every, self.config.training.steps
        with self.phases.timed("logs"):
            self.console.step_line(step, of_steps, values)
            if every and (step == 1 or step % every == 0):
                self.console.rollout_table(groups, limit=3)
            logs.write(step, values, groups)
        if stopped is not None:
            raise stopped
        every = self.config.training.checkpoint_every
        if (every and step % every == 0) or step == of_steps:
            self.save()
        with self.phases.waiting():
            self.timeline.flush()
        self._phase = "sampling"

    def _step(self, step: int) -> tuple[dict[str, float | None], list[RolloutGroup]]:
        """One training step; its metrics and the groups it sampled."""
        start_seconds = time.perf_counter()
        self.phases.begin_step()
        batch = self.batches.collect(step, min(PREFETCH_STEPS, self.config.training.steps - step))
        values = dict(batch.values)
        self._groups_sampled += int(values["groups"] or 0)
        here = float(sum(map(trains, batch.groups)))
        if not sum_over_ranks({"groups": here}, self.policy.device)["groups"]:
            none = "no question could be used" if not values["groups"] else "no group had anything to learn from"
            self.console.warn(f"step {step}: {none}, so there was no update")
            return values | {STEP_SECONDS: time.perf_counter() - start_seconds}, batch.sampled
        with self.phases.timed("train"):
            self._phase = "updating"
            values |= self._update(batch, step)
        if not self._logged_sharing:
            self._logged_sharing, share = True, self.config.model.share_prefix
            self.console.info(sharing_line(values, share))
            if "generation/prefill_tokens" in values:
                self.console.info(generation_line(values, share))
        seconds = time.perf_counter() - start_seconds
        values |= {PHASE_SECONDS.of(name): seconds for name, seconds in self.phases.of_step.items()}
        values |= {STEP_SECONDS: seconds, TOKENS_PER_SECOND: (values["tokens_computed"] or 0.0) / seconds}
        return values, batch.sampled

    def _update(self, batch: StepBatch, step: int) -> dict[str, float]:
        """The step's optimizer updates; their metrics."""
        compared = self.batches.scores_itself and mismatch_due(self.config.rollout, step)
        rate = learning_rate(self.config.training, step)
        update = Update(batch.groups, rate, batch.vision, compared, waiting=self.phases.waiting)
        values = run_updates(self.engine, self._reference_in_loss, update, self.config)
        if self._reference_in_loss is None:
            values.pop("kl")  # of the reward, if anywhere
        if warning := mismatch_warning(values):
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

    def _evaluate_if_due(self, values: dict[str, float | None]) -> InterruptedError | None:
        """Add accuracies to the step's values. A stop requested meanwhile is returned: the step is over, and its values
        are written without them."""
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
        """Share of the step in which this process waited for a processor core; warns once where that slows a CPU."""
        share = self._cores.waiting_share()
        warning = waiting_warning(share, torch.get_num_threads()) if self.policy.device.type == "cpu" else None
        if warning is not None and not self._warned_of_cores:
            self._warned_of_cores = True
            self.console.warn(f"step {step}: {warning}")
        return share

    def _refuse_nothing_usable(self, first: int) -> None:
        """Raise once every sample has been tried in vain, or the last step is over."""
        tried_all = self.progress.questions - self._first_question >= self.stream.num_samples
        if self._groups_sampled or not (tried_all or self.progress.step == self.config.training.steps):
            return
        raise TooManyBadSamples(
            f"No question of steps {first} to {self.progress.step} could be used, so nothing was trained. The cause of "
            f"each is in {self.folder.bad_samples}; repair the data, or choose other records with data.train."
        )

    def _record_bad(self, seen: int, bad: Sequence[BadSample]) -> None:
        """Bad samples of all ranks go into one file, and count against one limit."""
        everything = gather_objects((seen, list(bad)))
        if self._bad_log is not None:
            faults = [fault for _, of_rank in everything for fault in of_rank]
            self._bad_log.record_tried(sum(count for count, _ in everything), faults)

    def _is_worth_saving(self, error: Exception) -> bool:
        """Whether the weights are those of the last finished step, and that step is not at fault."""
        if self._phase == "evaluating":
            return True
        if self._phase == "sampling":
            return self.progress.step > 0 or isinstance(error, ServerError | SampleError)
        return self._phase == "logging" and isinstance(error, OSError | FolderGone)

    def _save_finished_steps(self) -> None:
        """Of one process: saving is a collective, and the other ranks may still wait for their responses."""
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

    def save(self) -> None:
        """Write the checkpoint of the step just finished, unless it exists already, and remove the oldest ones."""
        folder, progress = self.folder.checkpoints, self.progress
        path = checkpoints.checkpoint_path(folder, progress.step)
        if self.engine.ranks.from_rank0(lambda: checkpoints.problem_with(path)) is None:
            return
        with self.phases.timed("checkpoint"):
            state: dict[str, Any] = {
                "questions": progress.questions,
                "updates": progress.updates,
                "tokens_computed": progress.tokens_computed,
                "tokens_repeated": progress.tokens_repeated,
                "reference_logprobs": dict(progress.reference_logprobs),
                "seconds": self.phases.seconds,
                "settings": checkpoint_settings(self.config),
                "data": self._digests,
                **self._score.entry(),
            }
            save_checkpoint(folder, progress.step, self.policy, self.engine, state)
            self._score.reset()
            if self.engine.ranks.is_rank0:
                best = point_to_best(folder, self.config.training.keep_best, self.console.warn)
                checkpoints.prune(folder, self.config.training.keep_checkpoints, best)
