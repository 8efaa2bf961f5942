"""Points of measurement, and the work at each: tokens, pairs that attend, rows of logits; prefix shared or repeated.

One response of R tokens is predicted by R rows: the prefix's last one and its own first R - 1. Its last token is
never read, so the least work reads R - 1 tokens of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from vlm_pg.errors import ConfigError
from vlm_pg.models.memory_sizes import LanguageShape
from vlm_pg.plan.flops import (
    ATTENTION_BACKWARD,
    LINEAR_BACKWARD,
    causal_pairs,
    head_flops,
    pair_flops,
    shared_pairs,
    token_flops,
)

# Response tokens that the chunked contestant computes at one time.
CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class Point:
    """A prefix of P tokens and G responses to it."""

    prefix: int
    generations: int

    @property
    def identity(self) -> dict[str, int]:
        """Distinguishes this point from the others of a results file."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "ragged"}

    @property
    def record(self) -> dict[str, Any]:
        """The point as a results file has it."""
        return self.identity


@dataclass(frozen=True)
class StepPoint(Point):
    """One group: a prefix of P tokens and G responses of up to R tokens.

    Raises:
        ConfigError: a prefix below 1, fewer than 1 responses, or responses below 2 tokens.
    """

    response: int
    ragged: bool = False

    def __post_init__(self) -> None:
        if self.prefix < 1 or self.generations < 1 or self.response < 2:
            raise ConfigError(
                f"A point got prefix {self.prefix}, {self.generations} responses of {self.response} tokens; it needs a "
                "prefix of at least 1 token and at least 1 response of at least 2 tokens. Choose other lengths."
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each response; ragged ones are drawn evenly from R/4 to R, always the same for the same point."""
        if not self.ragged:
            return (self.response,) * self.generations
        draw = random.Random(f"{self.prefix},{self.generations},{self.response}")
        return tuple(draw.randint(max(2, self.response // 4), self.response) for _ in range(self.generations))

    @property
    def record(self) -> dict[str, Any]:
        return self.identity | {"ratio": self.prefix / self.response, "lengths": list(self.lengths)}

    def __str__(self) -> str:
        kind = "ragged, up to " if self.ragged else ""
        return f"prefix {self.prefix:,} x {self.generations} responses of {kind}{self.response:,} tok"


@dataclass(frozen=True)
class RolloutPoint(Point):
    """B prompts of P tokens, G responses of exactly N tokens to each.

    Raises:
        ConfigError: a prefix, number of responses or number of groups below 1, or fewer than 2 new tokens.
    """

    new_tokens: int
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.prefix, self.generations, self.groups) < 1 or self.new_tokens < 2:
            raise ConfigError(
                f"A point got {self.groups} groups of prefix {self.prefix} and {self.generations} responses of "
                f"{self.new_tokens} tokens; it needs at least 1 group, a prefix of at least 1 token, and at least 1 "
                "response of at least 2 tokens (the second one shows what decoding costs). Choose other numbers."
            )

    @property
    def rollouts(self) -> int:
        """B x G."""
        return self.groups * self.generations

    def __str__(self) -> str:
        groups = f"{self.groups} groups of " if self.groups > 1 else ""
        return f"{groups}prefix {self.prefix:,} x {self.generations} responses of {self.new_tokens:,} tok"


Made = TypeVar("Made")


def parse_points(words: Sequence[str], make: Callable[..., Made], counts: Sequence[int], form: str) -> list[Made]:
    """``["4096,8,512"]`` -> ``make(4096, 8, 512)``; each once, in the order given.

    Args:
        counts: how many numbers a point may have.
        form: the same for people, with an example.

    Raises:
        ConfigError: other than that many whole numbers.
    """
    points = []
    for word in words:
        parts = word.split(",")
        if len(parts) not in counts or not all(part.strip().isdigit() for part in parts):
            raise ConfigError(f"--points got {word!r}; a point is {form}.")
        points.append(make(*map(int, parts)))
    return list(dict.fromkeys(points))


@dataclass(frozen=True)
class Work:
    """Work of one forward pass.

    ``tokens`` go through the linear layers; ``pairs`` (query, key) meet in one attention layer; ``logit_rows`` go
    through the output head.
    """

    tokens: int
    pairs: int
    logit_rows: int


def shared_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The prefix of P tokens once, then every response behind it; ``lengths``: R of each, tokens."""
    own = [length - 1 for length in lengths]
    return Work(prefix + sum(own), shared_pairs(prefix, own), sum(lengths))


def repeated_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The prefix once per response."""
    rows = [prefix + length - 1 for length in lengths]
    return Work(sum(rows), sum(map(causal_pairs, rows)), sum(lengths))


def padded_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The repeated work, every sequence as long as the longest, as in a rectangular batch."""
    return repeated_work(prefix, [max(lengths)] * len(lengths))


def forward_flops(shape: LanguageShape, work: Work) -> float:
    """Operations of a forward pass alone."""
    return work.tokens * token_flops(shape) + work.pairs * pair_flops(shape) + work.logit_rows * head_flops(shape)


def step_flops(shape: LanguageShape, work: Work, checkpointing: bool) -> float:
    """Operations of forward and backward, every token through every layer."""
    linear = work.tokens * token_flops(shape) * (1 + LINEAR_BACKWARD + checkpointing)
    attention = work.pairs * pair_flops(shape) * (1 + ATTENTION_BACKWARD + checkpointing)
    return linear + attention + work.logit_rows * head_flops(shape) * (1 + LINEAR_BACKWARD)


def bounds(shape: LanguageShape, theirs: Work, ours: Work, checkpointing: bool) -> dict[str, float]:
    """How many times less ``ours`` is than ``theirs``: tokens, attention pairs, operations."""
    flops = [step_flops(shape, work, checkpointing) for work in (theirs, ours)]
    return {"tokens": theirs.tokens / ours.tokens, "attention": theirs.pairs / ours.pairs, "flops": flops[0] / flops[1]}


@dataclass(frozen=True)
class GenerationWork:
    """``prefill``: prompts, and the first token of every response. ``decode``: all others.

    ``kv_tokens``: most tokens whose keys and values are held at one time.
    """

    prefill: Work
    decode: Work
    kv_tokens: int


def shared_generation(point: RolloutPoint) -> GenerationWork:
    """Every prompt once, all groups decoded together. The last token of a response is never read."""
    prefix, read = point.prefix, point.new_tokens - 1
    prefill = Work(point.groups * prefix, point.groups * causal_pairs(prefix), point.rollouts)
    return GenerationWork(prefill, decode_work(point), point.groups * (prefix + point.generations * read))


def repeated_generation(point: RolloutPoint) -> GenerationWork:
    """Every prompt once per response, all in one batch."""
    prefix, rows = point.prefix, point.rollouts
    prefill = Work(rows * prefix, rows * causal_pairs(prefix), rows)
    return GenerationWork(prefill, decode_work(point), rows * (prefix + point.new_tokens - 1))


def one_by_one_generation(point: RolloutPoint) -> GenerationWork:
    """As the shared work, one group after the other."""
    return replace(shared_generation(point), kv_tokens=shared_generation(replace(point, groups=1)).kv_tokens)


def decode_work(point: RolloutPoint) -> Work:
    """All tokens of all responses but the first of each."""
    read, rows = point.new_tokens - 1, point.rollouts
    return Work(rows * read, rows * (read * point.prefix + causal_pairs(read)), rows * read)


def generation_flops(shape: LanguageShape, work: GenerationWork) -> float:
    """Operations of prefill and decoding."""
    return forward_flops(shape, work.prefill) + forward_flops(shape, work.decode)


def kv_bytes(shape: LanguageShape, work: GenerationWork, element_bytes: int) -> float:
    """Keys and values of all softmax-attention layers, at the end of generation."""
    return work.kv_tokens * 2 * shape.full_layers * shape.key_width * element_bytes
