"""The points that are measured, and in which order."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from vlm_pg.errors import ConfigError

# The grid of one group's forward and backward.
PREFIXES = (1024, 4096, 8192, 16384)
RATIOS = (1, 2, 4, 8, 16, 32)
GENERATIONS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Point(ABC):
    """What a contestant is measured on: a prefix of P tokens and G responses to it."""

    prefix: int
    generations: int

    @property
    def identity(self) -> dict[str, int]:
        """What tells this point from the others of a file of results."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "ragged"}

    @property
    def record(self) -> dict[str, Any]:
        """What a file of results says of this point."""
        return self.identity

    @property
    @abstractmethod
    def off_centre(self) -> int:
        """Coordinates in which it differs from the centre of the grid of its prefix."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens if the prefix were repeated for every response."""


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
    def ratio(self) -> float:
        """Prefix tokens per response token."""
        return self.prefix / self.response

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each response; ragged ones are drawn evenly from R/4 to R, always the same for the same point."""
        if not self.ragged:
            return (self.response,) * self.generations
        draw = random.Random(f"{self.prefix},{self.generations},{self.response}")
        return tuple(draw.randint(max(2, self.response // 4), self.response) for _ in range(self.generations))

    @property
    def record(self) -> dict[str, Any]:
        return self.identity | {"ratio": self.ratio, "lengths": list(self.lengths)}

    @property
    def off_centre(self) -> int:
        return (round(self.ratio) != 8) + (self.generations != 8)

    @property
    def num_tokens(self) -> int:
        return self.generations * (self.prefix + self.response)

    def __str__(self) -> str:
        kind = "ragged, up to " if self.ragged else ""
        size = f"prefix {self.prefix:,} x {self.generations} responses of {kind}{self.response:,} tok"
        return f"{size} (ratio {self.ratio:g})"


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

    @property
    def off_centre(self) -> int:
        return (self.generations != 8) + (self.new_tokens != 64) + (self.groups != 1)

    @property
    def num_tokens(self) -> int:
        return self.rollouts * (self.prefix + self.new_tokens)

    def __str__(self) -> str:
        groups = f"{self.groups} groups of " if self.groups > 1 else ""
        return f"{groups}prefix {self.prefix:,} x {self.generations} responses of {self.new_tokens:,} tok"


@dataclass(frozen=True)
class EvalPoint(Point):
    """V videos of about P visual tokens, Q questions on each of them, G answers of exactly N tokens to each.

    Raises:
        ConfigError: fewer than 16 visual tokens, a number below 1, or fewer than 2 new tokens.
    """

    new_tokens: int
    questions: int = 1
    videos: int = 1

    def __post_init__(self) -> None:
        counts = (self.generations, self.questions, self.videos)
        if self.prefix < 16 or min(counts) < 1 or self.new_tokens < 2:
            raise ConfigError(
                f"A point got {self.videos} videos of {self.prefix} visual tokens, {self.questions} questions on each "
                f"and {self.generations} answers of {self.new_tokens} tokens; it needs at least 1 of each, 16 visual "
                "tokens (4 frames) and answers of at least 2 tokens. Choose other numbers."
            )

    @property
    def asked(self) -> int:
        """V x Q questions."""
        return self.videos * self.questions

    @property
    def off_centre(self) -> int:
        return (self.generations != 8) + (self.new_tokens != 16) + (self.questions != 1) + (self.videos != 1)

    @property
    def num_tokens(self) -> int:
        return self.asked * self.generations * (self.prefix + self.new_tokens)

    def __str__(self) -> str:
        each = "1 question on each of" if self.questions == 1 else f"{self.questions} questions on each of"
        videos = f"{each} {self.videos} video(s) of {self.prefix:,} visual tokens"
        return f"{videos}, {self.generations} answers of {self.new_tokens:,} tok"


PointT = TypeVar("PointT", bound=Point)
Made = TypeVar("Made")


def informative_first(points: Iterable[PointT]) -> list[PointT]:
    """Each point once: the centre of every prefix, then one step off it, and so on; cheap ones first."""
    return sorted(dict.fromkeys(points), key=lambda point: (point.off_centre, point.prefix, point.num_tokens))


def parse_points(words: Sequence[str], make: Callable[..., Made], counts: Sequence[int], form: str) -> list[Made]:
    """``["4096,8,512"]`` -> ``make(4096, 8, 512)``; in the order given.

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
    return points
