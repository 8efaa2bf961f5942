"""Whether all contestants chose the same tokens; a difference that rounding explains is told from a fault."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vlm_pg.bench.contestants.base import set_attention
from vlm_pg.bench.generation.base import SPECIAL_IDS, GenerationCase

# Logits of two tokens that are nearer than this are a tie in fp32: contestants add in different orders.
TIE = 1e-4


def check_count(name: str, tokens: torch.Tensor, case: GenerationCase, new_tokens: int) -> None:
    """Raise RuntimeError unless every rollout has exactly as many tokens as asked for, none of them a special one."""
    expected = (case.rollouts, new_tokens)
    if tuple(tokens.shape) != expected:
        raise RuntimeError(
            f"{name} generated tokens of shape {tuple(tokens.shape)}, {expected} were asked for (rollouts, tokens). "
            "Nothing was timed: it did not do the same work."
        )
    ended = (tokens >= case.policy.vocab_size - SPECIAL_IDS).any(1).nonzero()[:, 0].tolist()
    if ended:
        raise RuntimeError(
            f"{name} chose an end or media token in rollout {ended[0]}, which may end a response before {new_tokens} "
            "tokens. Nothing was timed: it did not do the same work."
        )


def equal_share(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Share of equal tokens; both int64 [B*G, N]."""
    return float((ours == theirs).double().mean())


def check_tokens(case: GenerationCase, found: Mapping[str, torch.Tensor]) -> None:
    """Compare everybody's greedy tokens, int64 [B*G, N], with the first one's.

    Where two rows part, transformers' plain forward says what the two tokens' logits are there: a tie is let pass,
    and so is what follows it.

    Raises:
        RuntimeError: anything else; it names the first position.
    """
    (first, expected), *others = found.items()
    for name, tokens in others:
        seen: set[tuple[int, ...]] = set()
        for row, position in _first_differences(expected, tokens):
            group = row // case.generations
            pair = (int(expected[row, position]), int(tokens[row, position]))
            key = (group, *pair, *expected[row, :position].tolist())
            if key in seen:
                continue
            seen.add(key)
            logits = _logits(case, torch.cat([case.prompts[group], expected[row, :position]]))
            values = [float(logits[token]) for token in pair]
            if abs(values[0] - values[1]) > TIE:
                raise RuntimeError(
                    f"The contestants disagree: token {position} of rollout {row % case.generations} of group {group} "
                    f"is {pair[0]} for {first} and {pair[1]} for {name}. A plain forward gives them logits "
                    f"{values[0]:.6f} and {values[1]:.6f}; up to {TIE:g} apart would be a tie. Nothing was timed: they "
                    "do not compute the same thing."
                )


def _first_differences(expected: torch.Tensor, tokens: torch.Tensor) -> list[tuple[int, int]]:
    """(row, first position) of the rows that differ, earliest positions first."""
    differ = expected != tokens
    rows = differ.any(1).nonzero()[:, 0].tolist()
    return sorted(((row, int(differ[row].int().argmax())) for row in rows), key=lambda pair: pair[1])


@torch.no_grad()
def _logits(case: GenerationCase, ids: torch.Tensor) -> torch.Tensor:
    """Logits [V] after these tokens, by transformers' forward."""
    set_attention(case, "sdpa")
    return case.model(input_ids=ids[None].to(case.device), logits_to_keep=1, use_cache=False).logits[0, -1].float()
