"""Where a rank is, and what is said of one that is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from vlm_pg.errors import printable

ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class Standing:
    """What a rank has last told of itself.

    ``phase``: the one it is in, "" between two. ``last_phase``: the one that ended last. ``step``: the last completed
    one; None as long as it is not known.
    """

    rank: int
    host: str
    process: int
    phase: str = ""
    last_phase: str = ""
    step: int | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.process})"

    @property
    def place(self) -> str:
        """As "in phase "rollout", after step 120"."""
        if self.phase:
            where = f'in phase "{self.phase}"'
        elif self.last_phase:
            where = f'after phase "{self.last_phase}"'
        else:
            where = "before its first phase"
        if self.step is None:
            return where
        return f"{where}, {f'after step {self.step}' if self.step else 'before the first step was completed'}"

    def at(self, place: Mapping[str, Any]) -> Self:
        """With what ``place_said`` says."""
        return replace(self, **{name: place[name] for name in ("phase", "last_phase", "step") if name in place})

    def place_said(self) -> dict[str, Any]:
        return {"phase": self.phase, "last_phase": self.last_phase, "step": self.step}


@dataclass(frozen=True)
class Failure:
    """An exception that ends a rank.

    ``about_others``: it may only say that another rank is gone.
    """

    kind: str
    text: str
    about_others: bool = False

    @classmethod
    def of(cls, error: BaseException, about_others: bool) -> Self:
        lines = str(error).strip().splitlines()
        return cls(type(error).__name__, printable(lines[0] if lines else "", ERROR_CHARACTERS), about_others)

    def is_like(self, other: Failure) -> bool:
        return (self.kind, self.text) == (other.kind, other.text)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


@dataclass(frozen=True)
class Loss:
    """Why all ranks end: a rank ended without a word (no failure), or told of its failure.

    ``others``: further ranks that were lost at the same time.
    """

    who: Standing
    failure: Failure | None = None
    others: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        with_it = f", with it rank(s) {', '.join(map(str, self.others))}" if self.others else ""
        if self.failure is None:
            what = f"has gone {self.who.place}{with_it}: it was killed, or its host or the connection to it is lost"
            advice = "go on with run.resume=auto"
        else:
            what = f"failed {self.who.place}: {self.failure}".removesuffix(".")
            advice = "once that is put right, go on with run.resume=auto"
        return f"{self.who.name} {what}. Every rank ends; {advice}."

    def said(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def heard(cls, said: Mapping[str, Any]) -> Self:
        """What ``said`` gave."""
        failure = said["failure"]
        return cls(Standing(**said["who"]), None if failure is None else Failure(**failure), tuple(said["others"]))


def worst(losses: Sequence[Loss]) -> Loss:
    """The one behind the others, of losses in the order in which they were learnt of."""
    first = next((loss for loss in losses if loss.failure is None or not loss.failure.about_others), losses[0])
    gone = sorted(loss.who.rank for loss in losses if loss.failure is None and loss is not first)
    return replace(first, others=tuple(gone) if first.failure is None else ())
