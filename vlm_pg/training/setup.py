"""Parts of a run: processes, engine, samplers, memory, its first lines of output; and early checks."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import vlm_pg
from vlm_pg.algorithms.own import load_estimator, load_loss
from vlm_pg.config import RunConfig
from vlm_pg.distributed import RankLayout, gather_objects, join_ranks, launched_world_size, min_over_ranks
from vlm_pg.errors import ConfigError, printable
from vlm_pg.memory import GIB, free_bytes
from vlm_pg.models.liger import liger_line
from vlm_pg.models.loading import DTYPES
from vlm_pg.models.logits import logits_fault
from vlm_pg.models.memory_choice import Decision, Need, decide
from vlm_pg.models.memory_sizes import LanguageShape, LanguageSizes, TowerShape, TowerSizes
from vlm_pg.models.offloading import offload_target
from vlm_pg.models.policy import Policy
from vlm_pg.models.recorded import ForwardBudget
from vlm_pg.models.reference import ScoringPolicy, scoring_phase
from vlm_pg.models.settings import Part
from vlm_pg.models.weights import is_quantized, num_elements
from vlm_pg.observe.trackers import refuse_missing
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.graphs import decoding_line
from vlm_pg.rollout.ragged import reusable_bytes
from vlm_pg.rollout.scoring import PolicyScorer, TeacherScorer
from vlm_pg.training.collect import Batches, Collector, Stages
from vlm_pg.training.engines import Engine, TorchEngine, trained_weights
from vlm_pg.training.phases import Phases
from vlm_pg.training.questions import QuestionStream
from vlm_pg.training.saving import flat
from vlm_pg.training.settings import LEARNING_RATE, LORA_LEARNING_RATE
from vlm_pg.training.stop import StopRequest
from vlm_pg.types import Sample
from vlm_pg.versions import versions

# Of the free memory for recorded forwards, at most.
SHARE_FOR_FORWARDS = 0.5
# And of the free memory of a GPU's host.
SHARE_OF_HOST = 0.25


def introduction(config: RunConfig, policy: Policy, engine: Engine, questions: int, mixture: str = "") -> list[str]:
    """The lines a run begins with: what is trained, how it is computed, by what rules, on what."""
    total = sum(map(num_elements, policy.model.parameters()))
    trained = sum(num_elements(p) for p in policy.model.parameters() if p.requires_grad)
    is_rl, samples = config.training.objective == "rl", config.training.objective in ("rl", "distill")
    decodes_on_gpu = config.rollout.engine == "in_process" and policy.device.type == "cuda"
    algorithm = config.algorithm
    base = "default" if algorithm.preset is None else "preset"
    changed = [f"{k}={value} ({base}: {was})" for k, (value, was) in algorithm.differences_from_preset.items()]
    return [
        f"model: {config.model.path}, {total:,} parameters, {trained:,} trained, "
        f"{config.model.dtype} on {policy.device}, {engine.ranks.world_size} process(es), engine {engine.description}",
        f"parts: {', '.join(_part_line(part, config, policy, engine) for part in policy.family.parts)}",
        f"attention kernel: {policy.kernel.name}, grouped over shared prefixes "
        f"(checked against plain softmax: largest relative difference {policy.kernel_error:.0e})",
        *([decoding_line(policy, config.rollout)] if decodes_on_gpu else []),
        *([f"GPU memory: {allocator_line()}"] if policy.device.type == "cuda" else []),
        f"positions: {policy.family.describe_positions(config.model.positions)}",
        *policy.family.notes,
        *_rank_lines(config, policy, engine.ranks),
        f"algorithm: {', '.join([algorithm.preset or 'GRPO, token mean', *changed])}"
        if is_rl
        else _objective_line(config),
        *([_teacher_line(config)] if config.distillation.teacher else []),
        *([forward_line(config, policy, engine.ranks)] if samples else []),
        *([line] if (line := liger_line(policy.model)) else []),
        *([_logits_line(policy)] if policy.device.type == "cuda" else []),
        f"data: {questions:,} training questions from {config.data.train_shown}",
        *([f"mixture: {mixture}"] if mixture else []),
    ]


def _teacher_line(config: RunConfig) -> str:
    own = config.distillation
    tokens = f"its {own.top_k} most probable tokens and the rest" if own.top_k else "the whole vocabulary"
    return f"teacher: {own.teacher}, {own.divergence} over {tokens}, weight {own.coef:g}"


def _objective_line(config: RunConfig) -> str:
    if config.training.objective == "distill":
        return f"objective: distill, rollouts of the policy, {config.algorithm.loss_average}"
    if config.training.objective == "sft":
        return f"objective: sft, {config.algorithm.loss_average}"
    pairs = config.preference
    start = "the starting point" if config.model.lora is None else "the model without its adapter"
    return f"objective: dpo, {pairs.loss}, beta {pairs.beta:g}, reference {pairs.reference or start}"


def allocator_line() -> str:
    """The settings of torch's allocator."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "torch's own settings"


def _logits_line(policy: Policy) -> str:
    fault = logits_fault(policy.device, policy.dtype)
    return f"logits: read by {f'torch ({fault})' if fault else 'one kernel forward and one backward'}"


def low_lora_rate(config: RunConfig) -> str | None:
    """Warning for an adapter trained at a learning rate of full fine-tuning, which barely moves it."""
    rate = config.training.learning_rates.get("language", config.training.learning_rate)
    if config.model.lora is None or rate > LEARNING_RATE:
        return None
    return (
        f"model.lora is set and its peak learning rate is {rate:g}, a rate of full fine-tuning; adapters usually train "
        f"at 1e-5 to 2e-4. Leave training.learning_rate out for {LORA_LEARNING_RATE:g}, or set a higher one"
    )


def _part_line(part: Part, config: RunConfig, policy: Policy, engine: Engine) -> str:
    rates = engine.rates.of_parts(config.training.learning_rate)
    if part not in rates:
        return f"{part} frozen"
    weights = sum(num_elements(p) for name, p in trained_weights(policy) if policy.family.part_of(name) == part)
    lora, trained = config.model.lora, f"{weights:,} weights"
    if lora is not None:
        trained = f"LoRA adapter of rank {lora.rank}"
        if lora.quantize is not None:
            named = policy.model.named_parameters()
            base = [p for n, p in named if policy.family.part_of(n) == "language" and ".lora_" not in n]
            small, total = sum(num_elements(p) for p in base if is_quantized(p)), sum(map(num_elements, base))
            trained += f", {small:,} of {total:,} weights in {lora.quantize}"
    return f"{part} trained ({trained}, peak learning rate {rates[part]:g})"


def _rank_lines(config: RunConfig, policy: Policy, ranks: RankLayout) -> list[str]:
    """Division of work over several processes."""
    lines = []
    if ranks.sequence_size > 1:
        lines.append(
            f"sequence parallel: {ranks.data_size} data rank(s) of {ranks.sequence_size} processes, which share the "
            f"token streams of updates; generation is shared by {config.rollout.split}"
        )
    if ranks.data_size > 1:
        reasons = {
            "training.balance=false": not config.training.balance,
            "model.share_prefix=false": not policy.settings.share_prefix,
        }
        why = [reason for reason, holds in reasons.items() if holds]
        stays = f"rollouts stay with the rank that sampled them ({', '.join(why)})"
        frames = ", frames of the tower in equal parts" if policy.vision.trains else ""
        balanced = f"rollouts are balanced over data ranks by their estimated cost{frames}"
        lines.append(f"balance: {stays if why else balanced}")
    return lines


def connect(config: RunConfig) -> None:
    """Join the other processes, if the launcher started any."""
    if config.training.engine == "deepspeed":
        from vlm_pg.training.deepspeed_engine import connect as connect_ranks

        connect_ranks()
    else:
        join_ranks()


def refuse_at_once(config: RunConfig) -> None:
    """Checks that need no model. Ranks are connected, so an error of one reaches all."""
    if not config.data.train_sets:
        raise ConfigError("data.train is not set. Training needs a file of prepared records. Set data.train=PATH.")
    refuse_missing(config.observe.trackers)
    load_loss(config.algorithm), load_estimator(config.algorithm)
    if config.training.engine == "deepspeed":
        from vlm_pg.training.deepspeed_config import read_deepspeed_config

        read_deepspeed_config(config.training)


def check_step_size(config: RunConfig, usable: int, bad: int, warn: Callable[[str], None]) -> None:
    """A step has no question twice, so with too few questions it is a smaller batch.

    Args:
        usable, bad: number of records that the run uses, and that could not be read.
        warn: called where bad records are the cause.

    Raises:
        ConfigError: there are fewer records.
    """
    wanted = config.training.prompts_per_step
    if usable >= wanted:
        return
    line = f"training.prompts_per_step is {wanted}, and {config.data.train_shown} has {usable} usable question(s)"
    data = config.data
    is_limited = data.limit is not None and data.limit * len(data.used_sets) < wanted
    if usable + bad < wanted or is_limited:
        raise ConfigError(
            f"{line}. A step asks no question twice. Set training.prompts_per_step to {usable} or less, or use more "
            "records (data.train, data.limit, data.mixture, data.difficulty)."
        )
    warn(f"{line} beside {bad} bad record(s): a step asks {usable}")


def layout_of(config: RunConfig) -> RankLayout:
    """Position of this process among those that are connected."""
    size = config.training.sequence_parallel
    try:
        return RankLayout.here(size)
    except ValueError:
        processes = launched_world_size()
        allowed = ", ".join(str(n) for n in range(1, processes + 1) if processes % n == 0)
        raise ConfigError(
            f"training.sequence_parallel is {size}, and {processes} process(es) were started, which cannot be divided "
            f"so. Set it to one of {allowed}, or start a multiple of {size} processes."
        ) from None


def reading(config: RunConfig) -> AbstractContextManager[None]:
    """Context of reading the policy's weights: ZeRO-3 shards them meanwhile."""
    if config.training.engine == "torch":
        return nullcontext()
    from vlm_pg.training.deepspeed_engine import sharded_loading

    return sharded_loading(config.training, DTYPES[config.model.dtype])


def refuse_inputs_inside(run_dir: Path, config: RunConfig) -> None:
    """A new run moves an earlier run's folder aside, which must not take the new run's own inputs with it."""
    if config.run.resume != "never" or not run_dir.exists():
        return
    inputs = [("model.path", Path(config.model.path))]
    inputs += [("data.train", path) for path in config.data.train_sets.values()]
    models = {"distillation.teacher": config.distillation.teacher, "preference.reference": config.preference.reference}
    inputs += [(key, Path(path)) for key, path in models.items() if path]
    inputs += [] if config.data.difficulty is None else [("data.difficulty.file", config.data.difficulty.file)]
    for key, value in inputs:
        if run_dir.resolve() in value.resolve().parents:
            raise ConfigError(
                f"{key} is {value}, inside run.dir={run_dir}, which a new run moves aside. Choose another run.dir or "
                "run.name, or run.resume=auto to continue that run."
            )


def make_engine(config: RunConfig, policy: Policy, ranks: RankLayout) -> Engine:
    if config.training.engine == "torch":
        return TorchEngine(policy, config.training, ranks)
    from vlm_pg.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(policy, config.training, ranks, config.rollout.gather)


def choose_memory(config: RunConfig, policy: Policy, reference: Any, ranks: RankLayout) -> Decision:
    """Resolve the ``auto`` of ``config.model``, the same on all ranks, and apply it to the models.

    Args:
        reference: reference policy of a KL term; it runs in the same tiles and pieces.
    """
    device = policy.device
    free = int(min_over_ranks({"free": float(_free_for_steps(config, policy))}, device)["free"])
    decision = decide(config.model, _need(config, policy, ranks, free))
    policy.use_memory(decision.choice)
    if reference is not None and hasattr(reference, "use_memory"):
        reference.use_memory(decision.choice)
    return decision


def _free_for_steps(config: RunConfig, policy: Policy) -> int:
    free = free_bytes(policy.device) - _later_allocations(config, policy.model)
    if config.rollout.engine == "in_process" and config.rollout.cuda_graphs:
        free -= reusable_bytes(policy.device)
    return max(0, free)


def _later_allocations(config: RunConfig, model: torch.nn.Module) -> int:
    """Bytes allocated after the engine is made and held for the rest of the run: gradients, AdamW's two fp32 moments,
    which it makes in its first step (DeepSpeed makes them at once), and one chunk of logits."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trained)
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    # fp32 copies of a chunk of logits at a time; more with gradients of entropies. Where auto makes chunks larger, a
    # layer's backward takes more, which is counted with the stream.
    logits = (6 if config.algorithm.entropy_coef else 3) * config.model.least_logits_bytes
    if config.training.engine == "deepspeed":
        return gradients + logits
    masters = 4 * numbers if config.model.dtype != "fp32" else 0
    return gradients + masters + 2 * 4 * numbers + logits


def _need(config: RunConfig, policy: Policy, ranks: RankLayout, free: int) -> Need:
    model, element = policy.model.config, policy.dtype.itemsize
    prompts = 1  # a frozen tower takes them one by one
    if policy.vision.trains:
        prompts = -(-config.training.prompts_per_step // ranks.data_size)
    size, shape = ranks.sequence_size, LanguageShape.of(policy.family, model)
    tower = TowerShape.of(policy.family, model)
    # Where there are fewer key-value heads than sequence ranks each rank has one, of all rows.
    repeated = max(1, size // shape.kv_heads)
    media_tokens = prompts * config.prompt.max_prompt_tokens
    if policy.vision.trains:
        # Frames are divided, none is cut. A frozen tower also runs for one process alone.
        frame = -(-config.media.max_pixels // policy.pixel_factor**2)
        media_tokens = max(-(-media_tokens // size), min(media_tokens, frame))
    return Need(
        LanguageSizes(shape, element, repeated),
        TowerSizes(tower, element) if tower else None,
        rows=-(-config.training.micro_batch_tokens // size),
        media_tokens=media_tokens,
        free=free,
        device=str(policy.device),
    )


@dataclass(frozen=True)
class BatchParts:
    """Parts of a run that batches are made with, beside its engine and reference; ``reference_logprobs``: as in
    ``Progress``."""

    stream: QuestionStream
    samples: Sequence[Sample]
    rewarder: Rewarder
    run_folder: Path
    phases: Phases
    stop: StopRequest
    warn: Callable[[str], None]
    reference_logprobs: dict[str, list[float]]


def make_batches(
    config: RunConfig, engine: Engine, reference: ScoringPolicy | None, teacher: Policy | None, parts: BatchParts
) -> Batches:
    """The batches of ``training.objective``."""
    should_stop = parts.stop.between_tokens
    if config.training.objective in ("sft", "dpo"):
        from vlm_pg.training.supervised import PairBatches, SupervisedBatches

        of_all = config, engine, parts.stream, parts.phases
        if reference is None:
            return SupervisedBatches(*of_all)
        return PairBatches(*of_all, reference, parts.reference_logprobs)
    sampler = make_sampler(config, engine, parts.samples, parts.run_folder, parts.stop, parts.warn)
    control = make_control_sampler(config, engine.policy, sampler, should_stop)
    scorer = None
    if reference is not None and config.algorithm.kl_in != "loss":
        scorer = PolicyScorer(reference, config.rollout.prefill_tokens, should_stop)
    teaches = None
    if teacher is not None:
        common = min(engine.policy.vocab_size, teacher.vocab_size)
        top_k = min(config.distillation.top_k or common, common)
        teaches = TeacherScorer(teacher, config.rollout.prefill_tokens, should_stop, top_k, common)
    around = partial(scoring_phase, reference)
    stages = Stages(parts.stream, sampler, control, parts.rewarder, scorer, teaches, around)
    return Collector(config, engine, stages, parts.phases, should_stop, parts.warn)


def make_sampler(
    config: RunConfig,
    engine: Engine,
    samples: Sequence[Sample],
    run_folder: Path,
    stop: StopRequest,
    warn: Callable[[str], None],
) -> Sampler:
    """The sampler of ``rollout.engine``; a server is identified at once.

    Raises:
        ConfigError: the packages of the server engine are not installed.
    """
    policy = engine.policy
    if config.rollout.engine == "in_process":
        forwards = forward_budgets(config, policy, engine.ranks)
        stops = stop.between_tokens, lambda: stop.requested
        return RolloutEngine(policy, config.rollout, config.run.seed, *stops, forwards)
    try:
        from vlm_pg.rollout.server.engine import ServerEngine
        from vlm_pg.rollout.server.messages import ChatMessages
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollout.engine is server, which needs the package {error.name}. Install it with: "
            "pip install 'vlm-pg[server]'."
        ) from error
    messages = ChatMessages(policy, {sample.sample_id: sample for sample in samples})
    return ServerEngine(engine, config.rollout, config.run.seed, stop.between_tokens, messages, run_folder, warn)


def forward_budgets(config: RunConfig, policy: Policy, ranks: RankLayout) -> list[ForwardBudget]:
    """Memory for recorded forwards, from which updates start: of the device, then of a GPU's host; none where they
    compute theirs."""
    if forward_fault(config, policy, ranks):
        return []
    need, size, limit = _need(config, policy, ranks, _free_for_steps(config, policy)), policy.recorded_bytes(), None
    here = min(int(SHARE_FOR_FORWARDS * need.free), decide(config.model, need).left)
    if config.rollout.keep_forward_gb is not None:
        limit = int(config.rollout.keep_forward_gb * GIB)
        here = min(here, limit) if policy.device.type == "cuda" else limit
    budgets = [ForwardBudget(here, size)]
    if policy.device.type == "cuda":
        of_host = int(SHARE_OF_HOST * free_bytes(torch.device("cpu"))) if limit is None else limit - here
        budgets.append(ForwardBudget(of_host, size, offload_target(policy.device)))
    return budgets


def forward_fault(config: RunConfig, policy: Policy, ranks: RankLayout) -> str | None:
    """Why updates compute their forward, as end of a sentence; None where they start from that of sampling."""
    reasons = {
        "rollout.keep_forward_gb is 0": config.rollout.keep_forward_gb == 0,
        "a server samples": config.rollout.engine == "server",
        "a teacher's tokens are read, too (distillation)": config.distillation.teacher is not None,
        "model.share_prefix is false": not config.model.share_prefix,
        "model.attention_kernel=oracle has no log-sum-exps": config.model.attention_kernel == "oracle",
        "sequence ranks sample every prompt together (rollout.split=prompts)": (
            ranks.sequence_size > 1 and config.rollout.split == "prompts"
        ),
        "rollout.logprobs=recompute scores rollouts before several updates": (
            config.rollout.logprobs == "recompute" and config.algorithm.updates > 1
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def forward_line(config: RunConfig, policy: Policy, ranks: RankLayout) -> str:
    if fault := forward_fault(config, policy, ranks):
        return f"updates compute their forward: {fault}"
    return "updates start from the forward of sampling, as far as rollout.keep_forward_gb has room for it"


def make_control_sampler(
    config: RunConfig, policy: Policy, sampler: Sampler, should_stop: Callable[[], bool]
) -> Sampler | None:
    """Samples T-GRPO's control groups, G / 2 rollouts each, where ``sampler`` does; None without a temporal bonus."""
    if not config.algorithm.temporal_bonus:
        return None
    half = max(1, config.rollout.num_generations // 2)
    if config.rollout.engine == "server":
        from vlm_pg.rollout.server.engine import ControlSampler, ServerEngine

        assert isinstance(sampler, ServerEngine)
        return ControlSampler(sampler, half)
    settings = config.rollout.model_copy(update={"num_generations": half})
    return RolloutEngine(policy, settings, config.run.seed, should_stop)


# Settings that may differ between hosts, with all keys inside.
OF_A_HOST = ("data.media_root", "media.workers", "rollout.server.url", "training.torch_threads")
SHOWN, VALUE_CHARACTERS = 12, 120
NOT_SET, UNREADABLE = "not set", "not readable"


def refuse_differences(config: RunConfig) -> None:
    """A collective: all ranks raise, or none.

    Raises:
        ConfigError: settings, versions, vlm_pg's sources or user code differ between ranks.
    """
    facts = run_facts(config)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    if len(set(gather_objects(digest))) == 1:
        return
    everywhere = gather_objects((socket.gethostname(), facts))
    hosts, of_ranks = [host for host, _ in everywhere], [facts for _, facts in everywhere]
    raise ConfigError(
        "The processes of this run were not started alike:\n  "
        + "\n  ".join(differences(hosts, of_ranks))
        + "\nAll of them need the same settings and versions. Start them with one configuration, and install the same "
        "packages everywhere."
    )


def run_facts(config: RunConfig) -> dict[str, str]:
    """Everything that must be the same on all ranks, by name."""
    facts = {f"version of {name}": found for name, found in versions().items()}
    sources, folder = hashlib.sha256(), Path(vlm_pg.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        sources.update(f"{path.relative_to(folder)}\0{_digest_of_file(path)}\0".encode())
    facts["source files of vlm_pg"] = sources.hexdigest()[:16]
    settings = config.model_dump(mode="json")
    if (file := config.training.deepspeed_config) is not None:
        settings["training"]["deepspeed_config"] = _content(Path(file))
    for key, value in flat(settings):
        if not any(key == own or key.startswith(f"{own}.") for own in OF_A_HOST):
            facts[key] = json.dumps(value)
    functions = [config.algorithm.loss, config.algorithm.advantages, *(one.function for one in config.reward.functions)]
    for name in functions:
        file = name.rpartition(":")[0]
        if file.endswith(".py"):
            facts[f"content of {file}"] = _digest_of_file(Path(file).expanduser())
    return facts


def differences(hosts: Sequence[str], of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each name with differing values, with the ranks of each value.

    Args:
        hosts: of each rank.
        of_ranks: ``run_facts`` of each rank.
    """
    lines = []
    for name in sorted(set().union(*of_ranks)):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(of_ranks):
            ranks_by_value.setdefault(facts.get(name, NOT_SET), []).append(rank)
        if len(ranks_by_value) > 1:
            values = [f"{printable(v, VALUE_CHARACTERS)} on {_named(r, hosts)}" for v, r in ranks_by_value.items()]
            lines.append(f"{name}: {', '.join(values)}")
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """As "ranks 0 to 7 and 12 (node-1, node-2)"."""
    consecutive = groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in run] for _, run in consecutive]
    spans = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    of_hosts = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(spans)} ({printable(of_hosts, VALUE_CHARACTERS)})"


def _content(path: Path) -> Any:
    """Of the DeepSpeed file; each rank reports a faulty one later."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return UNREADABLE


def _digest_of_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return UNREADABLE
