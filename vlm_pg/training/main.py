"""``vlm-pg train``: set up a run, evaluate, train, evaluate again, report."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.data.difficulty import within_difficulty
from vlm_pg.data.digests import changed_data, data_digests
from vlm_pg.data.sample_sets import (
    EpochOrder,
    Mixture,
    any_media,
    first_of_each,
    open_training,
    order_of,
    refuse_empty,
    usable_of_each,
    used_samples,
)
from vlm_pg.distributed import RankLayout, disconnect, local_device
from vlm_pg.errors import CheckpointError, ConfigError, ModelError
from vlm_pg.eval.answer_files import AnswerFiles
from vlm_pg.eval.eval_model import EvalModel
from vlm_pg.eval.figure_lines import table
from vlm_pg.eval.runner import Evaluator
from vlm_pg.media.loader import decoding_pool
from vlm_pg.memory import gpu_bytes
from vlm_pg.models.feature_cache import keep_features
from vlm_pg.models.loading import check_sequence_size, load_policy
from vlm_pg.models.lora import adapter_base
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import ScoringPolicy, load_frozen, load_reference
from vlm_pg.observe.console import Console, quiet_libraries
from vlm_pg.observe.logs import MetricsLog, RolloutsLog
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.timeline import Timeline
from vlm_pg.observe.trackers import Trackers
from vlm_pg.plan.command import check_fits
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import SourcePool
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.threads import use_threads
from vlm_pg.training.checkpoints import find_best, point_to_best, read_state
from vlm_pg.training.phases import Phases
from vlm_pg.training.questions import TrainingData
from vlm_pg.training.saving import OpenFolder, RunSummary, abandon_others, checkpoint_to_resume
from vlm_pg.training.setup import (
    check_step_size,
    choose_memory,
    connect,
    introduction,
    layout_of,
    low_lora_rate,
    make_engine,
    reading,
    refuse_at_once,
    refuse_differences,
    refuse_inputs_inside,
)
from vlm_pg.training.stop import StopRequest
from vlm_pg.training.trainer import Progress, StepLogs, Trainer
from vlm_pg.types import Prompt
from vlm_pg.versions import versions
from vlm_pg.watch.watch import RankWatch

# A shell's exit code of a program that Ctrl-C has ended.
INTERRUPTED = 130


def train(config: RunConfig) -> int:
    """Run the whole job; the process's exit code: 0, also after a stop by SIGTERM or SIGUSR1 with a checkpoint; 130
    after Ctrl-C."""
    use_threads(config.training.torch_threads)
    quiet_libraries()
    connect(config)
    with RankWatch(RankLayout.here()) as watch:
        code = _train(config, watch)
        disconnect()
    return code


def _train(config: RunConfig, watch: RankWatch) -> int:
    here = RankLayout.here()
    phases, timeline = Phases(here), Timeline(here, config.observe.trace_mb)
    phases.observers += [watch, timeline]
    with ExitStack() as stack:
        stack.callback(timeline.close)
        try:
            with phases.timed("setup"):
                if here.world_size > 1:
                    refuse_differences(config)
                refuse_at_once(config)
                ranks = layout_of(config)
                stop = stack.enter_context(StopRequest(ranks).listening())
                run = _Run(config, Console(enabled=ranks.is_rank0), stop, phases, timeline, stack)
            watch.completed_step = lambda: run.progress.step
            return run.go()
        except BaseException as error:
            watch.fail(error)  # before anything is closed, which may take long
            raise


class _Run:
    """The parts of one run, built in the order they are needed."""

    def __init__(
        self,
        config: RunConfig,
        console: Console,
        stop: StopRequest,
        phases: Phases,
        timeline: Timeline,
        stack: ExitStack,
    ):
        self.config, self.console, self.stop, self.stack = config, console, stop, stack
        self.phases, self.timeline = phases, timeline
        self.ranks = stop.ranks
        path = Path(config.run.dir)
        refuse_inputs_inside(path, config)
        check_sequence_size(config.model, self.ranks.sequence_size)
        opening = OpenFolder(config, self.ranks, stack, console.info, console.warn)
        resume_from = self._choose_checkpoint(path, {})
        found, bad = open_training(config.data)
        samples = within_difficulty(first_of_each(found, config.data.limit), config.data, console.info)
        together = config.data.media_together
        together = config.training.objective in ("sft", "dpo") if together is None else together
        self.order = order_of(samples, config.data.mixture, together) if samples else EpochOrder(0)
        used = used_samples(samples, config.data.mixture) if samples else samples
        if samples:  # else it is refused once the bad records are written
            check_step_size(config, len(used), len(bad), console.warn)
        check_fits(config, self.ranks.world_size, gpu_bytes(local_device()), console.info)
        pool = decoding_pool(config.media, config.cache)
        if pool is not None:
            stack.enter_context(pool)
            if any_media(samples):
                pool.start()  # while the model is loaded
        resume_from = self._load(path, resume_from)
        self.policy.check_samples(used, config.data.train_shown)
        # Refuses impossible rewards; its processes start with the first response that needs them.
        self.rewarder = stack.enter_context(Rewarder(config.reward, warn=console.warn))
        longest, limit = config.rollout.max_new_tokens, self.policy.max_positions
        fits_model = partial(Prompt.check_length, response_tokens=longest, max_positions=limit)
        builder = PromptBuilder(self.policy.processor, config.prompt, self.policy.positions)
        self.sources = stack.enter_context(
            SourcePool(builder, config.data, config.media, self.policy.pixel_factor, fits_model, pool, config.cache)
        )
        self.digests = data_digests(config.data, usable_of_each(found)) if self.ranks.is_rank0 else {}
        # All checks have passed: only now is an earlier run's folder touched.
        self.folder, self.presence = opening.open(from_step_1=resume_from is None)
        if resume_from is not None:
            console.info(f"resuming after step {self.progress.step} from {resume_from}")
            console.warn(*changed_data(self.state.get("data"), self.digests))
            if self.ranks.is_rank0:
                abandon_others(self.folder.checkpoints, resume_from, self.progress.step, console.warn)
                point_to_best(self.folder.checkpoints, config.training.keep_best, console.warn)
        self.bad_log: BadSampleLog | None = None
        if self.ranks.is_rank0:
            most, least_seen = config.data.max_bad_share, config.data.min_seen_for_bad_share
            self.bad_log = BadSampleLog(self.folder.bad_samples, most, least_seen, console.warn)
            self.bad_log.record_file(bad, len(found) + len(bad))
        refuse_empty(samples, config.data, f"{len(bad)} are bad, see {self.folder.bad_samples}")
        self.samples = samples
        self.summary = RunSummary(self.folder, self.ranks, resume_from is not None, console.warn)

    def _choose_checkpoint(self, path: Path, refused: Mapping[Path, str]) -> Path | None:
        """The checkpoint to resume from, if any; sets state and progress."""
        training, checkpoints = self.config.training, RunFolder(path).checkpoints
        resume_from = checkpoint_to_resume(self.config, checkpoints, self.console.warn, refused, self.ranks)
        self.progress, self.state = Progress(), {}
        if resume_from is not None:
            self.state = read_state(resume_from)
            self.progress = Progress.read(self.state, training.prompts_per_step)
            if (step := self.progress.step) > training.steps:
                raise ConfigError(
                    f"The checkpoint to resume from is at step {step}, but training.steps is {training.steps}. Set "
                    f"training.steps={step} or more, or resume from an earlier checkpoint."
                )
        return resume_from

    def _load(self, path: Path, resume_from: Path | None) -> Path | None:
        """Load weights and optimizer state, with ``run.resume=auto`` from the newest checkpoint that can be loaded."""
        refused: dict[Path, str] = {}
        while True:
            try:
                self._load_weights(resume_from)
            except (ModelError, CheckpointError) as error:
                # Ranks that fail independently cannot retry together.
                if resume_from is None or self.config.run.resume != "auto" or self.ranks.world_size > 1:
                    raise
                refused[resume_from] = str(error)
                self.console.warn(f"{resume_from} is passed over: {error}")
                for name in ("policy", "reference", "teacher", "engine"):  # there may not be room for two
                    self.__dict__.pop(name, None)
                resume_from = self._choose_checkpoint(path, refused)
                continue
            self.phases.seconds.update(self.state.get("seconds", {}))
            return resume_from

    def _load_weights(self, resume_from: Path | None) -> None:
        config = self.config
        path, version = resume_from or config.model.path, self.progress.updates
        self.policy = load_policy(
            path, device=local_device(), settings=config.model, weights_version=version, reading=reading(config)
        )
        if not any(parameter.requires_grad for parameter in self.policy.model.parameters()):
            raise ConfigError(
                f"{config.model.path} is an adapter and model.lora is not set, so that nothing would train. Set "
                "model.lora to the settings the adapter was trained with."
            )
        # The reference is the initial policy, whatever the run resumes from.
        is_dpo = config.training.objective == "dpo"
        self.reference: ScoringPolicy | None = None
        if config.algorithm.kl_coef or is_dpo:
            path_of_pairs = config.preference.reference
            if is_dpo and path_of_pairs is None and adapter_base(config.model.path):
                path_of_pairs = config.model.path  # without this adapter, it would be another starting point
            self.reference = load_reference(config.model, self.policy, path_of_pairs if is_dpo else None)
        self.teacher: Policy | None = None
        if (teacher := config.distillation.teacher) is not None:
            self.teacher = load_frozen(config.model, self.policy, teacher)
        self.engine = make_engine(config, self.policy, self.ranks)
        self.memory = choose_memory(config, self.policy, self.reference, self.ranks)
        self.features_line = keep_features(self.policy, config.cache, self.engine.gathered)
        if resume_from is not None:
            self.engine.load_optimizer(resume_from)

    def go(self) -> int:
        config, console = self.config, self.console
        if self.summary.was_finished and self.progress.step == config.training.steps:
            console.info(
                f"this run is finished at step {self.progress.step} (see {self.folder.summary}); raise training.steps "
                "to go on, or set run.resume=never to start anew"
            )
            return 0
        mixture = str(self.order) if isinstance(self.order, Mixture) else ""
        console.info(*introduction(config, self.policy, self.engine, len(self.samples), mixture))
        if warning := low_lora_rate(config):
            console.warn(warning)
        (console.info if self.memory.fits else console.warn)(self.memory.line)
        if self.features_line:
            console.info(self.features_line)
        if not config.model.share_prefix:
            console.warn(
                "model.share_prefix=false: nothing is shared; every rollout's prompt, its images and videos included, "
                "goes through the model by itself, for comparison"
            )
        self.summary.write(finished=False)
        resume_step = self.progress.step if config.run.resume != "never" else None
        evaluator = self._make_evaluator()
        trainer = self._ready_trainer(evaluator)
        if trainer is None:
            console.warn("stopped on request before the first step; run.resume=auto begins there again")
            return self._finish(finished=False)
        try:
            if evaluator and config.eval.before and "eval_before" not in self.summary.values:
                if self.progress.step:
                    console.warn("no evaluation before training: these weights are trained already")
                else:
                    self.summary.write(eval_before=self._evaluate(evaluator, "before"))
            if not trainer.run(self._open_logs(resume_step)):
                return self._finish(finished=False)
            if evaluator and config.eval.after:
                self.summary.write(eval_after=self._evaluate(evaluator, "after"))
        except InterruptedError:
            console.warn("stopped on request during evaluation; run.resume=auto goes on from the last checkpoint")
            return self._finish(finished=False)
        return self._finish(finished=True)

    def _ready_trainer(self, evaluator: Evaluator | None) -> Trainer | None:
        """The trainer, once server and decoding workers are there; None on all ranks where one got a stop request
        meanwhile."""
        config, trainer = self.config, None
        with suppress(InterruptedError):
            source = self.sources.for_training(config.data.prompt_cache_mb * 2**20, config.training.objective == "rl")
            trainer = Trainer(
                config,
                self.engine,
                self.reference,
                self.teacher,
                TrainingData(self.samples, self.order, source, self.digests),
                self.rewarder,
                self.progress,
                folder=self.folder,
                console=self.console,
                stop=self.stop,
                phases=self.phases,
                timeline=self.timeline,
                bad_log=self.bad_log,
                presence=self.presence,
                evaluate=None if evaluator is None else partial(self._evaluate, evaluator),
            )
            with self.phases.timed("setup"):  # not a part of the first step
                if self.sources.is_starting:
                    self.console.info(f"waiting for the decoding workers (media.workers={config.media.workers})")
                self.sources.wait_until_ready(self.stop.between_tokens)
        return None if self.stop.agreed(self.policy.device) else trainer

    def _open_logs(self, resume_step: int | None) -> StepLogs:
        """Logs of every step, by rank 0."""
        self.timeline.open(self.folder)
        if not self.ranks.is_rank0:
            return StepLogs()
        observe, enter = self.config.observe, self.stack.enter_context
        metrics = enter(MetricsLog(self.folder, resume_step))
        rollouts = enter(RolloutsLog(self.folder, observe.rollouts_per_step, observe.thumbnails, resume_step))
        if not observe.trackers:
            return StepLogs(metrics, rollouts)
        name, console = self.config.run.name, self.console
        trackers = enter(Trackers(observe, self.folder, name, resume_step, console.info, console.warn))
        return StepLogs(metrics, rollouts, trackers)

    def _make_evaluator(self) -> Evaluator | None:
        config = self.config
        if not config.data.eval or not (config.eval.before or config.eval.after or config.eval.every):
            return None
        from vlm_pg.answers.whole import WholeReader  # for evaluations only

        if config.rollout.engine == "server":
            self.console.info(
                "rollout.engine=server: evaluation before, between and after steps samples in this process, from the "
                "weights that are trained"
            )
        eval_model = EvalModel(
            self.policy,
            self.sources,
            self.rewarder,
            self.stack.enter_context(WholeReader(config.reward, self.console.warn)),
            self.ranks,
            self.engine.gathered_parameters,
            self.stop.between_tokens,
        )
        return Evaluator(config, eval_model, self.console, self.bad_log)

    def _evaluate(self, evaluator: Evaluator, tag: str) -> dict[str, Any]:
        """Evaluate the present weights. ``tag``: "before", "after" or a step, such as "step-000020"."""
        is_step = tag.startswith("step-")
        with self.phases.timed("eval" if is_step else f"eval_{tag}"), self.stop.together():
            files = AnswerFiles(self.folder.path, self.ranks.rank, prefix="eval_", suffix=f"_{tag}", resumable=False)
            results = evaluator.run(tag, files)
        for line in table(results):
            self.console.info(f"{tag}, {line}" if is_step else f"{tag} training, {line}")
        return results

    def _finish(self, finished: bool) -> int:
        progress = self.progress
        if self.presence is not None:
            self.presence.check()
        best = find_best(self.folder.checkpoints, self.config.training.keep_best) if self.ranks.is_rank0 else None
        self.summary.write(
            finished=finished,
            steps=progress.step,
            seconds={**self.phases.seconds, "total": sum(self.phases.seconds.values())},
            versions=versions(),
            attention_kernel=self.policy.kernel.name,
            sharing={
                "tokens_computed": int(progress.tokens_computed),
                "tokens_repeated": int(progress.tokens_repeated),
                "ratio": progress.tokens_repeated / progress.tokens_computed if progress.tokens_computed else None,
            },
            bad_samples=dict(self.bad_log.counts) if self.bad_log else {},
            **({} if best is None else {"best_checkpoint": f"{best.parent.name}/{best.name}"}),
        )
        self.timeline.flush()
        if self.ranks.is_rank0:
            if self.config.observe.report:
                from vlm_pg.observe.report.page import write_report

                self.console.info(f"report: {write_report(self.folder.path)}")
            self.console.info(f"run folder: {self.folder.path}")
        return INTERRUPTED if not finished and self.stop.interrupted else 0
