"""The output of ``vlm-pg plan``: tables, the verdict and its advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vlm_pg.memory import GIB
from vlm_pg.models.memory_choice import smallest
from vlm_pg.models.settings import ModelSettings
from vlm_pg.plan.activations import recorded_bytes
from vlm_pg.plan.flops import sequence_parallel_bytes
from vlm_pg.plan.memory import (
    USABLE,
    forward_limit,
    largest_budget,
    largest_prefix,
    plan_memory,
    plan_to_fit,
    recorded_groups,
)
from vlm_pg.plan.search import Remedy, first_remedy, levers, shorter_prompts
from vlm_pg.plan.setup import TEXT_TOKENS, Setup, video_tokens
from vlm_pg.plan.shape import ModelShape

# Pixels of a video frame in the table of public models: media.max_pixels as it is by default.
FRAME_PIXELS = 128 * 28 * 28
_CAREFUL = ModelSettings(path="", gradient_checkpointing=True)
FRAMES = (64, 256, 1024, 3600)
GPUS = (1, 8, 64)


def verdict_lines(shape: ModelShape, setup: Setup, gpu_gib: float) -> list[str]:
    """The table of one run, whether it fits, the largest prompt and budget, and what to change first."""
    with_forwards = replace(setup, room_for_forwards=forward_limit(shape, setup, gpu_gib))
    plan = plan_to_fit(shape, with_forwards, gpu_gib)
    lines = _heading(shape, setup)
    for phase, parts in plan.phases.items():
        mark = "  <- most" if phase == plan.phase else ""
        lines.append(f"{phase:<40}{size_text(sum(parts.values()), 2):>14}{mark}")
        lines += [f"  {part:<38}{size_text(size, 2):>14}" for part, size in parts.items()]
    lines += ["", verdict(shape, setup, gpu_gib)]
    most = (largest_prefix(shape, setup, gpu_gib), largest_budget(shape, setup, gpu_gib))
    prefix, budget = (f"{count:,} tokens" if count else "none" for count in most)
    lines.append(f"largest prompt that fits: {prefix} (with a budget of it and one response)")
    lines.append(f"largest training.micro_batch_tokens that fits: {budget} (with prompts of {setup.prefix:,})")
    (count, group), (token, _) = recorded_groups(shape, with_forwards), recorded_bytes(shape, setup)
    of_step, room = setup.prompts_sampled * group, with_forwards.room_for_forwards
    sizes = [size_text(size, 2) for size in (token, group, of_step, room)]
    recorded = min(setup.prompts, count * setup.sequence_parallel)
    lines.append(
        "recorded forwards: {} a token, {} the largest group, {} all of a step on a rank; ".format(*sizes)
        + f"{recorded} of {setup.prompts} groups find room in {sizes[3]} of the GPU (rollout.keep_forward_gb)"
    )
    if setup.sequence_parallel > 1:
        sent = sequence_parallel_bytes(
            shape.language, setup.stream, setup.sequence_parallel, setup.element, setup.checkpointing
        )
        lines.append(f"sequence parallelism: each rank sends {sent / 2**20:,.1f} MiB a layer, forward and backward")
    return lines


def verdict(shape: ModelShape, setup: Setup, gpu_gib: float) -> str:
    """One line: it fits, or what to change first."""
    plan = plan_to_fit(shape, setup, gpu_gib)
    needed = f"{size_text(plan.peak)} a rank ({plan.phase})"
    room = f"{USABLE * gpu_gib:,.1f} of {gpu_gib:g} GiB"
    if plan.fits(gpu_gib):
        by_itself = (
            "" if plan_memory(shape, setup).fits(gpu_gib) else ", with what the run puts away and cuts by itself"
        )
        return f"fits{by_itself}: {needed}, {room} can be used"
    return f"does not fit: {needed}, {room} can be used; {_advice(shape, setup, gpu_gib)}"


def _advice(shape: ModelShape, setup: Setup, gpu_gib: float) -> str:
    """Settings that make it fit, or the levers that were searched."""
    if (remedy := first_remedy(shape, setup, gpu_gib)) is not None:
        return f"change first: {_followed(remedy)}"
    nothing = (
        f"no combination of {', '.join(levers(shape, setup))} makes it fit with prompts of {setup.prefix:,} tokens; "
        "use more GPUs"
    )
    shorter = shorter_prompts(shape, setup, gpu_gib)
    if shorter is None:
        return f"{nothing}: even prompts of one token do not fit"
    return f"{nothing}, or shorter prompts: {_followed(shorter)}"


def _followed(remedy: Remedy) -> str:
    return f"{remedy.overrides} (then {size_text(remedy.plan.peak)}, {remedy.plan.phase})"


def published_lines(shapes: Sequence[ModelShape], gpu_gib: float) -> Iterator[str]:
    """A Markdown table of public models: GiB a rank of full training by frames and GPUs; in brackets: too much."""
    yield (
        f"GiB a rank of {gpu_gib:g}: bf16, AdamW, checkpointing, frozen tower, G=8, responses of 768 tokens, frames of "
        f"{FRAME_PIXELS:,} pixels, budget of one prompt and response; ZeRO-3 where there are several GPUs. In "
        "brackets: does not fit, and what to change first (SP: sequence_parallel)."
    )
    yield ""
    yield "| model | frames | prompt | " + " | ".join(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS) + " |"
    yield "|---|---|---|" + "---|" * len(GPUS)
    for shape in shapes:
        for frames in FRAMES:
            cells = [_cell(shape, published_setup(shape, frames, gpus), gpu_gib) for gpus in GPUS]
            prefix = published_setup(shape, frames, 1).prefix
            yield f"| {shape.name} | {frames:,} | {prefix:,} | " + " | ".join(cells) + " |"


def published_setup(shape: ModelShape, frames: int, gpus: int) -> Setup:
    """Of the table: a question on a video, trained with what a careful user sets."""
    assert shape.tower is not None
    visual = video_tokens(frames, FRAME_PIXELS, shape.tower)
    setup = Setup(
        prefix=visual + TEXT_TOKENS,
        patches=visual * shape.tower.patches_per_token,
        response=767,
        ranks=gpus,
        logits_follow=True,
    )
    setup = replace(setup, budget=setup.prefix + setup.response, allowed=smallest(_CAREFUL))
    # The shipped zero3.json.
    return replace(setup, stage=3, bucket=2 * 500_000_000) if gpus > 1 else setup


def _cell(shape: ModelShape, setup: Setup, gpu_gib: float) -> str:
    plan = plan_to_fit(shape, setup, gpu_gib)
    if plan.fits(gpu_gib):
        return f"{plan.peak / GIB:,.0f}"
    remedy = first_remedy(shape, setup, gpu_gib)
    words = ", ".join(each.short or each.overrides for each in remedy.options) if remedy else "more GPUs"
    return f"({plan.peak / GIB:,.0f}: {words})"


def _heading(shape: ModelShape, setup: Setup) -> list[str]:
    weights, e = shape.weights, {2: "bf16", 4: "fp32"}[setup.element]
    total = weights.tower + weights.language
    ranks = f"{setup.ranks} rank{'s' * (setup.ranks > 1)}"
    stage = f"ZeRO-{setup.stage}" if setup.stage else "no ZeRO"
    sequence = f", {setup.sequence_parallel} to a sequence" if setup.sequence_parallel > 1 else ""
    run = "its prefix alone, then chunks" if setup.chunked else "whole"
    lines = [
        f"{shape.name}: {total / 1e9:,.2f} B weights (tower {weights.tower / 1e9:,.2f} B), {e}, {stage}, "
        f"{ranks}{sequence}",
        f"largest prompt {setup.prefix:,} tokens, {setup.generations} responses of {setup.response:,}, budget "
        f"{setup.budget:,}: the largest group runs {run}",
    ]
    if shape.positions is not None and setup.prefix + setup.response > shape.positions:
        lines.append(f"note: the model's config knows {shape.positions:,} positions")
    return [*lines, ""]


def size_text(num_bytes: float, digits: int = 1) -> str:
    """In GiB; in MiB or KiB what would be 0 at so many digits."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= size / 10**digits:
            return f"{num_bytes / size:,.{digits}f} {unit}"
    return f"{num_bytes / 1024:,.{digits}f} KiB"
