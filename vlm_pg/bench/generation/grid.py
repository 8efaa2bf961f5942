"""The points of ``bench rollout``, and in which order they are measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlm_pg.errors import ConfigError

PREFIXES = (512, 1024, 4096, 8192)
GENERATIONS = (4, 8, 16)
NEW_TOKENS = (64, 256)
GROUPS = (1, 4)
CENTRE_GENERATIONS, CENTRE_NEW_TOKENS, CENTRE_GROUPS = 8, 64, 1


@dataclass(frozen=True)
class RolloutPoint:
    """B prompts of P tokens, G responses of exactly N tokens to each.

    Raises:
        ConfigError: a prefix, number of responses or number of groups below 1, or fewer than 2 new tokens.
    """

    prefix: int
    generations: int
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
    def identity(self) -> dict[str, int]:
        """What tells this point from the others of a file of results."""
        return {
            "prefix": self.prefix,
            "generations": self.generations,
            "new_tokens": self.new_tokens,
            "groups": self.groups,
        }

    def __str__(self) -> str:
        groups = f"{self.groups} groups of " if self.groups > 1 else ""
        return f"{groups}prefix {self.prefix:,} x {self.generations} responses of {self.new_tokens:,} tok"


def rollout_points(
    prefixes: Iterable[int], generations: Iterable[int], new_tokens: Iterable[int], groups: Iterable[int]
) -> list[RolloutPoint]:
    """All combinations, informative ones first."""
    points = {
        RolloutPoint(prefix, count, length, number)
        for prefix in prefixes
        for count in generations
        for length in new_tokens
        for number in groups
    }
    return sorted(points, key=_rank)


def _rank(point: RolloutPoint) -> tuple[int, int, int]:
    """The centre (G 8, 64 new tokens, one group) of every prefix, then one step off it, and so on; cheap ones first."""
    off_centre = (
        (point.generations != CENTRE_GENERATIONS)
        + (point.new_tokens != CENTRE_NEW_TOKENS)
        + (point.groups != CENTRE_GROUPS)
    )
    return off_centre, point.prefix, point.rollouts * (point.prefix + point.new_tokens)


def parse_rollout_points(words: Sequence[str]) -> list[RolloutPoint]:
    """``["4096,8,64", "4096,8,64,4"]`` -> prefix 4096, G 8, 64 new tokens, in 1 and in 4 groups; in the order given.

    Raises:
        ConfigError: not three or four whole numbers.
    """
    points = []
    for word in words:
        parts = word.split(",")
        if len(parts) not in (3, 4) or not all(part.strip().isdigit() for part in parts):
            raise ConfigError(
                f"--points got {word!r}; a point is PREFIX,GENERATIONS,NEW_TOKENS or "
                "PREFIX,GENERATIONS,NEW_TOKENS,GROUPS in whole numbers, such as 4096,8,64 or 4096,8,64,4."
            )
        points.append(RolloutPoint(*(int(part) for part in parts)))
    return points
