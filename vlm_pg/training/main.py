"""``vlm-pg train``: set up a run, evaluate, train, evaluate again, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.config import RunConfig, dump_config
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError
from vlm_pg.eval.runner import Evaluator, table
from vlm_pg.models.liger import liger_line
from vlm_pg.models.loading import load_policy
from vlm_pg.models.lora import AdapterFreeReference
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console
from vlm_pg.observe.metrics import MetricsLog
from vlm_pg.observe.quiet import quiet_libraries
from vlm_pg.observe.report import write_report
from vlm_pg.observe.rollouts import RolloutsLog
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.sources import Sources
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.training.checkpoints import read_state
from vlm_pg.training.distributed import (
    barrier,
    disconnect,
    gather_objects,
    launched_world_size,
    local_device,
    rank,
    world_size,
)
from vlm_pg.training.engines import Engine, TorchEngine
from vlm_pg.training.persistence import abandon_later, changed_settings, checkpoint_to_resume
from vlm_pg.training.phases import Phases
from vlm_pg.training.stop import StopRequest
from vlm_pg.training.summary import RunSummary
from vlm_pg.training.trainer import Progress, Trainer
from vlm_pg.types import BadSample, Prompt, Sample

PACKAGES = ("vlm-pg", "torch", "transformers", "deepspeed", "qwen-vl-utils", "decord", "av", "accelerate", "peft")
STOPPED = 130


def train(config: RunConfig) -> int:
    """Run the whole job; the process's exit code: 0 done, 130 stopped on request with a checkpoint written."""
    if config.training.torch_threads is not None:
        torch.set_num_threads(config.training.torch_threads)
    if config.data.train is None:
        raise ConfigError("data.train is not set. Training needs a file of prepared records. Set data.train=PATH.")
    quiet_libraries()
    _connect(config)
    phases = Phases()
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest().listening())
        console = Console(enabled=rank() == 0)
        with phases.timed("setup"):
            run = _Run(config, console, stop, phases, stack)
        code = run.go()
    disconnect()
    return code


class _Run:
    """Everything one run holds, put together in the order it is needed."""

    def __init__(self, config: RunConfig, console: Console, stop: StopRequest, phases: Phases, stack: ExitStack):
        self.config, self.console, self.stop, self.phases, self.stack = config, console, stop, phases, stack
        path = Path(config.run.dir)
        _refuse_inputs_inside(path, config)
        resume_from = checkpoint_to_resume(config, RunFolder(path).checkpoints, console.warn)
        self.progress = Progress()
        state = read_state(resume_from) if resume_from is not None else {}
        if resume_from is not None:
            self.progress = Progress.read(state, config.training.prompts_per_step)
            phases.seconds.update(state["seconds"])
            _refuse_fewer_steps(config, self.progress.step)
        samples, bad = read_records(config.data.train)  # type: ignore[arg-type]  # checked by train()
        device = local_device()
        self.policy = load_policy(resume_from or config.model.path, device=device, settings=config.model)
        self.policy.check_samples(samples[: config.data.limit], config.data.train)
        _refuse_nothing_to_train(config, self.policy)
        self.policy.weights_version = self.progress.updates
        # The reference is where training began, whatever the run resumes from.
        self.reference = _load_reference(config, self.policy) if config.algorithm.kl_coef else None
        # Refuses what cannot be computed; its processes start with the first response that needs them.
        self.rewarder = stack.enter_context(Rewarder(config.reward, warn=console.warn))
        self.engine = _make_engine(config, self.policy)
        if resume_from is not None:
            self.engine.load_optimizer(resume_from)
        builder = PromptBuilder(self.policy.processor, config.prompt, self.policy.positions)
        self.sources = stack.enter_context(
            Sources(builder, config.data, config.media, self.policy.pixel_factor, self._check_prompt)
        )
        # Everything that can be refused has been read: only now is an earlier run's folder touched.
        self.folder = self._open_folder(path, resuming=config.run.resume != "never")
        if resume_from is not None:
            console.info(f"resuming after step {self.progress.step} from {resume_from}")
            if rank() == 0:
                abandon_later(self.folder.checkpoints, self.progress.step, console.warn)
        self.bad_log = self._open_bad_log()
        self.samples = self._usable(samples, bad)
        self.summary = RunSummary.open(self.folder, resumed=resume_from is not None)

    def _open_folder(self, path: Path, resuming: bool) -> RunFolder:
        folder = RunFolder(path)
        if rank() == 0:
            before = yaml.safe_load(folder.config.read_text()) if resuming and folder.config.is_file() else None
            folder = RunFolder.create(path, resume=resuming, announce=self.console.info)
            text = dump_config(self.config)
            for line in changed_settings(before, yaml.safe_load(text)) if before else ():
                if not line.startswith("run.resume:"):
                    self.console.warn(f"setting changed since the run began: {line}")
            folder.write_config(text)
        barrier()
        return folder

    def _open_bad_log(self) -> BadSampleLog | None:
        data = self.config.data
        if rank() != 0:
            return None
        return BadSampleLog(self.folder.bad_samples, data.max_bad_share, data.min_seen_for_bad_share)

    def _usable(self, samples: list[Sample], bad: list[BadSample]) -> list[Sample]:
        self._record_file(bad, len(samples) + len(bad))
        samples = samples[: self.config.data.limit]
        if not samples:
            raise ConfigError(
                f"{self.config.data.train} has no usable record ({len(bad)} are bad, see {self.folder.bad_samples}). "
                "Training needs at least one. Repair the records or set data.train to another file."
            )
        return samples

    def _check_prompt(self, prompt: Prompt) -> None:
        self.policy.check_length(prompt, self.config.rollout.max_new_tokens)

    def _record_file(self, bad: Sequence[BadSample], total: int) -> None:
        if self.bad_log is None:
            return
        for item in bad:
            self.console.warn(str(item))
        self.bad_log.record_file(bad, total)

    def _record_bad(self, seen: int, bad: Sequence[BadSample]) -> None:
        if self.bad_log is None:
            return
        self.bad_log.count_seen(seen)
        for item in bad:
            if self.bad_log.record(item):
                self.console.warn(str(item))

    def go(self) -> int:
        if self.summary.was_finished and self.progress.step == self.config.training.steps:
            self.console.info(
                f"this run is finished at step {self.progress.step} (see {self.folder.summary}); raise training.steps "
                "to go on, or set run.resume=never to start anew"
            )
            return 0
        self._introduce()
        self.summary.write(finished=False)
        config, resume_step = self.config, self.progress.step if self.config.run.resume != "never" else None
        evaluator = self._make_evaluator()
        try:
            trainer = self._make_trainer()
        except InterruptedError:  # a server that is away is waited for here
            self.console.warn("stopped on request before the first step; run.resume=auto begins there again")
            return self._finish(finished=False)
        try:
            if evaluator and config.eval.before and not self.summary.has("eval_before"):
                if self.progress.step:
                    self.console.warn("no evaluation before training: these weights are trained already")
                else:
                    self._evaluate(evaluator, "before")
            metrics = rollouts_log = None
            if rank() == 0:
                metrics = self.stack.enter_context(MetricsLog(self.folder, config.observe.tensorboard, resume_step))
                rollouts_log = self.stack.enter_context(
                    RolloutsLog(self.folder, config.observe.rollouts_per_step, config.observe.thumbnails, resume_step)
                )
            if not trainer.run(metrics, rollouts_log):
                return self._finish(finished=False)
            if evaluator and config.eval.after:
                self._evaluate(evaluator, "after")
        except InterruptedError:
            self.console.warn("stopped on request during evaluation; run.resume=auto goes on from the last checkpoint")
            return self._finish(finished=False)
        return self._finish(finished=True)

    def _make_trainer(self) -> Trainer:
        config = self.config
        return Trainer(
            config,
            self.folder,
            self.engine,
            self.reference,
            self.samples,
            self.sources.for_records(config.data.train, config.data.prompt_cache_mb * 2**20),  # type: ignore[arg-type]
            self.rewarder,
            self.bad_log,
            self.console,
            self.stop,
            self.phases,
            self.progress,
        )

    def _make_evaluator(self) -> Evaluator | None:
        config = self.config
        if not config.data.eval or not (config.eval.before or config.eval.after):
            return None
        return Evaluator(
            config,
            self.policy,
            self.sources,
            self.rewarder,
            self.console,
            self._record_file,
            self._record_bad,
            self.stop.between_tokens,
            (rank(), world_size()),
            gather_objects,
            self.engine.generation,
        )

    def _evaluate(self, evaluator: Evaluator, tag: str) -> None:
        with self.phases.timed(f"eval_{tag}"):
            results = evaluator.run(tag, self.folder.path)
        for line in table(results):
            self.console.info(f"{tag} training, {line}")
        self.summary.set(f"eval_{tag}", results)

    def _introduce(self) -> None:
        policy, config = self.policy, self.config
        total = sum(p.numel() for p in policy.model.parameters())
        trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
        tower = f"vision tower {'trained' if policy.vision.trains else 'frozen'}"
        tower = tower if policy.family.reads_media else "no vision tower"
        lora = config.model.lora
        adapter = "" if lora is None else f", LoRA adapter of rank {lora.rank}"
        self.console.info(
            f"model: {config.model.path}, {total:,} parameters, {trained:,} trained ({tower}{adapter}), "
            f"{config.model.dtype} on {policy.device}, {world_size()} process(es), engine {self.engine.description}"
        )
        self.console.info(
            f"attention kernel: {policy.kernel.name}, grouped over shared prefixes "
            f"(checked against plain softmax: largest relative difference {policy.kernel_error:.0e})"
        )
        if not config.model.share_prefix:
            self.console.warn(
                "model.share_prefix=false: nothing is shared; every rollout's prompt, its images and videos included, "
                "goes through the model by itself, for comparison"
            )
        self.console.info(f"positions: {policy.family.describe_positions(config.model.positions)}")
        for note in policy.family.notes:
            self.console.info(note)
        self.console.info(f"algorithm: {describe_algorithm(config.algorithm)}")
        if config.model.liger:
            self.console.info(liger_line(policy.model))
        self.console.info(f"data: {len(self.samples):,} training questions from {config.data.train}")

    def _finish(self, finished: bool) -> int:
        progress = self.progress
        self.summary.write(
            finished=finished,
            steps=progress.step,
            seconds={**self.phases.seconds, "total": sum(self.phases.seconds.values())},
            versions=_versions(),
            attention_kernel=self.policy.kernel.name,
            sharing={
                "tokens_computed": int(progress.tokens_computed),
                "tokens_repeated": int(progress.tokens_repeated),
                "ratio": progress.tokens_repeated / progress.tokens_computed if progress.tokens_computed else None,
            },
            bad_samples=dict(self.bad_log.counts) if self.bad_log else {},
        )
        if rank() == 0:
            if self.config.observe.report:
                self.console.info(f"report: {write_report(self.folder.path)}")
            self.console.info(f"run folder: {self.folder.path}")
        return 0 if finished else STOPPED


def describe_algorithm(algorithm: AlgorithmSettings) -> str:
    """The preset, or the defaults, and every value that was set otherwise."""
    whose = "default" if algorithm.preset is None else "preset"
    changed = [f"{k}={value} ({whose}: {was})" for k, (value, was) in algorithm.differences_from_preset.items()]
    return ", ".join([algorithm.preset or "GRPO, token mean", *changed])


def _connect(config: RunConfig) -> None:
    """Join the other processes, if the launcher started any."""
    if config.training.engine == "deepspeed":
        from vlm_pg.training.deepspeed_config import read_deepspeed_config
        from vlm_pg.training.deepspeed_engine import connect

        read_deepspeed_config(config.training)
        connect()
    elif launched_world_size() > 1:
        raise ConfigError(
            f"{launched_world_size()} processes were started, but training.engine is torch, which runs in one. "
            "Set training.engine=deepspeed and training.deepspeed_config."
        )


def _refuse_fewer_steps(config: RunConfig, step: int) -> None:
    if step > config.training.steps:
        raise ConfigError(
            f"The checkpoint to resume from is at step {step}, but training.steps is {config.training.steps}. Set "
            f"training.steps={step} or more, or resume from an earlier checkpoint."
        )


def _refuse_inputs_inside(run_dir: Path, config: RunConfig) -> None:
    """A new run moves an earlier run's folder aside, which must not take the new run's own inputs with it."""
    if config.run.resume != "never" or not run_dir.exists():
        return
    inputs = {"model.path": config.model.path, "data.train": config.data.train}
    for key, value in inputs.items():
        if value is not None and run_dir.resolve() in Path(value).resolve().parents:
            raise ConfigError(
                f"{key} is {value}, inside run.dir={run_dir}, which a new run moves aside. Choose another run.dir or "
                "run.name, or run.resume=auto to continue that run."
            )


def _refuse_nothing_to_train(config: RunConfig, policy: Policy) -> None:
    """An adapter that was loaded without settings of its own is frozen, and so is the model around it."""
    if not any(parameter.requires_grad for parameter in policy.model.parameters()):
        raise ConfigError(
            f"{config.model.path} is an adapter and model.lora is not set, so that nothing would train. Set model.lora "
            "to the settings the adapter was trained with."
        )


def _make_engine(config: RunConfig, policy: Policy) -> Engine:
    if config.training.engine == "torch":
        return TorchEngine(policy, config.training)
    from vlm_pg.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(policy, config.training, config.rollout.gather)


def _load_reference(config: RunConfig, policy: Policy) -> Policy:
    """The starting point: the policy without its adapter, else a frozen copy (a frozen vision tower is shared)."""
    if config.model.lora is not None:
        return cast(Policy, AdapterFreeReference(policy))
    settings = config.model.model_copy(update={"train_vision": False, "gradient_checkpointing": False})
    reference = load_policy(config.model.path, device=policy.device, settings=settings)
    reference.requires_grad_(False)
    if policy.family.reads_media and not policy.vision.trains:
        reference.model.model.visual = policy.model.model.visual
        reference.vision = policy.vision
    return reference


def _versions() -> dict[str, str]:
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
