"""Settings that make a run fit, searched from the cheapest to the dearest, and the plan with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlm_pg.models.memory_sizes import FP32
from vlm_pg.models.stream_share import possible_sizes
from vlm_pg.plan.memory import Plan, largest, plan_to_fit
from vlm_pg.plan.setup import Setup
from vlm_pg.plan.shape import ModelShape

# Of the shipped DeepSpeed files: stage, optimizer states and weights in host memory, and the option's cost. Weights in
# host memory cross the bus in every pass and decode step.
ZERO_FILES = {
    "zero2": (2, False, False, 2),
    "zero3": (3, False, False, 3),
    "zero2_offload": (2, True, False, 5),
    "zero3_offload": (3, True, True, 24),
}
# They reduce gradients in two buffers (overlap_comm) of DeepSpeed's default size.
SHIPPED_BUCKET = 2 * 500_000_000


@dataclass(frozen=True)
class Option:
    """Overrides of a run's configuration, and the fields of ``Setup`` that they change.

    ``cost`` orders combinations: settings that cost time come before those that change precision or the trained parts.
    ``short``: for a table's cell.
    """

    overrides: str
    changes: Mapping[str, Any]
    cost: int
    short: str = ""


@dataclass(frozen=True)
class Remedy:
    """Options that are set together, and the plan with them."""

    options: Sequence[Option]
    setup: Setup
    plan: Plan

    @property
    def overrides(self) -> str:
        return " ".join(option.overrides for option in self.options)


def levers(shape: ModelShape, setup: Setup) -> dict[str, list[Option]]:
    """By name the options beyond the settings; a combination has at most one of each name."""
    found = {
        "gradient checkpointing": _checkpointing(setup),
        "token budget": _budget(setup),
        "ZeRO with and without offload": list(_zero(setup)),
        "sequence parallelism": list(_sequence_parallel(shape, setup)),
        "bf16": [Option("model.dtype=bf16", {"element": 2}, 6)] if setup.element == FP32 else [],
        "parts to train": list(_parts(setup)),
    }
    found["LoRA and QLoRA" if not setup.lora else "QLoRA"] = list(_adapters(setup))
    return {name: options for name, options in found.items() if options}


def first_remedy(shape: ModelShape, setup: Setup, gpu_gib: float) -> Remedy | None:
    """The cheapest combination of options that fits; None where none does."""
    remedies = (_remedy(shape, setup, options, gpu_gib) for options in _combinations(shape, setup))
    return next((remedy for remedy in remedies if remedy.plan.fits(gpu_gib)), None)


def shorter_prompts(shape: ModelShape, setup: Setup, gpu_gib: float) -> Remedy | None:
    """With the combination that needs least: the longest prompts that fit; None where no prompt does."""
    combinations = _combinations(shape, setup)
    least = min(combinations, key=lambda options: _remedy(shape, setup, options, gpu_gib).plan.peak, default=())
    others = [option for option in least if "budget" not in option.changes]

    def with_prompts_of(tokens: int) -> Remedy:
        patches = min(setup.patches, tokens * shape.tower.patches_per_token) if shape.tower else 0
        shorter = replace(setup, prefix=tokens, patches=patches, least_budget=tokens + setup.response + 1)
        options = [*others, *_budget(shorter), Option(f"prompt.max_prompt_tokens={tokens}", {}, 0)]
        return _remedy(shape, shorter, options, gpu_gib)

    tokens = largest(lambda count: with_prompts_of(count).plan.fits(gpu_gib), setup.prefix - 1)
    return with_prompts_of(tokens) if tokens else None


def _combinations(shape: ModelShape, setup: Setup) -> list[tuple[Option, ...]]:
    """The cheapest first; of the two levers on the trained parts one at a time."""
    choices = [(None, *options) for options in levers(shape, setup).values()]
    found = [tuple(filter(None, chosen)) for chosen in itertools.product(*choices)]
    found = [options for options in found if options and sum("train" in option.changes for option in options) < 2]
    return sorted(found, key=lambda options: sum(option.cost for option in options))


def _remedy(shape: ModelShape, setup: Setup, options: Sequence[Option], gpu_gib: float) -> Remedy:
    """The plan with these options, and with the adapter that ``model.lora={}`` adds."""
    changed = replace(setup, **{name: value for option in options for name, value in option.changes.items()})
    if changed.lora and not shape.weights.adapter:
        shape = replace(shape, weights=replace(shape.weights, adapter=shape.weights.default_adapter))
    return Remedy(options, changed, plan_to_fit(shape, changed, gpu_gib))


def _checkpointing(setup: Setup) -> list[Option]:
    if setup.checkpointing:
        return []
    # Checkpointed layer inputs can be offloaded, too.
    allowed = replace(setup.allowed, **dict.fromkeys(setup.offloads_with_checkpointing, True))
    return [Option("model.gradient_checkpointing=true", {"checkpointing": True, "allowed": allowed}, 2)]


def _budget(setup: Setup) -> list[Option]:
    least, exact = setup.least_budget or setup.prefix + setup.response, setup.prefix + setup.response + 1
    options = [Option(f"training.micro_batch_tokens={least}", {"budget": least}, 1)]
    # A budget must hold the longest prompt that is allowed, though media may make no such prompt.
    words = f"prompt.max_prompt_tokens={setup.prefix} training.micro_batch_tokens={exact}"
    options += [Option(words, {"budget": exact, "least_budget": exact}, 3)] if exact < least else []
    return [option for option in options if option.changes["budget"] < setup.budget]


def _zero(setup: Setup) -> Iterator[Option]:
    now = (setup.stage, setup.offload_optimizer, setup.offload_parameters)
    for name, (stage, optimizer, parameters, cost) in ZERO_FILES.items():
        then = (stage, optimizer, parameters)
        saves = then != now and all(after >= before for before, after in zip(now, then, strict=True))
        # A single rank has no peers to shard optimizer states with.
        if not saves or (setup.ranks == 1 and not optimizer):
            continue
        overrides = f"training.deepspeed_config=configs/deepspeed/{name}.json"
        changes = {"stage": stage, "offload_optimizer": optimizer, "offload_parameters": parameters}
        changes |= {"bucket": SHIPPED_BUCKET, "live_parameters": 10**9}
        yield Option(f"training.engine=deepspeed {overrides}", changes, cost, f"ZeRO-{stage}{', offload' * optimizer}")


def _sequence_parallel(shape: ModelShape, setup: Setup) -> Iterator[Option]:
    text = shape.language
    sizes = set(possible_sizes(text.heads, text.kv_heads))
    if text.linear is not None:
        sizes &= set(possible_sizes(text.linear.value_heads, text.linear.key_heads))
    for number, size in enumerate(sorted(sizes), start=4):
        if size > setup.sequence_parallel and setup.ranks % size == 0:
            # Fewer data ranks have more of a step's prompts each.
            of_step = setup.prompts_of_step or setup.prompts * setup.ranks // setup.sequence_parallel
            prompts = -(-of_step * size // setup.ranks)
            changes = {"sequence_parallel": size, "prompts": prompts}
            yield Option(f"training.sequence_parallel={size}", changes, number, f"SP {size}")


def _parts(setup: Setup) -> Iterator[Option]:
    if "tower" in setup.train and "merger" in setup.train:
        less = tuple(part for part in setup.train if part != "tower")
        yield Option(_train(setup, *less), {"train": less}, 10)
    if setup.trains_vision and "language" in setup.train:
        yield Option(_train(setup, "language"), {"train": ("language",)}, 12)


def _adapters(setup: Setup) -> Iterator[Option]:
    """A KL term's reference is then the model with its adapter off."""
    if "language" not in setup.train:
        return
    changes: dict[str, Any] = {"train": ("language",), "lora": True, "reference": False}
    train = f"{_train(setup, 'language')} " if setup.trains_vision else ""
    if not setup.lora:
        yield Option(f"{train}model.lora={{}}", changes, 16, "LoRA")
    if not setup.quantize:
        yield Option(f"{train}model.lora.quantize=nf4", changes | {"quantize": True}, 20, "QLoRA")


def _train(setup: Setup, *parts: str) -> str:
    # A rate of a part that is frozen is refused.
    return f"model.train=[{','.join(parts)}]" + " training.learning_rates={}" * setup.part_rates
