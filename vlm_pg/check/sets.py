"""The records of a run's sets that are checked, those that the run uses; and facts of their media, read once each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vlm_pg.check.findings import SetTally
from vlm_pg.check.lengths import LengthRules
from vlm_pg.data.dedup import Ledger
from vlm_pg.data.files import count_raw
from vlm_pg.data.records import stream_records
from vlm_pg.data.sample_sets import check_weights, is_prepared, named
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.paths import resolve
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import BadSample, Cue, MediaRef, Sample

Facts = MediaFacts | SampleError
_TABLE = "probed"


@dataclass(frozen=True)
class MediaSource:
    """The folder of a set's media and their loader. ``settings_key``: equal where facts of a medium are equal."""

    loader: MediaLoader
    root: Path
    allow_remote: bool
    settings_key: str = ""


class Prober:
    """Reads facts of media, once per file and part, into a ledger.

    ``decode``: decode each medium entirely; ``keep``: put its frames into the cache, which decodes it in any case.
    """

    def __init__(self, ledger: Ledger, decode: bool = False, keep: bool = False):
        self._ledger, self._decode, self._keep = ledger, decode, keep
        self._pending: dict[str, list[Future[MediaFacts] | Future[bool] | SampleError]] = {}

    def request(self, ref: MediaRef, source: MediaSource) -> str | SampleError:
        """Start to read a medium unless that was done. Returns the key for ``facts``, or why there are none."""
        try:
            path = resolve(ref, source.root, source.allow_remote)
        except SampleError as fault:
            return fault
        subtitles = ref.subtitles and f"{source.root}/{ref.subtitles}"
        key = repr((ref.kind, path, ref.folder_fps, ref.start, ref.end, ref.times, subtitles, source.settings_key))
        if key not in self._pending and self._ledger.look(_TABLE, key) is None:
            loader = source.loader
            # Keeping decodes the whole medium, or reads and checks the cached frames.
            self._pending[key] = (
                [loader.store(ref), loader.probe(ref)] if self._keep else [loader.probe(ref, self._decode)]
            )
        return key

    def facts(self, key: str | SampleError) -> Facts:
        """The result of a request; waits for it."""
        if isinstance(key, SampleError):
            return key
        pending = self._pending.pop(key, None)
        if pending is None:
            known = self._ledger.look(_TABLE, key)
            assert known is not None, "facts need a key that request has returned"
            value = json.loads(known)
            if isinstance(value, list):
                return SampleError(*value)
            cues = tuple(Cue(**cue) for cue in value["subtitles"])
            return MediaFacts(**value | {"frame_seconds": tuple(value["frame_seconds"]), "subtitles": cues})
        facts: Facts | None = None
        try:
            for one in pending:
                if isinstance(one, SampleError):
                    raise one
                facts = result if not isinstance(result := one.result(), bool) else facts
        except SampleError as fault:
            facts = fault
        assert facts is not None
        value = asdict(facts) if isinstance(facts, MediaFacts) else [facts.reason, str(facts), facts.trace]
        self._ledger.add(_TABLE, key, json.dumps(value))
        return facts


@dataclass(frozen=True)
class Presentation:
    """How a set's questions are presented: length rules, media settings, the types of question that are used
    (``includes``) and the media they get (``transform``)."""

    rules: LengthRules
    media: MediaSettings
    includes: Callable[[Sample], bool] = lambda sample: True
    transform: Callable[[Sample], Sample] = lambda sample: sample


@dataclass(frozen=True)
class CheckedSet:
    """A set to check.

    Args:
        name: as the configuration calls it.
        trains: it is a training set.
        dataset: as the run calls it where it trains on several.
        limit: the run uses that many usable records only.
        weightless: sources without a weight, which the run never uses.
        sources: those found, within the limit.
    """

    name: str
    path: Path
    media: MediaSource
    presentation: Presentation
    trains: bool
    dataset: str = ""
    limit: int | None = None
    weightless: frozenset[str] = frozenset()
    sources: set[str] = field(default_factory=set)

    def records(self, first_at: Callable[[str, str], str], tally: SetTally) -> Iterator[Sample | BadSample]:
        """The records that the run uses, and those before its limit that it cannot read; ``tally`` counts all.

        A file is read to its end, as the run does, which notices truncation; training reads a prepared set only up to
        its limit. ``first_at`` and errors: see ``stream_records``.
        """
        usable, stops = 0, self.trains and is_prepared(self.path)
        for number, record in enumerate(stream_records(self.path, first_at)):
            beyond = usable == self.limit
            if beyond and stops:
                tally.left_out += count_raw(self.path) - number
                return
            tally.read += 1
            tally.unreadable += isinstance(record, BadSample)
            is_included = isinstance(record, BadSample) or self.presentation.includes(record)
            if isinstance(record, Sample) and is_included and not beyond:
                usable += 1
                self.sources.add(record.source)
            if beyond or not is_included or (isinstance(record, Sample) and record.source in self.weightless):
                tally.left_out += 1
            else:
                shown = self.presentation.transform(record) if isinstance(record, Sample) else record
                yield named(shown, self.dataset)


def sets_of(
    data: DataSettings,
    eval_names: Sequence[str],
    eval_limit: int | None,
    media_of: Callable[[str, Path, Presentation], MediaSource],
    presentation_of: Callable[[str | None], Presentation],
) -> list[CheckedSet]:
    """The sets that a run reads, training sets first. A set without a weight is read, and no record of it checked.

    Args:
        eval_names: the evaluation sets that are chosen.
        eval_limit: how many usable records of each are used.
        media_of: media of a set, by its name, the path of its records, and its presentation.
        presentation_of: of an evaluation set by its name; None: of training sets.

    Raises:
        ConfigError: ``data.mixture`` has not one weight for each of several sets.
    """
    several = isinstance(data.train, dict)
    if several and data.mixture:
        check_weights(list(data.train_sets), data.mixture)
    sets = []
    for name, path in data.train_sets.items():
        limit = data.limit if name in data.used_sets else 0
        weightless = frozenset() if several else data.weightless
        key = f"data.train.{name}" if several else "data.train"
        how = presentation_of(None)
        sets.append(CheckedSet(key, path, media_of(name, path, how), how, True, name, limit, weightless))
    for name in eval_names:
        path, how = data.eval[name], presentation_of(name)
        media = media_of(name, path, how)
        sets.append(CheckedSet(f"data.eval.{name}", path, media, how, trains=False, limit=eval_limit))
    return sets


def mixture_fault(data: DataSettings, sets: Sequence[CheckedSet]) -> ConfigError | None:
    """Why training would refuse ``data.mixture``, once all records of its one set were read; None if it would not."""
    if not data.mixture or list(data.train_sets) != [""]:
        return None
    try:
        check_weights(sorted(source for one in sets if one.trains for source in one.sources), data.mixture)
    except ConfigError as fault:
        return fault
    return None


def too_many_bad(data: DataSettings, sets: Sequence[CheckedSet], tallies: Sequence[SetTally]) -> list[str]:
    """A line for each evaluation set, or all training sets together, with more unreadable records than a run allows."""
    groups = {one.name: [tally] for one, tally in zip(sets, tallies, strict=True) if not one.trains}
    groups["data.train"] = [tally for one, tally in zip(sets, tallies, strict=True) if one.trains]
    lines = []
    for name, group in groups.items():
        bad, read = sum(one.unreadable for one in group), sum(one.read for one in group)
        if read >= data.min_seen_for_bad_share and bad > data.max_bad_share * read:
            lines.append(
                f"{name}: {bad:,} of {read:,} records cannot be read, more than data.max_bad_share="
                f"{data.max_bad_share:g} allows"
            )
    return lines
