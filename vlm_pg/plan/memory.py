"""Bytes a rank holds in each phase of a step, and what fits into a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from vlm_pg.memory import GIB
from vlm_pg.models.memory_sizes import FP32
from vlm_pg.models.weights import BYTES_PER_WEIGHT
from vlm_pg.plan.activations import TOWER_BACKWARD, TOWER_RUNNING, recorded_bytes, tower_activations, update_activations
from vlm_pg.plan.setup import Setup
from vlm_pg.plan.shape import ModelShape

# Of a device's memory: the rest is for the driver's context, communication buffers, what generation keeps from step to
# step (at most 1/32) and gaps between tensors.
USABLE = 0.94
# AdamW keeps two moments.
MOMENTS = 2
# Prompt tokens that generation runs at a time (rollout.prefill_tokens).
PREFILL_TOKENS = 16_384


@dataclass(frozen=True)
class Plan:
    """Bytes by part for each phase of a step: "vision", "generation", "update", "optimizer step", and where the tower
    trains "tower's backward".
    """

    phases: Mapping[str, Mapping[str, float]]

    @property
    def phase(self) -> str:
        """The one that takes most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> float:
        return sum(self.phases[self.phase].values())

    def fits(self, gpu_gib: float) -> bool:
        return self.peak <= USABLE * gpu_gib * GIB


def plan_memory(shape: ModelShape, setup: Setup) -> Plan:
    """Bytes of one rank; host memory, where states are offloaded to, is not in it."""
    states, gradients = model_states(shape, setup), gradient_bytes(shape, setup)
    tower = tower_activations(shape, setup)
    running, backward = tower.pop(TOWER_RUNNING, 0.0), tower.pop(TOWER_BACKWARD, 0.0)
    # Temporaries of the update over all weights at a time: the square root of the second moments.
    roots = 0.0 if setup.offload_optimizer else FP32 * trained_weights(shape, setup) / setup.optimizer_ranks
    # Frozen blocks keep no pixels.
    pixels = 0.0 if "tower" in setup.train else tower.pop("pixels", 0.0)
    count, size = recorded_groups(shape, setup)
    all_recorded = count * setup.sequence_parallel >= setup.prompts
    recorded, at_backward = {"recorded forwards": count * size}, replace(setup, recorded=True, checkpointing=True)
    # Streams of recorded forwards come first. fp32 sums, which the first one does not find, are counted beside them.
    updates = [recorded | update_activations(shape, at_backward)] if count else []
    updates += [update_activations(shape, setup)] if not all_recorded or setup.updates > 1 else []
    # The tower goes back with the last stream.
    tower_back = {TOWER_BACKWARD: backward, "recorded forwards": size * all_recorded} if backward else {}
    phases = {
        "vision": states | tower | {TOWER_RUNNING: running + pixels},
        "generation": states | tower | generation_bytes(shape, setup) | recorded,
        "update": states | gradients | tower | max(updates, key=lambda parts: sum(parts.values())),
        "tower's backward": states | gradients | tower | tower_back if backward else {},
        "optimizer step": states | gradients | {"the step's own": roots},
    }
    return Plan({name: {part: size for part, size in parts.items() if size} for name, parts in phases.items() if parts})


def plan_to_fit(shape: ModelShape, setup: Setup, gpu_gib: float) -> Plan:
    """As ``plan_memory``; where that does not fit, with all that a run may offload, tile, cut and divide by itself."""
    plan = plan_memory(shape, setup)
    if plan.fits(gpu_gib):
        return plan
    return plan_memory(shape, replace(setup, measures=setup.allowed, divides_prompts=setup.may_divide_prompts))


def recorded_groups(shape: ModelShape, setup: Setup) -> tuple[int, float]:
    """How many of the largest groups that a rank samples find room for their forward as they are booked, and bytes of
    one."""
    token, of_prompt = recorded_bytes(shape, setup)
    count = min(setup.prompts_sampled, int(setup.room_for_forwards / (token * (setup.group + setup.generations))))
    return count, setup.prefix * of_prompt + (setup.group - setup.prefix) * token


def forward_limit(shape: ModelShape, setup: Setup, gpu_gib: float) -> float:
    """What a step leaves for recorded forwards, up to ``keep_forward`` and a share of what is free at the start."""
    from vlm_pg.training.setup import SHARE_FOR_FORWARDS

    usable = USABLE * gpu_gib * GIB
    free = usable - sum((model_states(shape, setup) | gradient_bytes(shape, setup)).values())
    left = max(0.0, min(SHARE_FOR_FORWARDS * free, usable - plan_to_fit(shape, setup, gpu_gib).peak))
    return left if setup.keep_forward is None else min(left, setup.keep_forward)


def trained_weights(shape: ModelShape, setup: Setup) -> int:
    weights = shape.weights
    if setup.lora:
        return weights.adapter
    of_part = {"tower": weights.tower - weights.merger, "merger": weights.merger, "language": weights.language}
    return sum(of_part[part] for part in setup.train)


def model_states(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Weights, their fp32 copies and AdamW's moments: the whole time."""
    weights, trained = shape.weights, trained_weights(shape, setup)
    total = weights.language + weights.tower + weights.adapter
    scattered = setup.ranks if setup.stage == 3 else 1
    quantized = weights.linear if setup.quantize else 0
    found = {"weights": (setup.element * (total - quantized) + BYTES_PER_WEIGHT * quantized) / scattered}
    if setup.quantize:
        found["a layer's weights written out"] = float(setup.element * weights.largest)
    if setup.stage == 3:
        if setup.offload_parameters:
            found["weights"] = 0.0
        live = min(total, setup.live_parameters) * (1 - 1 / setup.ranks if not setup.offload_parameters else 1)
        found["weights gathered from other ranks"] = setup.element * live
    if setup.reference:
        copied = weights.language + (weights.tower if setup.trains_vision else 0)
        found["reference policy"] = float(setup.element * copied)
    if not setup.offload_optimizer:
        # DeepSpeed keeps a copy of its own of fp32 weights, too.
        copies = FP32 * trained / setup.optimizer_ranks if setup.element < FP32 or setup.stage else 0.0
        found["fp32 weights"] = copies
        found["optimizer"] = MOMENTS * FP32 * trained / setup.optimizer_ranks
    return found


def gradient_bytes(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Gradients over the micro-batches of an update, and what reduces them over ranks."""
    trained = trained_weights(shape, setup)
    if not setup.stage:
        own = setup.element * trained if setup.element < FP32 else 0.0
        return {"gradients": float(FP32 * trained + own)}
    held = 0.0 if setup.offload_optimizer else FP32 * trained / (setup.optimizer_ranks if setup.stage > 1 else 1)
    # A layer's gradients in the weights' own dtype, before they are reduced.
    layer = 0 if setup.lora or "language" not in setup.train else shape.weights.layer
    return {"gradients": held + setup.element * layer, "buckets": float(setup.element * setup.bucket)}


def generation_bytes(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """At least: keys and values of one group, every response at its longest; one pass of its prompt.

    With sequence parallelism every rank holds the prefix, or its part of it, and its part of the rollouts.
    """
    text, e = shape.language, setup.element
    width, narrow = text.query_width, text.key_width
    rollouts = -(-setup.generations // setup.sequence_parallel)
    divided = setup.divides_prompts and setup.generations >= setup.sequence_parallel
    tokens = -(-setup.prefix // (setup.sequence_parallel if divided else 1)) + rollouts * setup.response
    if not setup.share_prefix:
        tokens = rollouts * (setup.prefix + setup.response)
    rows = min(PREFILL_TOKENS, setup.prefix) / setup.sequence_parallel
    one_layer = e * (4 * text.hidden + 3 * width + 4 * narrow + 3 * text.intermediate)
    return {
        "keys and values of one group": tokens * text.full_layers * 2 * narrow * e,
        "one layer of prefill": rows * one_layer,
        "logits of a token": rollouts * text.vocab * 3 * FP32,
    }


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest whole number up to ``most`` that fits, 0 if none does; nothing fits above one that does not."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_prefix(shape: ModelShape, setup: Setup, gpu_gib: float) -> int:
    """Tokens of the largest prompt that fits, with a budget of it and one response; its text as now, the rest media."""

    def fits(prefix: int) -> bool:
        patches, budget = 0, prefix + setup.response
        if shape.tower is not None and setup.patches:
            patches = max(0, setup.patches + (prefix - setup.prefix) * shape.tower.patches_per_token)
        return plan_to_fit(shape, replace(setup, prefix=prefix, patches=patches, budget=budget), gpu_gib).fits(gpu_gib)

    return largest(fits, 2**24)


def largest_budget(shape: ModelShape, setup: Setup, gpu_gib: float) -> int:
    """``training.micro_batch_tokens`` that fits; 0 where not even the largest prompt and a response do."""
    least = setup.prefix + setup.response
    beside = {TOWER_RUNNING, TOWER_BACKWARD} | ({"pixels"} if "tower" not in setup.train else set())
    tower = sum(size for part, size in tower_activations(shape, setup).items() if part not in beside)

    def fits(more: int) -> bool:
        # As if there were always enough prompts to fill it.
        wide = replace(setup, budget=least + more, prompts=max(setup.prompts, (least + more) // least + 1))
        return plan_to_fit(shape, replace(wide, patches=0), gpu_gib).peak + tower <= USABLE * gpu_gib * GIB

    return least + largest(fits, 2**24) if fits(0) else 0
