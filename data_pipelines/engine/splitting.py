"""Which split each question is for: no medium, by content, is in two of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_pipelines.engine.judging import Verdict
from vlm_pg.data.dedup import Ledger
from vlm_pg.errors import printable
from vlm_pg.types import BadSample, Sample

if TYPE_CHECKING:
    from vlm_pg.media.probe import MediaFacts


@dataclass(frozen=True)
class Placed:
    """A question that is kept: for which split, and what is known of its media."""

    split: str
    sample: Sample
    facts: tuple[MediaFacts, ...] = ()


class Splitter:
    """Decides for which split a question is kept, over all parts in order.

    A medium goes by its content where it was looked at, whatever its file is called; else by its path.

    Args:
        ledger: remembers.
        eval_share: share of the media (without media: of the questions) of files to train on set apart for evaluation.
        seed: decides which.
    """

    def __init__(self, ledger: Ledger, eval_share: float, seed: int):
        self._ledger, self._eval_share, self._seed = ledger, eval_share, seed

    def note(self, verdicts: Iterable[Verdict]) -> None:
        """First all parts are looked through for what files to evaluate on ask about."""
        for one in verdicts:
            for key in (*one.keys, *_contents(one)) if one.split == "eval" else ():
                self._ledger.add("evaluated", key)

    def placed(self, verdicts: Iterable[Verdict]) -> Iterator[Placed | BadSample | str]:
        """Then each is for a split, refused, or left out for a reason."""
        for one in verdicts:
            if one.refused is not None:
                yield one.refused
            elif one.sample is None:
                yield one.left_out
            elif not self._ledger.add(f"ids of {one.split}", one.sample.sample_id, one.sample.where):
                yield self._twice(one.split, one.sample)
            else:
                yield self._side(one, one.sample)

    def _twice(self, split: str, sample: Sample) -> BadSample:
        name, first = printable(sample.sample_id, 200), self._ledger.look(f"ids of {split}", sample.sample_id)
        message = (
            f"the id '{name}' was used before, at {first}. Each row needs its own. Give each file once; where ids "
            "begin anew in each file, or in each row's list of questions, number them through, or leave the ids out."
        )
        return BadSample(sample.sample_id, "duplicate_id", message, sample.where)

    def _side(self, one: Verdict, sample: Sample) -> Placed | str:
        if one.split == "eval":
            return Placed("eval", sample, one.facts)
        contents = _contents(one)
        if any(self._ledger.look("evaluated", key) is not None for key in (*one.keys, *contents)):
            return "also in the evaluation file"
        sides = {self._is_for_evaluation(key) for key in contents or one.keys}
        if len(sides) == 2:
            return "media in both files"
        return Placed("eval" if True in sides else "train", sample, one.facts)

    def _is_for_evaluation(self, key: str) -> bool:
        """A fixed share of all keys, whatever else the files hold."""
        digest = hashlib.sha256(f"{self._seed}:{key}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") < self._eval_share * 2**64


def _contents(one: Verdict) -> tuple[str, ...]:
    return tuple(f"sha256:{facts.content}" for facts in one.facts)
