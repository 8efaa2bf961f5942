"""The command: real prompts and the real checkpoint, shared against repeated, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from vlm_pg.bench.memory import give_freed_memory_back
from vlm_pg.config import RunConfig
from vlm_pg.data.order import order_of, used_samples
from vlm_pg.data.sample_sets import first_of_each, open_training, refuse_empty
from vlm_pg.distributed import launched_world_size
from vlm_pg.errors import ConfigError
from vlm_pg.models.feature_cache import keep_features
from vlm_pg.models.loading import load_policy
from vlm_pg.models.packing import repeated_tokens
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console, quiet_libraries
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.source_pool import SourcePool
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.threads import use_threads
from vlm_pg.types import Prompt, ResponseGroup
from vlm_pg.verify.sides import (
    BF16_PARAMETER_MARGIN,
    BF16_TIMES,
    FP32_GRADIENT,
    FP32_NATS,
    Errors,
    Side,
    errors,
    repeated_backward,
    run_side,
    shared_backward,
    too_far_in_bf16,
    too_far_in_fp32,
)


def verify(config: RunConfig, questions: int, response_tokens: int) -> bool:
    """Compare both sides on the first questions of a run; print the errors, and return whether they agree.

    The questions are those the run would ask first; the policy answers them itself (``rollout.num_generations`` times,
    at most ``response_tokens`` tokens). In fp32, and for ``model.dtype=bf16`` in bf16 too.

    Raises:
        ConfigError: no training data, nothing that trains, sharing switched off, or several processes.
        TooManyBadSamples: none of the first questions can be used.
    """
    _refuse(config)
    use_threads(config.training.torch_threads)
    quiet_libraries()
    if not torch.cuda.is_available():
        give_freed_memory_back()
    console = Console(enabled=True)
    policy = _policy(config, "fp32", console)
    prompts = _prompts(config, policy, questions, response_tokens, console)
    groups = _answered(config, policy, prompts, response_tokens)
    console.info(f"model: {config.model.path} ({policy.family.model_type}) on {policy.device}")
    console.info(group_line(groups))
    shared = shared_backward(config.training.micro_batch_tokens)
    console.info("in fp32: computing")
    reference = run_side(policy, groups, repeated_backward)
    in_fp32 = run_side(policy, groups, shared)
    found = errors(in_fp32.values, reference.values)
    for line in fp32_lines(in_fp32, reference, found):
        console.info(line)
    faults = list(too_far_in_fp32(found))
    if config.model.dtype == "bf16":
        del policy
        faults += _in_bf16(config, groups, reference, console)
    for fault in faults:
        console.warn(fault)
    console.info("verify: FAILED, sharing is not exact here" if faults else "verify: passed, sharing is exact here")
    return not faults


def _in_bf16(config: RunConfig, groups: Sequence[ResponseGroup], reference: Side, console: Console) -> Iterator[str]:
    policy = _policy(config, "bf16", console)
    console.info("in bf16: computing")
    repeated = run_side(policy, groups, repeated_backward)
    shared = run_side(policy, groups, shared_backward(config.training.micro_batch_tokens))
    of_shared, of_repeated = (errors(side.values, reference.values) for side in (shared, repeated))
    for line in bf16_lines(shared, repeated, of_shared, of_repeated):
        console.info(line)
    return too_far_in_bf16(of_shared, of_repeated)


def _refuse(config: RunConfig) -> None:
    if not config.data.train_sets:
        raise ConfigError("data.train is not set. verify takes its questions from there. Set data.train=PATH.")
    if not config.model.share_prefix:
        raise ConfigError(
            "model.share_prefix is false, but verify compares sharing with repeating. Leave it out, or set it to true."
        )
    if launched_world_size() > 1:
        raise ConfigError(f"verify runs in one process, {launched_world_size()} were started. Start it by itself.")


def _policy(config: RunConfig, dtype: str, console: Console) -> Policy:
    policy = load_policy(config.model.path, dtype=dtype, settings=config.model)
    if not any(parameter.requires_grad for parameter in policy.model.parameters()):
        raise ConfigError(
            f"{config.model.path} is an adapter and model.lora is not set, so that there is no gradient to compare. "
            "Set model.lora to the settings the adapter was trained with."
        )
    if line := keep_features(policy, config.cache):
        console.info(line)
    return policy


def _prompts(config: RunConfig, policy: Policy, questions: int, response_tokens: int, console: Console) -> list[Prompt]:
    """Prompts of the questions that come first in the run's order and can be used."""
    path = config.data.train_shown
    found_samples, bad = open_training(config.data)
    samples = first_of_each(found_samples, config.data.limit)
    for item in bad[:3]:
        console.warn(str(item))
    refuse_empty(samples, config.data, f"{len(bad)} are bad")
    policy.check_samples(used_samples(samples, config.data.mixture), path)
    builder = PromptBuilder(policy.processor, config.prompt, policy.positions)

    def check(prompt: Prompt) -> None:
        policy.check_length(prompt, response_tokens)

    found: list[Prompt] = []
    with SourcePool(builder, config.data, config.media, policy.pixel_factor, check, kept=config.cache) as sources:
        source = sources.for_training()
        order = order_of(samples, config.data.mixture)
        for place in range(len(order)):
            sample = samples[order.index_at(place, config.run.seed, config.data.shuffle)]
            good, faults = source.load([sample])
            found += [prompt for _, prompt in good]
            for fault in faults:
                console.warn(str(fault))
            if len(found) == questions:
                break
    if not found:
        raise ConfigError(f"No question of {path} could be used; see above. Repair the data, or set data.train.")
    return found


def _answered(
    config: RunConfig, policy: Policy, prompts: Sequence[Prompt], response_tokens: int
) -> list[ResponseGroup]:
    longest = min(response_tokens, config.rollout.max_new_tokens)
    # The policy samples, whatever engine the run has; stop strings decide nothing that is compared.
    settings = config.rollout.model_copy(
        update={"engine": "in_process", "max_new_tokens": longest, "min_new_tokens": 0, "stop_strings": ()}
    )
    rollouts = RolloutEngine(policy, settings, config.run.seed).generate(prompts, "verify")
    return [
        ResponseGroup(prompt, tuple(rollout.token_ids for rollout in of_prompt))
        for prompt, of_prompt in zip(prompts, rollouts, strict=True)
    ]


def group_line(groups: Sequence[ResponseGroup]) -> str:
    """The work of both sides."""
    lengths = [len(response) for group in groups for response in group.responses]
    prompts = " and ".join(
        f"{group.prompt.num_tokens:,} tokens ({group.prompt.num_visual_tokens:,} visual)" for group in groups
    )
    tokens = sum(repeated_tokens(g.prompt.num_tokens, [len(r) for r in g.responses]) for g in groups)
    responses = f"{len(lengths)} responses of {min(lengths)} to {max(lengths)} tokens"
    return (
        f"{len(groups)} question(s), prompts of {prompts}; {responses}; {tokens:,} tokens if all is repeated. Forward "
        "and backward; repeated: transformers' own forward, one response after the other"
    )


def fp32_lines(shared: Side, repeated: Side, found: Errors) -> list[str]:
    """Costs of both, and how far shared is from repeated."""
    name, error = found.worst
    return [
        _row("fp32", "shared", "repeated"),
        *_costs(shared, repeated),
        f"  log-probabilities: largest difference {found.logprob_max:.1e} nats (allowed {FP32_NATS:.0e})",
        f"  gradient: relative difference {found.gradient:.1e}; worst of {len(found.by_parameter)} parameters {name} "
        f"{error:.1e} (allowed {FP32_GRADIENT:.0e})",
    ]


def bf16_lines(shared: Side, repeated: Side, of_shared: Errors, of_repeated: Errors) -> list[str]:
    """Costs of both, and how far each is from repeated in fp32."""
    name, error = of_shared.worst
    return [
        _row("bf16, errors against fp32 repeated", "shared", "repeated"),
        *_costs(shared, repeated),
        _row("  log-probabilities, rms, nats", f"{of_shared.logprob_rms:.1e}", f"{of_repeated.logprob_rms:.1e}"),
        _row("  log-probabilities, largest, nats", f"{of_shared.logprob_max:.1e}", f"{of_repeated.logprob_max:.1e}"),
        _row("  gradient, relative", f"{of_shared.gradient:.1e}", f"{of_repeated.gradient:.1e}"),
        _row("  worst parameter's gradient", f"{error:.1e}", f"{of_repeated.by_parameter[name]:.1e}") + f"  {name}",
        f"  allowed: {BF16_TIMES:g} times repeated's error; for a single parameter {BF16_PARAMETER_MARGIN:g} more",
    ]


def _costs(shared: Side, repeated: Side) -> list[str]:
    memory = [f"{side.peak_bytes / 2**20:,.0f}" for side in (shared, repeated)]
    return [
        _row("  seconds", f"{shared.seconds:.3g}", f"{repeated.seconds:.3g}"),
        _row("  peak memory beside the weights, MiB", *memory),
    ]


def _row(name: str, shared: str, repeated: str) -> str:
    return f"{name:38}{shared:>12}{repeated:>12}"
