"""``vlm-pg verify``: real prompts and the real checkpoint, groups over shared prefixes against transformers' own
forward over every prompt + response, and whether the two agree.

Shape letters: R response tokens, V vocabulary.

**fp32.** Both sides add up the same products in another order. Every addition rounds by 6e-8 of its result; over the
layers of a large model that grows to some 1e-5, and to 1e-4 behind a softmax that is nearly certain. Allowed are 1e-3:
above what rounding does, far below what a wrong kernel does (a dropped log-sum-exp term in the backward of a merge puts
the gradients of keys off by 7e-2 and those of queries by 5e-1).

**bf16.** Both sides are compared with the repeated forward in fp32. bf16 has an error of its own there, whatever
computes; where sharing is exact its error is another draw of the same kind. Allowed is twice the error of the repeated
forward, and for single parameters, of which some are small and whose errors scatter more, 0.02 beyond that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.memory import give_freed_memory_back, peak_above_baseline
from vlm_pg.config import RunConfig
from vlm_pg.data.difficulty import within_difficulty
from vlm_pg.data.sample_sets import first_of_each, open_training, order_of, refuse_empty, used_samples
from vlm_pg.distributed import launched_world_size
from vlm_pg.errors import ConfigError
from vlm_pg.models.feature_cache import keep_features
from vlm_pg.models.loading import load_policy
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.packing import packed_tokens, repeated_tokens
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console, quiet_libraries
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import SourcePool
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.threads import use_threads
from vlm_pg.types import Prompt, ResponseGroup

FP32_NATS = 1e-3
FP32_GRADIENT = 1e-3
BF16_TIMES = 2.0
BF16_PARAMETER_MARGIN = 0.02
# A gradient that is rounding itself (of key biases, say, which cancel in the softmax) is measured by the largest one.
SMALLEST_SHARE = 1e-3


@dataclass(frozen=True)
class Values:
    """``logprobs`` fp32 [R] of each response; ``gradients`` fp32 of each trained parameter, on the CPU."""

    logprobs: Sequence[torch.Tensor]
    gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Errors:
    """Log-probabilities in nats; gradients relative to the reference's norm, of all parameters as one and of each."""

    logprob_max: float
    logprob_rms: float
    gradient: float
    by_parameter: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient is farthest off; one that is not a number before all others."""
        return max(self.by_parameter.items(), key=lambda item: (item[1] != item[1], item[1]))


def errors(found: Values, reference: Values) -> Errors:
    """How far ``found`` is from ``reference``."""
    apart = torch.cat([mine - other for mine, other in zip(found.logprobs, reference.logprobs, strict=True)]).double()
    norms = {name: float(gradient.double().norm()) for name, gradient in reference.gradients.items()}
    floor = max(SMALLEST_SHARE * max(norms.values()), 1e-30)
    distances = {
        name: float((found.gradients[name] - gradient).double().norm())
        for name, gradient in reference.gradients.items()
    }
    return Errors(
        float(apart.abs().max()),
        float(apart.square().mean().sqrt()),
        math.hypot(*distances.values()) / max(math.hypot(*norms.values()), floor),
        {name: distance / max(norms[name], floor) for name, distance in distances.items()},
    )


def too_far_in_fp32(shared: Errors) -> Iterator[str]:
    """Differences beyond rounding, in words; none where sharing is exact."""
    if not shared.logprob_max <= FP32_NATS:
        yield f"log-probabilities differ by up to {shared.logprob_max:.1e} nats in fp32; allowed are {FP32_NATS:.0e}"
    name, error = shared.worst
    if not error <= FP32_GRADIENT:
        fault = f"the gradient of {name} is off by {error:.1e} of its norm in fp32, more than any other"
        yield f"{fault}; allowed are {FP32_GRADIENT:.0e}"


def too_far_in_bf16(shared: Errors, repeated: Errors) -> Iterator[str]:
    """Errors beyond those of bf16 itself, in words."""
    if not shared.logprob_rms <= BF16_TIMES * repeated.logprob_rms:
        yield (
            f"log-probabilities in bf16 are {shared.logprob_rms:.1e} nats (rms) from fp32, repeated ones "
            f"{repeated.logprob_rms:.1e}; allowed is {BF16_TIMES:g} times that"
        )
    if not shared.gradient <= BF16_TIMES * repeated.gradient:
        yield (
            f"the gradient in bf16 is off by {shared.gradient:.1e} of its norm, the repeated one by "
            f"{repeated.gradient:.1e}; allowed is {BF16_TIMES:g} times that"
        )
    beyond = {name: error - BF16_TIMES * repeated.by_parameter[name] for name, error in shared.by_parameter.items()}
    name = max(beyond, key=lambda one: (beyond[one] != beyond[one], beyond[one]))
    if not beyond[name] <= BF16_PARAMETER_MARGIN:
        yield (
            f"the gradient of {name} in bf16 is off by {shared.by_parameter[name]:.1e} of its norm, the repeated one "
            f"by {repeated.by_parameter[name]:.1e}; allowed is {BF16_TIMES:g} times that and {BF16_PARAMETER_MARGIN:g}"
        )


# Runs forward and backward over groups; gives the log-probabilities of their responses.
Backward = Callable[[Policy, Sequence[ResponseGroup]], list[torch.Tensor]]


@dataclass(frozen=True)
class Side:
    """Results of one side, its seconds, and its memory beside the weights (gradients count)."""

    values: Values
    seconds: float
    peak_bytes: int


def run_side(policy: Policy, groups: Sequence[ResponseGroup], backward: Backward) -> Side:
    """Forward and backward over ``groups``; a first run over one of them, which warms up, does not count."""
    on_gpu = policy.device.type == "cuda"

    def forget() -> None:
        """No gradients, and no output of the vision tower: each side has its own."""
        policy.model.zero_grad(set_to_none=True)
        policy.vision.forget()

    def timed() -> tuple[list[torch.Tensor], float]:
        start = time.perf_counter()
        found = backward(policy, groups)
        if on_gpu:
            torch.cuda.synchronize(policy.device)
        return found, time.perf_counter() - start

    backward(policy, groups[:1])
    forget()
    if on_gpu:
        torch.cuda.empty_cache()
    (logprobs, seconds), peak = peak_above_baseline(timed, on_gpu)
    gradients = {
        name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).float().cpu()
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    }
    forget()
    return Side(Values([values.detach().float().cpu() for values in logprobs], gradients), seconds, peak.num_bytes)


def shared_backward(budget: int) -> Backward:
    """As training computes: groups within ``budget`` tokens in one pass, else prefixes once, responses in chunks."""

    def backward(policy: Policy, groups: Sequence[ResponseGroup]) -> list[torch.Tensor]:
        sizes = [packed_tokens(g.prompt.num_tokens, [len(r) for r in g.responses]) for g in groups]
        if sum(sizes) <= budget:
            return _shared(policy, groups, None)
        found: list[torch.Tensor] = []
        for group, tokens in zip(groups, sizes, strict=True):
            found += _shared(policy, [group], None if tokens <= budget else max(1, budget - group.prompt.num_tokens))
        return found

    return backward


def repeated_backward(policy: Policy, groups: Sequence[ResponseGroup]) -> list[torch.Tensor]:
    """transformers' model, its own forward and attention, one prompt + response after the other."""
    found = []
    with transformers_attention(policy):
        for group in groups:
            for index, response in enumerate(group.responses):
                logprobs = _alone(policy, group.prompt, response)
                loss = (logprobs * token_weights(index, len(response), policy.device)).sum()
                # Of a question without media there is none where the language model is frozen.
                if loss.requires_grad:
                    loss.backward()
                found.append(logprobs.detach())
    return found


def token_weights(index: int, length: int, device: torch.device) -> torch.Tensor:
    """fp32 [R]: a loss with another weight for every token, signs mixed, so that errors cannot cancel."""
    return (1.7 * torch.arange(length) + index).cos().to(device) + 0.3


@contextmanager
def transformers_attention(policy: Policy) -> Iterator[None]:
    """Inside, the language model's layers attend as transformers' own do (torch's scaled dot product)."""
    policy.model.set_attn_implementation(policy.family.attention_setting("sdpa"))
    try:
        yield
    finally:
        policy.model.set_attn_implementation(policy.family.attention_setting(ATTENTION_NAME))


def _shared(policy: Policy, groups: Sequence[ResponseGroup], chunk_tokens: int | None) -> list[torch.Tensor]:
    found: dict[tuple[int, int], torch.Tensor] = {}

    def loss_of(chunk: list[list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        parts = []
        for group, responses in enumerate(chunk):
            for index, logprobs in responses:
                found[group, index] = logprobs.detach()
                parts.append((logprobs * token_weights(index, len(logprobs), policy.device)).sum())
        return torch.stack(parts).sum()

    backward_in_chunks(policy, groups, loss_of, chunk_tokens)
    return [found[key] for key in sorted(found)]


def _alone(policy: Policy, prompt: Prompt, response: torch.Tensor) -> torch.Tensor:
    """fp32 [R] of one response."""
    device, count = policy.device, len(response)
    ids = torch.cat([prompt.input_ids, response])[None].to(device)
    inputs = _media_inputs(prompt, count) if policy.family.reads_media else {}
    inputs = {name: value.to(device) for name, value in inputs.items()}
    # The row before the response predicts its first token; the last row predicts nothing that was sampled.
    logits = policy.model(
        input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=count + 1, use_cache=False, **inputs
    ).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, response.to(device)[:, None])[:, 0]


def _media_inputs(prompt: Prompt, more: int) -> dict[str, torch.Tensor]:
    """Token types, positions by the run's own rule, pixels and grids as transformers' forward takes them."""
    following = (prompt.next_position + torch.arange(more)).expand(3, -1)
    indices = torch.arange(prompt.num_tokens + more)[None]
    positions = torch.cat([indices, torch.cat([prompt.positions_3P, following], dim=1)])
    inputs: dict[str, Any] = {
        "mm_token_type_ids": torch.nn.functional.pad(prompt.mm_token_type_ids, (0, more))[None],
        "position_ids": positions[:, None],
    }
    if prompt.pixel_values is None or prompt.grid_thw is None:
        return inputs
    pixels = prompt.pixel_values.split(prompt.grid_thw.prod(-1).tolist())
    for kind, pixel_name, grid_name in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        if chosen := [index for index, of_kind in enumerate(prompt.media_kinds) if of_kind == kind]:
            inputs |= {pixel_name: torch.cat([pixels[index] for index in chosen]), grid_name: prompt.grid_thw[chosen]}
    return inputs


def verify(config: RunConfig, questions: int, response_tokens: int) -> bool:
    """Compare both sides on the first questions of a run; print the errors, and return whether they agree.

    The questions are those the run would ask first; the policy answers them itself (``rollout.num_generations`` times,
    at most ``response_tokens`` tokens). In fp32, and for ``model.dtype=bf16`` in bf16 too.

    Raises:
        ConfigError: no training data, nothing that trains, sharing switched off, or several processes.
        TooManyBadSamples: none of the first questions can be used.
    """
    if not config.data.train_sets:
        raise ConfigError("data.train is not set. verify takes its questions from there. Set data.train=PATH.")
    if not config.model.share_prefix:
        raise ConfigError(
            "model.share_prefix is false, but verify compares sharing with repeating. Leave it out, or set it to true."
        )
    if launched_world_size() > 1:
        raise ConfigError(f"verify runs in one process, {launched_world_size()} were started. Start it by itself.")
    use_threads(config.training.torch_threads)
    quiet_libraries()
    if not torch.cuda.is_available():
        give_freed_memory_back()
    console = Console(enabled=True)
    policy = _policy(config, "fp32", console)
    prompts = _prompts(config, policy, questions, response_tokens, console)
    # The policy samples, whatever engine the run has; stop strings decide nothing that is compared.
    update = {"engine": "in_process", "min_new_tokens": 0, "stop_strings": ()}
    update |= {"max_new_tokens": min(response_tokens, config.rollout.max_new_tokens)}
    engine = RolloutEngine(policy, config.rollout.model_copy(update=update), config.run.seed)
    groups = [
        ResponseGroup(prompt, tuple(rollout.token_ids for rollout in rollouts))
        for prompt, rollouts in zip(prompts, engine.generate(prompts, "verify"), strict=True)
    ]
    console.info(f"model: {config.model.path} ({policy.family.model_type}) on {policy.device}")
    console.info(group_line(groups))
    shared = shared_backward(config.training.micro_batch_tokens)
    console.info("in fp32: computing")
    reference = run_side(policy, groups, repeated_backward)
    in_fp32 = run_side(policy, groups, shared)
    found = errors(in_fp32.values, reference.values)
    console.info(*fp32_lines(in_fp32, reference, found))
    faults = list(too_far_in_fp32(found))
    if config.model.dtype == "bf16":
        del policy
        faults += _in_bf16(config, groups, reference, console)
    console.warn(*faults)
    console.info("verify: FAILED, sharing is not exact here" if faults else "verify: passed, sharing is exact here")
    return not faults


def _in_bf16(config: RunConfig, groups: Sequence[ResponseGroup], reference: Side, console: Console) -> Iterator[str]:
    policy = _policy(config, "bf16", console)
    console.info("in bf16: computing")
    repeated = run_side(policy, groups, repeated_backward)
    shared = run_side(policy, groups, shared_backward(config.training.micro_batch_tokens))
    of_shared, of_repeated = (errors(side.values, reference.values) for side in (shared, repeated))
    console.info(*bf16_lines(shared, repeated, of_shared, of_repeated))
    return too_far_in_bf16(of_shared, of_repeated)


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
    samples = within_difficulty(first_of_each(found_samples, config.data.limit), config.data, console.info)
    for item in bad[:3]:
        console.warn(str(item))
    refuse_empty(samples, config.data, f"{len(bad)} are bad")
    policy.check_samples(used_samples(samples, config.data.mixture), path)
    builder = PromptBuilder(policy.processor, config.prompt, policy.positions)

    def check(prompt: Prompt) -> None:
        policy.check_length(prompt, response_tokens)

    found: list[Prompt] = []
    with SourcePool(builder, config.data, config.media, policy.pixel_factor, check, cache=config.cache) as sources:
        source = sources.for_training()
        order = order_of(samples, config.data.mixture)
        for number in range(len(order)):
            sample = samples[order.index_at(number, config.run.seed, config.data.shuffle)]
            good, faults = source.load([sample])
            found += [prompt for _, prompt in good]
            for fault in faults:
                console.warn(str(fault))
            if len(found) == questions:
                break
    if not found:
        raise ConfigError(f"No question of {path} could be used; see above. Repair the data, or set data.train.")
    return found


def group_line(groups: Sequence[ResponseGroup]) -> str:
    """The work of both sides."""
    lengths = [len(response) for group in groups for response in group.responses]
    sizes = [(group.prompt.num_tokens, group.prompt.num_visual_tokens) for group in groups]
    prompts = " and ".join(f"{tokens:,} tokens ({visual:,} visual)" for tokens, visual in sizes)
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


def _costs(*sides: Side) -> list[str]:
    return [
        _row("  seconds", *(f"{side.seconds:.3g}" for side in sides)),
        _row("  peak memory beside the weights, MiB", *(f"{side.peak_bytes / 2**20:,.0f}" for side in sides)),
    ]


def _row(name: str, shared: str, repeated: str) -> str:
    return f"{name:38}{shared:>12}{repeated:>12}"
