"""The training loop: questions -> rollouts -> rewards -> update -> what is seen of it -> checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.data.order import indices_for_step
from vlm_pg.errors import SampleError, TooManyBadSamples
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console
from vlm_pg.observe.metrics import MetricsLog
from vlm_pg.observe.rollouts import RolloutsLog
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.sharing import generation_line, sharing_line
from vlm_pg.prompts.source import PromptSource
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.memory import GIB
from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.training import checkpoints
from vlm_pg.training.behaviour import mismatch_due, mismatch_warning
from vlm_pg.training.collect import (
    advantage_groups,
    group_metrics,
    group_sums,
    make_rollout_engine,
    reward_groups,
    sample_groups,
)
from vlm_pg.training.dealing import share_of_rank
from vlm_pg.training.distributed import gather_objects, max_over_ranks, rank, sum_over_ranks, world_size
from vlm_pg.training.engines import Engine
from vlm_pg.training.persistence import checkpoint_settings, save_checkpoint
from vlm_pg.training.phases import Phases
from vlm_pg.training.schedule import learning_rate
from vlm_pg.training.step import update_policy
from vlm_pg.training.stop import StopRequest
from vlm_pg.training.vision_leaves import VisionLeaves
from vlm_pg.types import BadSample, Prompt, RolloutGroup, Sample

PREFETCH_STEPS = 2


@dataclass
class Progress:
    """What a checkpoint carries beside weights and optimizer state; data order and randomness follow from ``step``."""

    step: int = 0
    tokens_computed: float = 0.0
    tokens_repeated: float = 0.0


class Trainer:
    """Owns nothing heavy itself; ``run`` takes a policy from one step to the last."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        engine: Engine,
        reference: Policy | None,
        samples: Sequence[Sample],
        source: PromptSource,
        bad_log: BadSampleLog | None,
        console: Console,
        stop: StopRequest,
        phases: Phases,
        progress: Progress,
    ):
        self.config, self.folder, self.engine, self.reference = config, folder, engine, reference
        self.samples, self.source, self.bad_log = samples, source, bad_log
        self.console, self.stop, self.phases, self.progress = console, stop, phases, progress
        self.policy = engine.policy
        self.rollouts = make_rollout_engine(
            config, self.policy, samples, folder.path, stop.between_tokens, console.warn
        )
        self._told_sharing = False
        self._updates = 0

    def run(self, metrics: MetricsLog | None, rollouts_log: RolloutsLog | None) -> bool:
        """Train up to ``training.steps``. False if a stop was asked for; the work so far is in a checkpoint then."""
        steps = self.config.training.steps
        first = self.progress.step + 1
        try:
            with self.console.progress("training", steps) as bar:
                bar.advance(self.progress.step)
                while self.progress.step < steps:
                    if self.stop.agreed(self.policy.device):
                        raise InterruptedError("training was asked to stop")
                    values, groups = self._step(self.progress.step + 1)
                    self.progress.step += 1
                    self._show(values, groups, metrics, rollouts_log)
                    self._checkpoint_if_due()
                    bar.advance()
        except InterruptedError:
            return self._stopped()
        except (ServerError, SampleError):
            self._keep_finished_steps()
            raise
        if first <= steps and not self._updates:
            raise TooManyBadSamples(
                f"No question of steps {first} to {steps} could be used, so nothing was trained. The cause of each is "
                f"in {self.folder.bad_samples}; repair the data, or choose other records with data.train."
            )
        return True

    def _stopped(self) -> bool:
        """A step that was interrupted is sampled again, identically, after the resume."""
        self.save()
        self.console.warn(f"stopped on request after step {self.progress.step}; run.resume=auto continues from there")
        return False

    def _keep_finished_steps(self) -> None:
        """Saving is for all ranks together, and with several the others may still be waiting for their answers."""
        if world_size() == 1:
            self.save()
            self.console.warn(f"the checkpoint of step {self.progress.step} is written")

    def _step(self, step: int) -> tuple[dict[str, float | None], list[RolloutGroup]]:
        start_seconds = time.perf_counter()
        with self.phases.timed("prompts"):
            questions = self._questions(step)
        prompts = [prompt for _, prompt in questions]
        # A trained tower runs here, once, with its graph, and all ranks enter it together. A frozen one may be entered
        # by each rank as often as it needs, so it runs where all weights are at hand. Generation and training use its
        # output.
        with self.phases.timed("vision"):
            leaves = VisionLeaves(self.policy, prompts) if self.policy.vision.trains else None
        with self.phases.timed("rollout"), self.engine.generation():
            leaves = leaves or VisionLeaves(self.policy, prompts)
            groups = sample_groups(self.rollouts, questions, step)
        with self.phases.timed("rewards"):
            groups = reward_groups(groups, self.config.reward)
            groups = advantage_groups(groups, self.config.algorithm)
        sums = sum_over_ranks(group_sums(groups), self.policy.device)
        values: dict[str, float | None] = dict(group_metrics(sums)) | self._generation_values()
        if sums["groups"] == 0:
            self.console.warn(f"step {step}: no question of this step could be used, so there was no update")
            return values | {"step_seconds": time.perf_counter() - start_seconds}, groups
        with self.phases.timed("train"):
            values |= self._update(groups, step, leaves)
        if not self._told_sharing:
            self._told_sharing = True
            self.console.info(sharing_line(values))
            if "generation/prefill_tokens" in values:
                self.console.info(generation_line(values))
        seconds = time.perf_counter() - start_seconds
        values |= {f"seconds/{name}": self.phases.last[name] for name in ("prompts", "vision", "rollout", "train")}
        values |= {"step_seconds": seconds, "tokens_per_second": (values["tokens_computed"] or 0.0) / seconds}
        return values, groups

    def _generation_values(self) -> dict[str, float | None]:
        if not isinstance(self.rollouts, RolloutEngine):
            lag = self.rollouts.lag_steps
            return {} if lag is None else {"rollout_lag_steps": lag}
        stats = self.rollouts.stats
        counted = {
            "prompt_tokens": float(stats.prompt_tokens),
            "prefill_tokens": float(stats.prefill_tokens),
            "new_tokens": float(stats.new_tokens),
        }
        sums = sum_over_ranks(counted, self.policy.device)
        speed = sums["new_tokens"] / self.phases.last["rollout"]
        peak = max_over_ranks({"gib": stats.peak_bytes / GIB}, self.policy.device)["gib"]
        values: dict[str, float | None] = {f"generation/{name}": value for name, value in sums.items()}
        return values | {"generation/tokens_per_second": speed, "generation/peak_gib": peak}

    def _update(self, groups: list[RolloutGroup], step: int, leaves: VisionLeaves) -> dict[str, float]:
        training = self.config.training
        values = update_policy(
            self.engine,
            self.reference,
            groups,
            self.config.algorithm,
            training.micro_batch_tokens,
            self.config.rollout.temperature,
            learning_rate(training, step),
            leaves,
            logprobs=self.config.rollout.logprobs,
            # A server's rollouts are scored by the trainer, which would be compared with itself.
            measure_mismatch=isinstance(self.rollouts, RolloutEngine) and mismatch_due(self.config.rollout, step),
        )
        warning = mismatch_warning(values)
        if warning is not None:
            self.console.warn(f"step {step}: {warning}")
        self._updates += 1
        self.progress.tokens_computed += values["tokens_computed"]
        self.progress.tokens_repeated += values["tokens_repeated"]
        return values

    def _step_samples(self, step: int) -> list[Sample]:
        """This rank's share of the step's questions: all ranks together get the same ones."""
        indices = indices_for_step(
            len(self.samples),
            self.config.training.prompts_per_step,
            step - 1,
            self.config.run.seed,
            self.config.data.shuffle,
        )
        # Where a step crosses the border of an epoch (or asks for more questions than there are) a question may come up
        # twice. Its rollouts would be the same ones, so it is asked once.
        once = list(dict.fromkeys(indices))
        return share_of_rank([self.samples[index] for index in once], rank(), world_size())

    def _questions(self, step: int) -> list[tuple[Sample, Prompt]]:
        samples = self._step_samples(step)
        questions, bad = self.source.load(samples, should_stop=self.stop.between_tokens)
        for ahead in range(step + 1, min(step + PREFETCH_STEPS, self.config.training.steps) + 1):
            self.source.prefetch(self._step_samples(ahead))
        self._record_bad(len(samples), bad)
        return questions

    def _record_bad(self, seen: int, bad: Sequence[BadSample]) -> None:
        """All ranks' faults go into one file, and count against one limit."""
        everything = gather_objects((seen, list(bad)))
        if self.bad_log is None:
            return
        self.bad_log.count_seen(sum(count for count, _ in everything))
        for item in (fault for _, faults in everything for fault in faults):
            if self.bad_log.record(item):
                self.console.warn(str(item))

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
        if checkpoints.problem_with(path) is None:
            return
        with self.phases.timed("checkpoint"):
            state: dict[str, Any] = {
                "tokens_computed": self.progress.tokens_computed,
                "tokens_repeated": self.progress.tokens_repeated,
                "seconds": self.phases.seconds,
                "settings": checkpoint_settings(self.config),
            }
            save_checkpoint(self.folder.checkpoints, self.progress.step, self.policy, self.engine, state)
            if rank() == 0:
                checkpoints.prune(self.folder.checkpoints, self.config.training.keep_checkpoints)
        if not isinstance(self.rollouts, RolloutEngine):
            self.rollouts.use_checkpoint(path)
