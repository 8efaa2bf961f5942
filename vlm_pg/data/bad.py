"""The log of samples that could not be used; a run with too many of them stops."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from vlm_pg.errors import ConfigError, TooManyBadSamples
from vlm_pg.files import json_line
from vlm_pg.types import BadSample


def line_of(bad: BadSample) -> bytes:
    """The fault as a line of JSON, without an empty trace."""
    return json_line({name: text for name, text in asdict(bad).items() if text or name != "trace"})


class BadSampleLog:
    """Writes ``bad_samples.jsonl`` as faults happen and stops the run when too large a share is bad.

    A fault (same sample, reason and location) is written once, also after a resume or in a later epoch. The share is
    that of the samples tried since the log was opened.

    Args:
        max_share: largest allowed share of bad samples, 0 to 1.
        min_seen: the share is not judged before so many samples.
        warn: called with every new fault.
    """

    def __init__(self, path: Path, max_share: float, min_seen: int, warn: Callable[[str], None] = lambda line: None):
        self._path, self._max_share, self._min_seen, self._warn = path, max_share, min_seen, warn
        self._seen = self._bad = 0
        self._known: dict[tuple[str, str, str], str] = {}
        if path.exists():
            self._load()

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of distinct faults in the file, by reason, the most frequent first."""
        return dict(Counter(self._known.values()).most_common())

    def record_file(self, bad: Sequence[BadSample], total: int) -> None:
        """Write the faults of a file of ``total`` records; its share of bad records is judged by itself.

        Raises:
            TooManyBadSamples: the share of bad records in the file exceeds ``max_share``.
        """
        for fault in bad:
            self._warn(str(fault))
            self._write(fault)
        self._judge(len(bad), total)

    def record_tried(self, seen: int, bad: Sequence[BadSample]) -> None:
        """Count ``seen`` samples that were tried, and write the faults among them at once.

        Raises:
            TooManyBadSamples: the share of bad samples exceeds ``max_share``.
        """
        self._seen += seen
        for fault in bad:
            self._bad += 1
            is_new = self._write(fault)
            self._judge(self._bad, self._seen)
            if is_new:
                self._warn(str(fault))

    def _write(self, bad: BadSample) -> bool:
        """Whether the fault is a new one."""
        key = (bad.sample_id, bad.reason, bad.where)
        if key in self._known:
            return False
        self._known[key] = bad.reason
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(line_of(bad))
            file.flush()
            os.fsync(file.fileno())
        return True

    def _judge(self, bad: int, seen: int) -> None:
        if seen < self._min_seen or bad <= self._max_share * seen:
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.counts.items())
        raise TooManyBadSamples(
            f"{bad} of {seen} samples could not be used ({reasons}). At most a share of "
            f"{self._max_share:g} is allowed. The cause of each is in '{self._path}'; repair the data, or raise "
            "data.max_bad_share."
        )

    def _load(self) -> None:
        """Read the file of an earlier run; a last line that a kill left unfinished is truncated."""
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            with self._path.open("r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                bad = BadSample(**json.loads(line))
                self._known[(bad.sample_id, bad.reason, bad.where)] = bad.reason
            except (ValueError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"{self._path}:{number} is not a record of a bad sample: {error}. One JSON object a line with "
                    "sample_id, reason, message and where is expected. Move the file away and start again."
                ) from error
