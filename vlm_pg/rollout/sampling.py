"""Choosing the next token, and stop strings. Which random number is used depends on names, never on order or batch.

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
from typing import TYPE_CHECKING

import numpy as np
import torch

from vlm_pg.errors import ConfigError
from vlm_pg.rollout.settings import RolloutSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


class TokenSampler:
    """Chooses tokens as the settings say, without ever making the host wait for the device.

    Args:
        settings: temperature, filters, penalties and shortest response.
        vocab_size: V, the number of logits.
        media_token_ids: placeholders of images and videos; never chosen, as no features would replace them.
        stop_token_ids: tokens that end a response; not chosen before ``min_new_tokens``.
        device: where the logits are.
        fused_draws, fused_statistics: Triton kernels draw tokens, and compute log-probabilities and entropies.

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
        fused_draws: bool = False,
        fused_statistics: bool = False,
    ):
        outside = [token for token in stop_token_ids if not 0 <= token < vocab_size]
        if outside:
            raise ConfigError(
                f"Stop tokens {outside} are outside the model's vocabulary; its token ids are 0 to {vocab_size - 1}. "
                "Correct rollout.stop_token_ids, or eos_token_id in the model's generation_config.json."
            )
        self._settings, self._fused_draws, self._fused_statistics = settings, fused_draws, fused_statistics
        # Whether ``choose`` needs the tokens of the sequence so far, and those of the response.
        self.needs_seen, self.needs_generated = settings.repetition_penalty != 1.0, settings.presence_penalty != 0.0
        self._media = torch.tensor(media_token_ids, dtype=torch.int64, device=device)
        self._stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)

    def choose(
        self,
        logits: torch.Tensor,
        uniform: torch.Tensor,
        num_generated: Sequence[int],
        seen: torch.Tensor | None,
        generated: torch.Tensor | None = None,
    ) -> Choice:
        """One token per rollout.

        Args:
            logits: [n, V] in any floating dtype, rounded nowhere; left as they are.
            uniform: fp64 [n] in [0, 1), one random number per rollout; unused when greedy.
            num_generated: [n] response tokens so far.
            seen: bool [n, V], tokens of prompt and response so far; only where ``needs_seen``.
            generated: bool [n, V], tokens of the response so far; only where ``needs_generated``.
        """
        scores = self.scores(logits, num_generated, seen, generated)
        if self._settings.temperature == 0:
            tokens = scores.argmax(-1)
            sampling_logprobs = torch.zeros_like(tokens, dtype=torch.float32)
        elif self._fused_draws:
            from vlm_pg.rollout.fused.drawing import draw_tokens

            tokens, sampling_logprobs = draw_tokens(scores, uniform)
        else:
            tokens, sampling_logprobs = draw(scores, uniform)
        # Buffers of [n, V] are the memory of this function; one less before the policy's own.
        del scores
        temperature = self._settings.temperature or 1.0
        if self._fused_statistics:
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
        generated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """fp32 [n, V]: logits of the distribution that is drawn from, ``-inf`` where a token cannot be drawn.

        Without a presence penalty equal to transformers' processors on the same logits. Greedy has no temperature and
        no filters. Arguments as in ``choose``.
        """
        settings = self._settings
        scores = logits.float()
        if self.needs_seen:
            assert seen is not None
            # Keskar et al.: CTRL (2019), section 4.1, with negative logits multiplied instead of divided.
            penalty = settings.repetition_penalty
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        elif scores is logits:
            scores = scores.clone()
        if self.needs_generated:
            assert generated is not None
            # OpenAI's definition: once, however often a token occurred; the prompt's tokens do not count.
            scores.add_(generated, alpha=-settings.presence_penalty)
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
            # The k highest scores and all that equal the lowest of them.
            scores.masked_fill_(scores < scores.topk(settings.top_k, dim=-1).values[:, -1:], -torch.inf)
        if settings.top_p < 1.0:
            # The smallest set of this probability: the lowest scores go while together they have at most the rest.
            ascending, order = scores.sort(dim=-1)
            drop = ascending.softmax(-1).cumsum(-1) <= 1 - settings.top_p
            # At least one token stays: rounding can put the whole cumulative sum below a tiny top_p's threshold.
            drop[:, -1] = False
            scores.masked_fill_(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf)
        if settings.min_p > 0:
            # Relative to the most probable token (Nguyen et al., arXiv 2407.01082).
            probabilities = scores.softmax(-1)
            scores.masked_fill_(probabilities < settings.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
        return scores


def draw(scores: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [n] by inversion of the cumulative distribution, and their log-probabilities fp32 [n].

    First a run of ``RUN_TOKENS`` neighbours is found, then the token in it: a cumulative sum over a whole vocabulary is
    long, and each row's runs on one multiprocessor.
    """
    probabilities = scores.softmax(-1)
    whole = probabilities.shape[-1] // RUN_TOKENS * RUN_TOKENS
    sums = probabilities[:, :whole].unflatten(-1, (-1, RUN_TOKENS)).sum(-1)
    if whole < probabilities.shape[-1]:  # the last run has fewer
        sums = torch.cat([sums, probabilities[:, whole:].sum(-1, keepdim=True)], dim=-1)
    # fp64: the rounding of 150,000 additions in fp32 is larger than many a token's probability.
    cumulative = sums.double().cumsum_(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    # right=True steps over runs of probability 0, whose cumulative sum equals their predecessor's.
    run = torch.searchsorted(cumulative, target, right=True).clamp_max_(cumulative.shape[-1] - 1)
    before = cumulative.gather(-1, (run - 1).clamp_min_(0)).masked_fill_(run == 0, 0.0)
    # What of its run the target has passed: less than all of it, also after rounding.
    share = ((target - before) / (cumulative.gather(-1, run) - before)).clamp_max_(1 - 2.0**-53)
    of_run = run * RUN_TOKENS + torch.arange(RUN_TOKENS, device=run.device)
    last = scores.shape[-1] - 1
    within = probabilities.gather(-1, of_run.clamp_max(last)).masked_fill_(of_run > last, 0.0).double().cumsum_(-1)
    tokens = run * RUN_TOKENS + torch.searchsorted(within, share * within[:, -1:], right=True)
    # Logits that are not numbers must show as such in the log-probabilities, not end as an index outside the row.
    tokens.clamp_max_(last)
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log()


def policy_statistics(
    logits: torch.Tensor, temperature: float, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens and entropies in nats, both fp32 [n], of ``softmax(logits / temperature)``."""
    wide = logits.float()
    vocabulary = (wide if temperature == 1.0 else wide / temperature).log_softmax(-1)
    del wide  # a buffer of [n, V] where ``logits`` are narrower
    logprobs = vocabulary.gather(-1, tokens[:, None])[:, 0]
    # -p log p, and 0 for a token of probability 0.
    return logprobs, torch.special.entr(vocabulary.exp_()).sum(-1)


class StopStrings:
    """Which responses have completed a stop string, and the text before it.

    Strings are searched for in bytes. A byte-level tokenizer's tokens are runs of bytes that may begin and end within a
    character, and joining them is the same as decoding them together.

    Args:
        tokenizer: a byte-level one, as all Qwen models have.
        strings: as in ``rollout.stop_strings``.

    Raises:
        ConfigError: a string is empty, or not what the tokenizer makes of it, or the tokenizer is of another kind.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self._bytes_of_token: dict[int, bytes] = {}
        self.strings = tuple(strings)
        self._encoded = tuple(string.encode() for string in strings)
        self._longest = max(map(len, self._encoded), default=0)
        for string in strings:
            self._check(string)

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop string's last character came with the last of these tokens.

        Looks at as many trailing tokens as the longest stop string has bytes, however long the response is.

        Args:
            token_ids: all tokens of one response so far.
        """
        if not token_ids or not self.strings:
            return False
        tail = last = self._token_bytes(token_ids[-1])
        for index in range(len(token_ids) - 2, -1, -1):
            if len(tail) >= len(last) + self._longest - 1:
                break
            tail = self._token_bytes(token_ids[index]) + tail
        before = len(tail) - len(last)
        # The search starts where a match still reaches into the last token.
        return any(tail.find(string, max(0, before - len(string) + 1)) >= 0 for string in self._encoded)

    def cut(self, token_ids: Sequence[int]) -> str:
        """The text of a response that has ended, before the stop string that its last token completed.

        An earlier one, from before the fewest tokens were there, stays.
        """
        pieces = [self._token_bytes(token) for token in token_ids]
        text, before = b"".join(pieces), sum(map(len, pieces[:-1]))
        found = [text.find(string, max(0, before - len(string) + 1)) for string in self._encoded]
        return text[: min(position for position in found if position >= 0)].decode(errors="replace")

    def before_first(self, text: str) -> str:
        """The text before the first stop string in it; all of it if there is none."""
        found = [position for string in self.strings if (position := text.find(string)) >= 0]
        return text[: min(found)] if found else text

    def _check(self, string: str) -> None:
        encode, decode = self._tokenizer.encode, self._tokenizer.decode
        if not string:
            raise ConfigError(
                "rollout.stop_strings has an empty string, which every response contains; remove it from the list."
            )
        read_back = decode(encode(string, add_special_tokens=False))
        if string not in read_back:
            raise ConfigError(
                f"rollout.stop_strings has {string!r}, which this model's tokenizer encodes and decodes to "
                f"{read_back!r}. The model reads and writes the second form, so responses would not stop at the first. "
                "Write it as the tokenizer does, or remove it."
            )
        # A leading space tells other kinds of tokenizers apart: they write it as a character of their own.
        for token in encode(" " + string, add_special_tokens=False):
            if self._token_bytes(token).decode(errors="replace") != decode([token]):
                raise ConfigError(
                    f"rollout.stop_strings needs a byte-level tokenizer, as all Qwen models have; this one "
                    f"({type(self._tokenizer).__name__}) is not. Use rollout.stop_token_ids, or remove the strings."
                )

    def _token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; nothing for an id that the model has and the tokenizer has not."""
        known = self._bytes_of_token.get(token_id)
        if known is None:
            token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
            assert isinstance(token, str)
            if all(character in self._byte_of for character in token):
                known = bytes(self._byte_of[character] for character in token)
            else:  # an added token with characters outside the byte alphabet, kept as it is written
                known = token.encode()
            self._bytes_of_token[token_id] = known
        return known
