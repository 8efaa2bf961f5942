"""Sampling G answers per question with one vision pass, one prefill and one copy of the prefix per group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vlm_pg.attention.tree import PrefixTree
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.decode import DecodeContext
from vlm_pg.rollout.kv import PrefillContext, PrefixStore
from vlm_pg.rollout.sampling import choose_tokens, rollout_key, uniforms
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt, Rollout

PREFILL_TOKENS = 16384
# Finished rollouts leave the batch once they are a quarter of it: copying keys and values costs too.
COMPACT_BELOW = 0.75


@dataclass
class _Batch:
    """Rollouts that are decoded together. Tensors are [rollouts, ...] over all of them, finished ones included."""

    prompts: list[Prompt]
    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    stopped: torch.Tensor


class RolloutEngine:
    """Generates with the policy itself: no second copy of the weights, no transfer, the trainer's own numbers.

    Args:
        policy: whose answers are sampled.
        settings: how.
        seed: the run's seed; a rollout's random numbers depend on (seed, step, sample id, rollout index, token index).
        should_stop: asked at every token; True raises InterruptedError.
    """

    def __init__(
        self, policy: Policy, settings: RolloutSettings, seed: int, should_stop: Callable[[], bool] = lambda: False
    ):
        self.policy = policy
        self.settings = settings
        self.seed = seed
        self.stop_token_ids = stop_token_ids(policy)
        self._should_stop = should_stop

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt.

        Args:
            prompts: each with its own sample id.
            step: the optimizer step, or a name such as "eval/seen", that keys the random numbers.

        Raises:
            SampleError: prompt and longest response exceed the model's positions.
            InterruptedError: a stop was asked for.
        """
        for prompt in prompts:
            self.policy.check_prompt(prompt)
            self.policy.check_length(prompt, self.settings.max_new_tokens)
        per_batch = max(1, self.settings.max_batch_rollouts // self.settings.num_generations)
        results: list[tuple[Rollout, ...]] = []
        for start in range(0, len(prompts), per_batch):
            results.extend(self._generate_batch(list(prompts[start : start + per_batch]), step))
        return results

    def _generate_batch(self, prompts: list[Prompt], step: int | str) -> Iterator[tuple[Rollout, ...]]:
        count = self.settings.num_generations
        store, last_hidden = self._prefill(prompts)
        keys = [rollout_key(self.seed, step, p.sample_id, g) for p in prompts for g in range(count)]
        device = self.policy.device
        shape = (len(keys), self.settings.max_new_tokens)
        batch = _Batch(
            prompts,
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            logprobs=torch.zeros(shape, dtype=torch.float32, device=device),
            lengths=torch.full(shape[:1], shape[1], dtype=torch.int64, device=device),
            stopped=torch.zeros(shape[:1], dtype=torch.bool, device=device),
        )
        self._decode(batch, store, last_hidden, torch.from_numpy(uniforms(keys, shape[1])).to(device))
        return self._collect(batch, count)

    def _prefill(self, prompts: list[Prompt]) -> tuple[PrefixStore, torch.Tensor]:
        """Each prefix through the model once; the hidden state of its last token [prompts, D]."""
        policy = self.policy
        store = PrefixStore([prompt.num_tokens for prompt in prompts])
        last_hidden: list[torch.Tensor] = []
        start = first_group = 0
        for part in _within_budget(prompts, PREFILL_TOKENS):
            tree = PrefixTree([prompt.num_tokens for prompt in part], [-1] * len(part))
            features = [f.features for f in policy.vision.encode(part) if f.features is not None]
            hidden = policy.hidden_states(
                torch.cat([prompt.input_ids for prompt in part]).to(policy.device),
                torch.cat([prompt.positions_3P for prompt in part], dim=1).to(policy.device),
                PrefillContext(store, tree, start, first_group, policy.kernel),
                torch.cat(features).detach() if features else None,
                torch.cat([prompt.mm_token_type_ids for prompt in part]).nonzero()[:, 0].to(policy.device),
            )
            last_hidden.append(hidden)
            start += tree.num_tokens
            first_group += len(part)
        return store, torch.cat(last_hidden)

    def _decode(self, batch: _Batch, store: PrefixStore, last_hidden: torch.Tensor, uniform: torch.Tensor) -> None:
        policy, settings = self.policy, self.settings
        count, device = settings.num_generations, policy.device
        groups = [g for g in range(len(batch.prompts)) for _ in range(count)]
        context = DecodeContext(store, groups, policy.kernel)
        forbidden = torch.zeros(policy.vocab_size, dtype=torch.bool, device=device)
        forbidden[list(policy.media_token_ids)] = True
        stops = torch.tensor(self.stop_token_ids, device=device)
        positions = torch.tensor([p.next_position for p in batch.prompts], device=device).repeat_interleave(count)
        active = torch.arange(len(groups), device=device)
        hidden = last_hidden.repeat_interleave(count, dim=0)
        for index in range(settings.max_new_tokens):
            if self._should_stop():
                raise InterruptedError("generation was asked to stop")
            logits = policy.model.lm_head(hidden).float()
            tokens, logprobs = choose_tokens(
                logits, uniform[active, index], forbidden, settings.temperature, settings.top_p, settings.top_k
            )
            batch.tokens[active, index], batch.logprobs[active, index] = tokens, logprobs
            stops_now = torch.isin(tokens, stops) & ~batch.stopped[active]
            batch.lengths[active] = torch.where(stops_now, index + 1, batch.lengths[active])
            batch.stopped[active] |= stops_now
            running = ~batch.stopped[active]
            # The only look at the device from the host, once a token.
            num_running = int(running.sum())
            if num_running == 0 or index + 1 == settings.max_new_tokens:
                return
            if num_running < COMPACT_BELOW * len(active):
                rows = running.nonzero()[:, 0]
                context.keep(rows)
                active, tokens = active[rows], tokens[rows]
            # A rollout's response token number i sits at its prefix's next position + i.
            hidden = policy.hidden_states(tokens, (positions[active] + index).expand(3, -1), context)
            context.num_own += 1

    def _collect(self, batch: _Batch, count: int) -> Iterator[tuple[Rollout, ...]]:
        tokens, logprobs = batch.tokens.cpu(), batch.logprobs.cpu()
        lengths, stopped = batch.lengths.tolist(), batch.stopped.tolist()
        for group in range(len(batch.prompts)):
            rows = range(group * count, (group + 1) * count)
            yield tuple(
                Rollout(
                    token_ids=tokens[row, : lengths[row]].clone(),
                    rollout_logprobs=logprobs[row, : lengths[row]].clone(),
                    finish_reason="stop" if stopped[row] else "length",
                    text=self._text(tokens[row, : lengths[row]].tolist(), stopped[row]),
                )
                for row in rows
            )

    def _text(self, token_ids: list[int], stopped: bool) -> str:
        if self.policy.processor is None:
            return ""
        return self.policy.tokenizer.decode(token_ids[:-1] if stopped else token_ids, skip_special_tokens=False)


def stop_token_ids(policy: Policy) -> tuple[int, ...]:
    """What ends a response: the end tokens of the model's generation config, and the tokenizer's."""
    configured = getattr(policy.model.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured])
    if policy.processor is not None:
        ids.add(policy.tokenizer.eos_token_id)
    ids.discard(None)
    if not ids:
        raise ValueError(
            "The model names no end-of-sequence token; set eos_token_id in its generation_config.json, "
            "or every response would run to rollout.max_new_tokens."
        )
    return tuple(sorted(ids))


def _within_budget(prompts: list[Prompt], budget: int) -> Iterator[list[Prompt]]:
    """Consecutive prompts of at most ``budget`` tokens together, at least one at a time."""
    part: list[Prompt] = []
    used = 0
    for prompt in prompts:
        if part and used + prompt.num_tokens > budget:
            yield part
            part, used = [], 0
        part.append(prompt)
        used += prompt.num_tokens
    if part:
        yield part
