"""What ``vlm-pg verify`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_pg.models.packing import repeated_tokens
from vlm_pg.types import ResponseGroup
from vlm_pg.verify.compare import BF16_PARAMETER_MARGIN, BF16_TIMES, FP32_GRADIENT, FP32_NATS, Errors
from vlm_pg.verify.sides import Side

_MIB = 2.0**20


def group_line(groups: Sequence[ResponseGroup]) -> str:
    """What is computed on both sides."""
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
    memory = [f"{side.peak_bytes / _MIB:,.0f}" for side in (shared, repeated)]
    return [
        _row("  seconds", f"{shared.seconds:.3g}", f"{repeated.seconds:.3g}"),
        _row("  peak memory beside the weights, MiB", *memory),
    ]


def _row(name: str, shared: str, repeated: str) -> str:
    return f"{name:38}{shared:>12}{repeated:>12}"
