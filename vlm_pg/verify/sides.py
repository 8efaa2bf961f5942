"""The two sides, and how far they lie apart: groups over shared prefixes, and transformers' own forward over every
prompt + response.

Shape letters: R response tokens, V vocabulary.

**fp32.** Both sides add up the same products in another order. Every addition rounds by 6e-8 of its result; over the
layers of a large model that grows to some 1e-5, and to 1e-4 behind a softmax that is nearly certain. Allowed are 1e-3:
above what rounding does, far below what a wrong kernel does (a dropped log-sum-exp term in the backward of a merge puts
the gradients of keys off by 7e-2 and those of queries by 5e-1).

**bf16.** Both sides are compared with the repeated forward in fp32. bf16 has an error of its own there, whoever
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
from vlm_pg.bench.memory import peak_above_baseline
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.packing import packed_tokens
from vlm_pg.models.policy import Policy
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
        yield (
            f"the gradient of {name} is off by {error:.1e} of its norm in fp32, more than any other; allowed are "
            f"{FP32_GRADIENT:.0e}"
        )


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
    backward(policy, groups[:1])
    _forget(policy)
    on_gpu = policy.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    (logprobs, seconds), peak = peak_above_baseline(lambda: _timed(policy, groups, backward), on_gpu)
    gradients = {
        name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).float().cpu()
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    }
    _forget(policy)
    return Side(Values([values.detach().float().cpu() for values in logprobs], gradients), seconds, peak.num_bytes)


def shared_backward(budget: int) -> Backward:
    """As training computes: groups within ``budget`` tokens in one pass, else prefixes once, responses in chunks."""

    def backward(policy: Policy, groups: Sequence[ResponseGroup]) -> list[torch.Tensor]:
        sizes = [packed_tokens(g.prompt.num_tokens, [len(r) for r in g.responses]) for g in groups]
        batches = [list(groups)] if sum(sizes) <= budget else [[group] for group in groups]
        found: list[torch.Tensor] = []
        for batch in batches:
            tokens = sum(packed_tokens(g.prompt.num_tokens, [len(r) for r in g.responses]) for g in batch)
            # A batch beyond the budget is one group.
            found += _shared(policy, batch, None if tokens <= budget else max(1, budget - batch[0].prompt.num_tokens))
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
    return [found[place] for place in sorted(found)]


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
    places = torch.arange(prompt.num_tokens + more)[None]
    positions = torch.cat([places, torch.cat([prompt.positions_3P, following], dim=1)])
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
        chosen = [place for place, of_kind in enumerate(prompt.media_kinds) if of_kind == kind]
        if chosen:
            inputs |= {pixel_name: torch.cat([pixels[place] for place in chosen]), grid_name: prompt.grid_thw[chosen]}
    return inputs


def _timed(policy: Policy, groups: Sequence[ResponseGroup], backward: Backward) -> tuple[list[torch.Tensor], float]:
    start = time.perf_counter()
    found = backward(policy, groups)
    if policy.device.type == "cuda":
        torch.cuda.synchronize(policy.device)
    return found, time.perf_counter() - start


def _forget(policy: Policy) -> None:
    """No gradients, and no output of the vision tower: each side has its own."""
    policy.model.zero_grad(set_to_none=True)
    policy.vision.forget()
