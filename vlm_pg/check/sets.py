"""Which records of a run's sets are checked: those that the run asks for; all others are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlm_pg.check.findings import SetTally
from vlm_pg.check.lengths import LengthRules
from vlm_pg.check.probing import Place
from vlm_pg.data.files import count_raw
from vlm_pg.data.order import check_weights
from vlm_pg.data.records import stream_records
from vlm_pg.data.sample_sets import is_prepared, named
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import BadSample, Sample


@dataclass(frozen=True)
class Asked:
    """How the questions of a set are asked: ``rules`` of their prompts, ``media`` as they are shown, and of which type
    of question (``asks``) there are any, with which media (``as_asked``)."""

    rules: LengthRules
    media: MediaSettings
    asks: Callable[[Sample], bool] = lambda sample: True
    as_asked: Callable[[Sample], Sample] = lambda sample: sample


@dataclass(frozen=True)
class CheckedSet:
    """A set to check.

    ``asked``: how, and which of its questions. ``name``: as the configuration calls it. ``trains``: it is trained on.
    ``dataset``: as the run calls it where it trains on several. ``limit``: the run asks for so many usable records
    only. ``weightless``: sources that it never asks for. ``sources``: those found, within the limit.
    """

    name: str
    path: Path
    place: Place
    asked: Asked
    trains: bool
    dataset: str = ""
    limit: int | None = None
    weightless: frozenset[str] = frozenset()
    sources: set[str] = field(default_factory=set)

    def records(self, first_at: Callable[[str, str], str], tally: SetTally) -> Iterator[Sample | BadSample]:
        """The records that the run asks for, and those before its limit that it cannot read; the others are counted.

        A file is read to its end, as the run does, so that one which breaks off is noticed; of a prepared set training
        reads nothing beyond its limit.

        Args:
            first_at: as of ``stream_records``.
            tally: counts all.

        Raises:
            ConfigError: as ``stream_records``.
        """
        usable, stops = 0, self.trains and is_prepared(self.path)
        for place, record in enumerate(stream_records(self.path, first_at)):
            beyond = usable == self.limit
            if beyond and stops:
                tally.left_out += count_raw(self.path) - place
                return
            tally.read += 1
            tally.unreadable += isinstance(record, BadSample)
            is_asked = isinstance(record, BadSample) or self.asked.asks(record)
            if isinstance(record, Sample) and is_asked and not beyond:
                usable += 1
                self.sources.add(record.source)
            if beyond or not is_asked or (isinstance(record, Sample) and record.source in self.weightless):
                tally.left_out += 1
            else:
                yield named(self.asked.as_asked(record) if isinstance(record, Sample) else record, self.dataset)


def sets_of(
    data: DataSettings,
    eval_names: Sequence[str],
    eval_limit: int | None,
    place: Callable[[str, Path, Asked], Place],
    asked: Callable[[str | None], Asked],
) -> list[CheckedSet]:
    """The sets that a run reads, those that are trained on first. One without a weight is read, and none of it checked.

    Args:
        data: all sets.
        eval_names: the evaluation sets that are chosen.
        eval_limit: how many usable records of each are asked.
        place: where the media of a set lie, by its name, the path of its records, and how it is asked.
        asked: how an evaluation set is asked, by its name; None: one that is trained on.

    Raises:
        ConfigError: ``data.mixture`` has not one weight for each of several sets.
    """
    several = isinstance(data.train, dict)
    if several and data.mixture:
        check_weights(list(data.train_sets), data.mixture)
    sets = []
    for name, path in data.train_sets.items():
        limit = data.limit if name in data.asked_sets else 0
        weightless = frozenset() if several else data.weightless
        key = f"data.train.{name}" if several else "data.train"
        how = asked(None)
        sets.append(CheckedSet(key, path, place(name, path, how), how, True, name, limit, weightless))
    for name in eval_names:
        path = data.eval[name]
        how = asked(name)
        sets.append(CheckedSet(f"data.eval.{name}", path, place(name, path, how), how, False, limit=eval_limit))
    return sets


def mixture_fault(data: DataSettings, sets: Sequence[CheckedSet]) -> ConfigError | None:
    """Why training would refuse ``data.mixture``, once all records of its one set were read; None: it would not."""
    if not data.mixture or list(data.train_sets) != [""]:
        return None
    try:
        check_weights(sorted(source for one in sets if one.trains for source in one.sources), data.mixture)
    except ConfigError as fault:
        return fault
    return None


def too_many_bad(data: DataSettings, sets: Sequence[CheckedSet], tallies: Sequence[SetTally]) -> list[str]:
    """A line for each file, or all files that are trained on, of which reading refuses more than a run allows."""
    judged = {one.name: [tally] for one, tally in zip(sets, tallies, strict=True) if not one.trains}
    judged["data.train"] = [tally for one, tally in zip(sets, tallies, strict=True) if one.trains]
    lines = []
    for name, of_name in judged.items():
        bad, read = sum(one.unreadable for one in of_name), sum(one.read for one in of_name)
        if read >= data.min_seen_for_bad_share and bad > data.max_bad_share * read:
            lines.append(
                f"{name}: {bad:,} of {read:,} records cannot be read, more than data.max_bad_share="
                f"{data.max_bad_share:g} allows"
            )
    return lines
