"""``vlm-pg bench rollout``: prompts on one model, and the contestants, each a session that generates greedily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.case import SPECIAL_IDS, ModelCase, Spec, best_attention, random_policy, set_attention, text_prompt
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.settings import RolloutSettings

# New tokens -> int64 [B*G, new tokens] on the CPU; the responses to one prompt lie next to each other.
Generate = Callable[[int], torch.Tensor]
# Logits of two tokens that are nearer than this are a tie in fp32: contestants add in different orders.
TIE = 1e-4


@dataclass(frozen=True)
class GenerationCase(ModelCase):
    """``prompts`` int64 [B, P] on the CPU; G responses of ``new_tokens`` tokens to each.

    A contestant makes a session that generates them greedily. Entering it is not timed: a training run does that once.
    It raises CannotRun on entering, or when it generates.
    """

    prompts: torch.Tensor
    generations: int
    new_tokens: int

    @classmethod
    def build(cls, spec: Spec) -> GenerationCase:
        policy = random_policy(spec)
        never_choose_special_tokens(policy)
        return cls.random(policy, spec["prefix"], spec["generations"], spec["new_tokens"], spec["groups"])

    @classmethod
    def random(
        cls, policy: Policy, prefix: int, generations: int, new_tokens: int, groups: int, seed: int = 0
    ) -> GenerationCase:
        """Random prompts. Text stands in for visual tokens: past the tower the language model treats them alike."""
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(0, policy.vocab_size - SPECIAL_IDS, (groups, prefix), generator=generator)
        return cls(policy, prompts, generations, new_tokens)

    @property
    def rollouts(self) -> int:
        return len(self.prompts) * self.generations

    def other(self, seed: int) -> GenerationCase:
        """Other prompts of the same shape."""
        groups, prefix = self.prompts.shape
        return self.random(self.policy, prefix, self.generations, self.new_tokens, groups, seed)

    @torch.no_grad()
    def logits_after(self, group: int, response: torch.Tensor) -> torch.Tensor:
        """Logits [V] behind a prompt and these ids of a response, by transformers' forward."""
        set_attention(self, "sdpa")
        ids = torch.cat([self.prompts[group], response])[None].to(self.device)
        return self.model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[0, -1].float()

    def tiny(self) -> GenerationCase:
        return self.random(self.policy, 16, 2, 3, 1)

    def run(self, contestant: Callable[[GenerationCase], AbstractContextManager[Generate]]) -> torch.Tensor:
        with contestant(self) as generate:
            return generate(self.new_tokens)

    def time(self, contestant: Callable[[GenerationCase], AbstractContextManager[Generate]]) -> dict[str, float]:
        """One run of a single token and one whole run, each in a session of its own."""
        with contestant(self) as generate:
            first = self.timed(partial(generate, 1))
        with contestant(self) as generate:
            return {"first_seconds": first["seconds"]} | self.timed(partial(generate, self.new_tokens))

    def agreement(self, outcomes: Mapping[str, torch.Tensor], dtype: str) -> dict[str, dict[str, Any]]:
        for name, tokens in outcomes.items():
            check_count(name, tokens, self, self.new_tokens)
        if dtype == "fp32" and outcomes:
            check_tokens(self, outcomes)
        first = next(iter(outcomes), "")
        return {name: {"equal_tokens": equal_share(outcomes[first], tokens)} for name, tokens in outcomes.items()}


@torch.no_grad()
def never_choose_special_tokens(policy: Policy) -> None:
    """Make the logits of end and media tokens 0, below the highest of so many random ones.

    So all contestants generate the requested number of tokens without forbidding the end, which costs time per token.
    """
    policy.model.lm_head.weight[policy.vocab_size - SPECIAL_IDS :].zero_()


class Compared(Protocol):
    """A case whose greedy tokens are compared, int64 [questions * generations, N]."""

    @property
    def policy(self) -> Policy: ...

    @property
    def generations(self) -> int: ...

    @property
    def rollouts(self) -> int: ...

    def logits_after(self, group: int, response: torch.Tensor) -> torch.Tensor:
        """Logits [V] that transformers' forward gives behind a prompt and these ids, int64 [R], of a response."""
        ...


def check_count(name: str, tokens: torch.Tensor, case: Compared, new_tokens: int) -> None:
    """Raise RuntimeError unless every rollout has exactly ``new_tokens`` tokens, none of them a special one."""
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


def check_tokens(case: Compared, found: Mapping[str, torch.Tensor]) -> None:
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
            logits = case.logits_after(group, expected[row, :position])
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


@contextmanager
def _session(case: GenerationCase, all_at_once: bool) -> Iterator[Generate]:
    set_attention(case, ATTENTION_NAME)
    prompts = [text_prompt(f"bench {index}", ids) for index, ids in enumerate(case.prompts)]
    calls = [prompts] if all_at_once else [[prompt] for prompt in prompts]

    def generate(new_tokens: int) -> torch.Tensor:
        settings = RolloutSettings(
            num_generations=case.generations,
            max_new_tokens=new_tokens,
            temperature=0.0,
            max_batch_rollouts=case.rollouts,
        )
        engine = RolloutEngine(case.policy, settings, seed=0)
        groups = [group for call in calls for group in engine.generate(call, step=0)]
        rows = [rollout.token_ids for group in groups for rollout in group]
        # A response that ended early is filled with the last special token, which `check_count` refuses.
        return pad_sequence(rows, batch_first=True, padding_value=case.policy.vocab_size - 1)

    yield generate


ours, ours_one_by_one = partial(_session, all_at_once=True), partial(_session, all_at_once=False)


@contextmanager
def transformers_generate(case: GenerationCase) -> Iterator[Generate]:
    from transformers import GenerationConfig

    set_attention(case, best_attention(case))
    last = case.policy.vocab_size - 1

    def generate(new_tokens: int) -> torch.Tensor:
        config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=last, pad_token_id=last)
        ids = case.prompts.to(case.device).repeat_interleave(case.generations, dim=0)
        # Without a mask, generate would look for padding among the prompt's ids.
        out = case.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return out[:, ids.shape[1] :].cpu()

    yield generate
