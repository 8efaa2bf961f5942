"""The points that are measured, and in which order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlm_pg.errors import ConfigError

PREFIXES = (1024, 4096, 8192, 16384)
RATIOS = (1, 2, 4, 8, 16, 32)
GENERATIONS = (2, 4, 8, 16)
CENTRE_RATIO, CENTRE_GENERATIONS = 8, 8


@dataclass(frozen=True)
class Point:
    """One group: a prefix of P tokens and G responses of up to R tokens.

    Raises:
        ConfigError: a prefix below 1, fewer than 1 responses, or responses below 2 tokens.
    """

    prefix: int
    generations: int
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
    def identity(self) -> dict[str, int]:
        """What tells this point from the others of a file of results."""
        return {"prefix": self.prefix, "generations": self.generations, "response": self.response}

    def __str__(self) -> str:
        kind = "ragged, up to " if self.ragged else ""
        size = f"prefix {self.prefix:,} x {self.generations} responses of {kind}{self.response:,} tok"
        return f"{size} (ratio {self.ratio:g})"


def grid_points(
    prefixes: Iterable[int],
    ratios: Iterable[float],
    generations: Iterable[int],
    responses: Iterable[int] | None = None,
    ragged: bool = False,
) -> list[Point]:
    """All combinations, informative ones first; ``responses`` (tokens) take the place of ``ratios``."""
    points = {
        Point(prefix, count, response, ragged)
        for prefix in prefixes
        for count in generations
        for response in (responses if responses is not None else (max(2, round(prefix / ratio)) for ratio in ratios))
    }
    return sorted(points, key=_rank)


def _rank(point: Point) -> tuple[int, int, int]:
    """Points at the centre (ratio 8, G 8) of every prefix, then one step off it, then the corners; cheap ones first."""
    off_centre = (round(point.ratio) != CENTRE_RATIO) + (point.generations != CENTRE_GENERATIONS)
    return off_centre, point.prefix, point.generations * (point.prefix + point.response)


def parse_points(words: Sequence[str], ragged: bool = False) -> list[Point]:
    """``["4096,8,512"]`` -> prefix 4096, G 8, response 512; in the order given.

    Raises:
        ConfigError: not three whole numbers.
    """
    points = []
    for word in words:
        parts = word.split(",")
        if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
            raise ConfigError(
                f"--points got {word!r}; a point is PREFIX,GENERATIONS,RESPONSE in whole numbers, such as 4096,8,512."
            )
        prefix, count, response = (int(part) for part in parts)
        points.append(Point(prefix, count, response, ragged))
    return points
