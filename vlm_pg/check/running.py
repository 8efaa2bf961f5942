"""A set from its file to its findings: records in order, a window of them under way, so that memory stays flat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vlm_pg.check.crossing import Crossing
from vlm_pg.check.finding import Finding
from vlm_pg.check.judge import Judge
from vlm_pg.check.probing import Facts, Prober
from vlm_pg.check.sets import CheckedSet
from vlm_pg.check.tally import SetTally
from vlm_pg.data.dedup import Ledger
from vlm_pg.data.files import count_raw
from vlm_pg.errors import SampleError
from vlm_pg.media.probe import MediaFacts
from vlm_pg.progress import Bar
from vlm_pg.types import BadSample, Sample

# Judged together, so that processes have something to share.
BATCH = 128
# Records that are read while the media of earlier ones are looked at.
WINDOW = 512


@dataclass
class _Waiting:
    record: Sample | BadSample
    keys: list[str | SampleError] = field(default_factory=list)


class SetCheck:
    """Checks one set after the other; those that are trained on come first.

    Args:
        ledger, prober, judge: shared by all sets.
        on_finding: told of everything that is found, in order.
        names_sets: findings say which set they are of.
    """

    def __init__(
        self,
        ledger: Ledger,
        prober: Prober,
        judge: Judge,
        on_finding: Callable[[Finding], None],
        names_sets: bool,
    ):
        self._ledger, self._prober, self._judge = ledger, prober, judge
        self._on_finding, self._names_sets = on_finding, names_sets

    def run(self, one: CheckedSet, tally: SetTally) -> None:
        """Check a set; its tally grows.

        Raises:
            ConfigError: its file cannot be read on.
            ModelError: it has media and the model reads text alone.
        """
        total, table = count_raw(one.path), f"ids of {one.name}"
        crossing = Crossing(self._ledger, one.name, one.trains, self._judge.same_gold)
        waiting: deque[_Waiting] = deque()
        with Bar(f"Checking {one.name}", total if one.limit is None else min(total, one.limit)) as bar:
            for record in one.records(lambda name, where: self._ledger.first(table, name, where), tally):
                keys = [self._prober.ask(ref, one.place) for ref in record.media] if isinstance(record, Sample) else []
                waiting.append(_Waiting(record, keys))
                if len(waiting) == WINDOW:
                    self._settle([waiting.popleft() for _ in range(BATCH)], one, crossing, tally)
                    bar.advance(BATCH)
            while waiting:
                last = [waiting.popleft() for _ in range(min(BATCH, len(waiting)))]
                self._settle(last, one, crossing, tally)
                bar.advance(len(last))

    def _settle(self, batch: list[_Waiting], one: CheckedSet, crossing: Crossing, tally: SetTally) -> None:
        """Judge some records, whose media are waited for."""
        facts = [[self._prober.facts(key) for key in item.keys] for item in batch]
        read = [(item.record, of) for item, of in zip(batch, facts, strict=True) if isinstance(item.record, Sample)]
        judged = self._judge.judge(
            [sample for sample, _ in read], [of for _, of in read], one.asked.rules, tally.add_prompt
        )
        for item, of_media in zip(batch, facts, strict=True):
            if isinstance(item.record, BadSample):
                self._found(one, tally, [Finding(item.record)])
                continue
            found = next(judged)
            self._count(one, item.record, of_media, tally)
            if not any(finding.is_refusal for finding in found):
                # What training leaves out is neither asked twice nor trained on.
                facts_of_all = [fact for fact in of_media if isinstance(fact, MediaFacts)]
                found += crossing.findings(item.record, facts_of_all)
            self._found(one, tally, found)

    def _found(self, one: CheckedSet, tally: SetTally, findings: list[Finding]) -> None:
        if self._names_sets:
            findings = [
                replace(found, bad=replace(found.bad, where=f"{one.name}, {found.bad.where}")) for found in findings
            ]
        tally.add(findings)
        for found in findings:
            self._on_finding(found)

    def _count(self, one: CheckedSet, sample: Sample, facts: list[Facts], tally: SetTally) -> None:
        """Each medium of a set counts once, whatever its files are called."""
        for ref, fact in zip(sample.media, facts, strict=True):
            if isinstance(fact, MediaFacts) and self._ledger.add(f"media of {one.name}", fact.content):
                tally.media += 1
                if ref.kind == "video":
                    tally.seconds.add(fact.seconds)
