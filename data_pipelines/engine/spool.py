"""Judged parts on disk, each written whole once: what a run that was killed need not do again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipelines.engine.judging import Verdict
from vlm_pg.files import write_bytes_atomic
from vlm_pg.types import BadSample, MediaRef, Sample

FOLDER = ".parts"
_IDENTITY = "identity.json"


def remove_left(out: Path) -> None:
    """Remove the parts of a run that was killed when it had written everything."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)


class Spool:
    """The folder ``.parts`` of an output folder.

    Args:
        out: the output folder.
        identity: what the parts depend on, as JSON; parts of another identity are removed.
    """

    def __init__(self, out: Path, identity: str):
        self.folder = out / FOLDER
        known = self.folder / _IDENTITY
        if self.folder.exists() and not (known.is_file() and known.read_text(encoding="utf-8") == identity):
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        write_bytes_atomic(known, identity.encode(), durable=False)
        for name in os.listdir(self.folder):
            if name.endswith(".tmp"):  # what a killed run was writing
                (self.folder / name).unlink()

    def has(self, number: int) -> bool:
        """Whether a part is there, whole."""
        return self._path(number).exists()

    def write(self, number: int, verdicts: Sequence[Verdict]) -> None:
        """Write a part. It appears whole or not at all."""
        lines = [json.dumps(_plain(one), ensure_ascii=True) + "\n" for one in verdicts]
        write_bytes_atomic(self._path(number), "".join(lines).encode(), durable=False)

    def verdicts(self, count: int) -> Iterator[Verdict]:
        """Of the first ``count`` parts, in order; one is in memory at a time."""
        for number in range(count):
            with self._path(number).open(encoding="utf-8") as file:
                for line in file:
                    yield _verdict(json.loads(line))

    def forget(self, reason: str) -> None:
        """Remove the parts in which a question was refused for a reason, so that they are judged again."""
        for path in list(self.folder.glob("*.jsonl")):
            with path.open(encoding="utf-8") as file:
                refused = (json.loads(line).get("refused") for line in file)
                found = any(bad is not None and bad["reason"] == reason for bad in refused)
            if found:
                path.unlink()

    def remove(self) -> None:
        """All parts are used."""
        shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:07d}.jsonl"


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
    )
