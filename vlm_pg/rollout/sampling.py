"""Choosing the next token. Which random number is used depends on names, never on order or batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def rollout_key(seed: int, step: int | str, sample_id: str, rollout_index: int) -> int:
    """64-bit key of one rollout's random stream."""
    name = f"{seed}\x1f{step}\x1f{sample_id}\x1f{rollout_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def uniforms(keys: Sequence[int], num_tokens: int) -> np.ndarray:
    """float64 [rollouts, num_tokens] in [0, 1): number t of stream k is splitmix64's output t from state k.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014).
    """
    state = np.asarray(keys, dtype=np.uint64)[:, None] + _GOLDEN * np.arange(1, num_tokens + 1, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose_tokens(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    forbidden: torch.Tensor,
    temperature: float,
    top_p: float,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each rollout and its log-probability.

    Args:
        logits: fp32 [rollouts, V].
        uniform: fp64 [rollouts] in [0, 1).
        forbidden: bool [V]; these tokens are never chosen.
        temperature: 0 takes the most probable token.
        top_p, top_k: keep only the most probable tokens; 1.0 and 0 keep all.

    Returns:
        int64 [rollouts], and fp32 [rollouts]: log-probability under the policy at this temperature (1 when greedy),
        before forbidden tokens, top-p and top-k are taken out.
    """
    if temperature > 0 and temperature != 1.0:
        logits = logits / temperature
    allowed = logits.masked_fill(forbidden, -torch.inf)
    if temperature == 0:
        tokens = allowed.argmax(-1)
    else:
        tokens = _inverse_cdf(_filtered(allowed, top_p, top_k).softmax(-1), uniform)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return tokens, logprobs


def _filtered(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    if top_k and top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        # A token stays if the more probable ones before it do not yet reach top_p; the first always stays.
        drop = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    return logits


def _inverse_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    cumulative = probabilities.double().cumsum(-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    # right=True steps over tokens of probability 0, whose cumulative sum equals their predecessor's.
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_max(probabilities.shape[-1] - 1)
