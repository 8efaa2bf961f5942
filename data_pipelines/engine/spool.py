"""Judged parts on disk, each written whole once: what a run that was killed need not do again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipelines.engine.judging import Verdict
from data_pipelines.owned import IDENTITY, PARTS
from vlm_pg.errors import VlmPgError
from vlm_pg.files import write_bytes_atomic
from vlm_pg.types import BadSample, MediaRef, Sample

_BEGUN_ANEW = "\nbegun with --overwrite"


def remove_left(out: Path) -> None:
    """Remove the parts of a run that was killed when it had written everything."""
    shutil.rmtree(out / PARTS, ignore_errors=True)


class Spool:
    """The folder ``.parts`` of an output folder.

    A part is a line for each verdict, and a last one with their number, that of the rows, and the digest of all before:
    after a power cut a file may be empty, or have holes.

    Args:
        out: the output folder.
        identity: what the parts depend on, as JSON; parts of another identity are removed.
        anew: only parts of a run that began anew as well are gone on with.
    """

    def __init__(self, out: Path, identity: str, anew: bool = False):
        self.folder = out / PARTS
        known = self.folder / IDENTITY
        fitting = [identity + _BEGUN_ANEW] if anew else [identity, identity + _BEGUN_ANEW]
        before = known.read_text(encoding="utf-8") if known.is_file() else ""
        if self.folder.exists() and before not in fitting:
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        if before not in fitting:
            write_bytes_atomic(known, fitting[0].encode(), durable=False)
        for name in os.listdir(self.folder):
            if name.endswith(".tmp"):  # what a killed run was writing
                (self.folder / name).unlink()

    def has(self, number: int, rows: int) -> bool:
        """Whether a part is there, whole, with the verdicts of so many rows."""
        read = self._read(number)
        return read is not None and read[1]["rows"] == rows

    def write(self, number: int, rows: int, verdicts: Sequence[Verdict]) -> None:
        """Write a part: what became of so many rows. It appears whole or not at all."""
        body = "".join(json.dumps(_plain(one), ensure_ascii=True) + "\n" for one in verdicts).encode()
        end = {"rows": rows, "verdicts": len(verdicts), "sha256": hashlib.sha256(body).hexdigest()}
        write_bytes_atomic(self._path(number), body + json.dumps(end).encode() + b"\n", durable=False)

    def verdicts(self, count: int) -> Iterator[Verdict]:
        """Of the first ``count`` parts, in order; one is in memory at a time.

        Raises:
            VlmPgError: a part is not as it was written.
        """
        for number in range(count):
            yield from _verdicts(self._whole(number)[0])

    def totals(self, count: int) -> tuple[int, int]:
        """How many rows the first ``count`` parts are of, and how many verdicts they have. Raises as ``verdicts``."""
        ends = [self._whole(number)[1] for number in range(count)]
        return sum(end["rows"] for end in ends), sum(end["verdicts"] for end in ends)

    def forget(self, is_doubtful: Callable[[Verdict], bool]) -> int:
        """Remove the parts that have such a verdict, so that they are judged again. Returns how many they were."""
        removed = 0
        for path in sorted(self.folder.glob("*.jsonl")):
            read = self._read(int(path.stem)) if path.stem.isdecimal() else None
            if read is None or any(map(is_doubtful, _verdicts(read[0]))):
                path.unlink()
                removed += 1
        return removed

    def remove(self) -> None:
        """All parts are used."""
        shutil.rmtree(self.folder)

    def _whole(self, number: int) -> tuple[bytes, dict[str, Any]]:
        read = self._read(number)
        if read is None:
            raise VlmPgError(
                f"'{self._path(number)}' is not as this run wrote it: it was removed or changed, or that disk is at "
                "fault. Give the same command again: what is missing is judged again."
            )
        return read

    def _read(self, number: int) -> tuple[bytes, dict[str, Any]] | None:
        """The lines of verdicts, and what the last line says; None of a part that is not there, or not whole."""
        try:
            data = self._path(number).read_bytes()
        except FileNotFoundError:
            return None
        place = data.rstrip(b"\n").rfind(b"\n") + 1
        body = data[:place]
        try:
            end = json.loads(data[place:])
            return (body, end) if end["sha256"] == hashlib.sha256(body).hexdigest() else None
        except (ValueError, KeyError, TypeError):
            return None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:07d}.jsonl"


def _verdicts(body: bytes) -> Iterator[Verdict]:
    return (_verdict(json.loads(line)) for line in body.splitlines())


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {name: value for name, value in asdict(verdict).items() if value not in (None, "", ())}


def _verdict(fields: dict[str, Any]) -> Verdict:
    sample, refused = fields.get("sample"), fields.get("refused")
    if sample is not None:
        media = tuple(MediaRef(**ref | {"times": tuple(ref["times"])}) for ref in sample["media"])
        sample = Sample(**sample | {"media": media, "options": tuple(sample["options"])})
    return Verdict(
        fields["split"],
        sample,
        None if refused is None else BadSample(**refused),
        fields.get("left_out", ""),
        tuple(fields.get("keys", ())),
        found=tuple((path, name, folder, beside) for path, name, folder, beside in fields.get("found", ())),
    )
