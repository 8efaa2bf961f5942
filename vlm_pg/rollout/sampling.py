"""Choosing the next token. Which random number is used depends on names, never on order or batch.

Filters and penalties are transformers' own, in the order of its ``generate``: repetition penalty, forbidden tokens,
temperature, top-k, top-p, min-p. It has no presence penalty: that one is vLLM's, behind the repetition penalty and
before the temperature (vllm/model_executor/layers/utils.py, apply_penalties). Equal logits are common (bf16 has 8 bits
for a mantissa), so ties are treated as transformers treats them: top-k keeps all tokens equal to the k-th, top-p keeps
of equal ones those it sorts last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vlm_pg.errors import ConfigError
from vlm_pg.rollout.settings import RolloutSettings

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

# Neighbours in the vocabulary that drawing looks at together: about as many as there are runs.
RUN_TOKENS = 256


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


@dataclass(frozen=True)
class Choice:
    """The next token of n rollouts.

    ``tokens`` int64 [n].
    ``logprobs`` fp32 [n]: of the tokens under the policy at the sampling temperature (1 when greedy), before penalties,
    forbidden tokens and filters. This is what training computes again.
    ``sampling_logprobs`` fp32 [n]: under the distribution they were drawn from; 0 when greedy, all mass on one token.
    ``entropies`` fp32 [n], nats: of the distribution behind ``logprobs``.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    sampling_logprobs: torch.Tensor
    entropies: torch.Tensor


class SamplingKernels(Protocol):
    """The part of ``FusedStep`` that concerns sampling."""

    @property
    def draws(self) -> bool: ...

    @property
    def statistics(self) -> bool: ...


class TokenSampler:
    """Chooses tokens as the settings say, without ever making the host wait for the device.

    Args:
        settings: temperature, filters, penalties and shortest response.
        vocab_size: V, the number of logits.
        media_token_ids: placeholders of images and videos; never chosen, as no features would replace them.
        stop_token_ids: tokens that end a response; not chosen before ``min_new_tokens``.
        device: where the logits are.
        fused: which Triton kernels draw tokens and compute log-probabilities and entropies; None: torch does.

    Raises:
        ConfigError: a stop token is outside the vocabulary.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        vocab_size: int,
        media_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        device: torch.device,
        fused: SamplingKernels | None = None,
    ):
        outside = [token for token in stop_token_ids if not 0 <= token < vocab_size]
        if outside:
            raise ConfigError(
                f"Stop tokens {outside} are outside the model's vocabulary; its token ids are 0 to {vocab_size - 1}. "
                "Correct rollout.stop_token_ids, or eos_token_id in the model's generation_config.json."
            )
        self._settings, self._fused = settings, fused
        self._media = torch.tensor(media_token_ids, dtype=torch.int64, device=device)
        self._stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)

    @property
    def needs_seen(self) -> bool:
        """Whether ``choose`` needs the tokens of the sequence so far."""
        return self._settings.repetition_penalty != 1.0

    @property
    def needs_said(self) -> bool:
        """Whether ``choose`` needs the tokens of the response so far."""
        return self._settings.presence_penalty != 0.0

    def choose(
        self,
        logits: torch.Tensor,
        uniform: torch.Tensor,
        num_generated: Sequence[int],
        seen: torch.Tensor | None,
        said: torch.Tensor | None = None,
    ) -> Choice:
        """One token per rollout.

        Args:
            logits: [n, V] in any floating dtype, rounded nowhere; left as they are.
            uniform: fp64 [n] in [0, 1), one random number per rollout; unused when greedy.
            num_generated: [n] response tokens so far.
            seen: bool [n, V], tokens of prompt and response so far; only where ``needs_seen``.
            said: bool [n, V], tokens of the response so far; only where ``needs_said``.
        """
        scores = self.scores(logits, num_generated, seen, said)
        if self._settings.temperature == 0:
            tokens = scores.argmax(-1)
            sampling_logprobs = torch.zeros_like(tokens, dtype=torch.float32)
        elif self._fused and self._fused.draws:
            from vlm_pg.rollout.fused.drawing import draw_tokens

            tokens, sampling_logprobs = draw_tokens(scores, uniform)
        else:
            tokens, sampling_logprobs = draw(scores, uniform)
        # Buffers of [n, V] are the memory of this function; one less before the policy's own.
        del scores
        temperature = self._settings.temperature or 1.0
        if self._fused and self._fused.statistics:
            from vlm_pg.models.fused_logits import token_statistics

            logprobs, entropies = token_statistics(logits, temperature, tokens)
        else:
            logprobs, entropies = policy_statistics(logits, temperature, tokens)
        return Choice(tokens, logprobs, sampling_logprobs, entropies)

    def scores(
        self,
        logits: torch.Tensor,
        num_generated: Sequence[int],
        seen: torch.Tensor | None,
        said: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """fp32 [n, V]: logits of the distribution that is drawn from, ``-inf`` where a token cannot be drawn.

        Without a presence penalty equal to transformers' processors on the same logits. Greedy has no temperature and
        no filters. Arguments as in ``choose``.
        """
        settings = self._settings
        if self.needs_seen:
            assert seen is not None
            scores = _penalized(logits.float(), seen, settings.repetition_penalty)
        else:
            scores = logits.clone() if logits.dtype == torch.float32 else logits.float()
        if self.needs_said:
            assert said is not None
            # OpenAI's definition: once, however often a token occurred; the prompt's tokens do not count.
            scores.add_(said, alpha=-settings.presence_penalty)
        scores.index_fill_(1, self._media, -torch.inf)
        too_short = [count < settings.min_new_tokens for count in num_generated]
        if any(too_short):
            early = torch.tensor(too_short).to(scores.device, non_blocking=True)[:, None]
            scores[:, self._stops] = scores[:, self._stops].masked_fill(early, -torch.inf)
        if settings.temperature == 0:
            return scores
        if settings.temperature != 1.0:
            scores.div_(settings.temperature)
        if 0 < settings.top_k < scores.shape[-1]:
            scores = _keep_top_k(scores, settings.top_k)
        if settings.top_p < 1.0:
            scores = _keep_top_p(scores, settings.top_p)
        if settings.min_p > 0:
            scores = _keep_min_p(scores, settings.min_p)
        return scores


def _penalized(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Keskar et al.: CTRL (2019), section 4.1, with negative logits multiplied instead of divided."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _keep_top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """The k highest scores and all that equal the lowest of them."""
    return scores.masked_fill_(scores < scores.topk(top_k, dim=-1).values[:, -1:], -torch.inf)


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of probability ``top_p``: the lowest scores go while together they have at most the rest."""
    ascending, order = scores.sort(dim=-1)
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    # At least one token stays: rounding can put the whole cumulative sum below a tiny top_p's threshold.
    drop[:, -1] = False
    return scores.masked_fill_(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf)


def _keep_min_p(scores: torch.Tensor, min_p: float) -> torch.Tensor:
    """Tokens at least ``min_p`` times as probable as the most probable one (Nguyen et al., arXiv 2407.01082)."""
    probabilities = scores.softmax(-1)
    return scores.masked_fill_(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def draw(scores: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [n] by inversion of the cumulative distribution, and their log-probabilities fp32 [n].

    First a run of ``RUN_TOKENS`` neighbours is found, then the token in it: a cumulative sum over a whole vocabulary is
    long, and each row's runs on one multiprocessor.
    """
    probabilities = scores.softmax(-1)
    # fp64: the rounding of 150,000 additions in fp32 is larger than many a token's probability.
    cumulative = _sums_of_runs(probabilities).double().cumsum_(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    # right=True steps over runs of probability 0, whose cumulative sum equals their predecessor's.
    run = torch.searchsorted(cumulative, target, right=True).clamp_max_(cumulative.shape[-1] - 1)
    before = cumulative.gather(-1, (run - 1).clamp_min_(0)).masked_fill_(run == 0, 0.0)
    # What of its run the target has passed: less than all of it, also after rounding.
    share = ((target - before) / (cumulative.gather(-1, run) - before)).clamp_max_(1 - 2.0**-53)
    places = run * RUN_TOKENS + torch.arange(RUN_TOKENS, device=run.device)
    last = scores.shape[-1] - 1
    within = probabilities.gather(-1, places.clamp_max(last)).masked_fill_(places > last, 0.0).double().cumsum_(-1)
    tokens = run * RUN_TOKENS + torch.searchsorted(within, share * within[:, -1:], right=True)
    # Logits that are not numbers must show as such in the log-probabilities, not end as an index outside the row.
    tokens.clamp_max_(last)
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log()


def _sums_of_runs(probabilities: torch.Tensor) -> torch.Tensor:
    """[n, V] -> [n, runs] of ``RUN_TOKENS`` neighbours each; the last may have fewer."""
    whole = probabilities.shape[-1] // RUN_TOKENS * RUN_TOKENS
    sums = probabilities[:, :whole].unflatten(-1, (-1, RUN_TOKENS)).sum(-1)
    if whole == probabilities.shape[-1]:
        return sums
    return torch.cat([sums, probabilities[:, whole:].sum(-1, keepdim=True)], dim=-1)


def policy_statistics(
    logits: torch.Tensor, temperature: float, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens and entropies in nats, both fp32 [n], of ``softmax(logits / temperature)``."""
    wide = logits.float()
    vocabulary = (wide if temperature == 1.0 else wide / temperature).log_softmax(-1)
    # One buffer of [n, V] less where ``logits`` are narrower.
    del wide
    logprobs = vocabulary.gather(-1, tokens[:, None])[:, 0]
    # -p log p, and 0 for a token of probability 0.
    return logprobs, torch.special.entr(vocabulary.exp_()).sum(-1)
