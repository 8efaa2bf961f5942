"""Length of a response: full reward between two lengths, less outside."""

from __future__ import annotations

from vlm_pg.rewards.settings import LengthSettings


def length_reward(num_tokens: int, settings: LengthSettings) -> float:
    """1.0 from ``min_tokens`` to ``max_tokens``; below n / min_tokens; above 2 - n / max_tokens, at least 0.

    Args:
        num_tokens: length n of the response in tokens.
        settings: the two lengths.
    """
    if num_tokens < settings.min_tokens:
        return num_tokens / settings.min_tokens
    if num_tokens > settings.max_tokens:
        return max(0.0, 2.0 - num_tokens / settings.max_tokens)
    return 1.0
