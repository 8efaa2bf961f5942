"""What a file of records says, read a second time and in another way: what was accepted must be just that."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from vlm_pg.data.records import WRITTEN_NAMES
from vlm_pg.types import Sample

Pairs = list[tuple[str, Any]]


class _Object(dict[str, Any]):
    """An object of JSON that remembers which names have different values."""

    def __init__(self, pairs: Pairs):
        super().__init__(pairs)
        self.twice = {name for name, value in pairs if value != self[name]}


def records_in(path: Path) -> list[Any]:
    """All records of a file that was accepted."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path.open("rb")) as file:
            table = file.read()
        assert len(set(table.column_names)) == len(table.column_names)
        return [{name: _cell(table[name][row]) for name in table.column_names} for row in range(table.num_rows)]
    text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    options: dict[str, Any] = {"object_pairs_hook": _Object, "parse_int": lambda digits: digits}
    if path.suffix == ".json":
        return json.loads(text, **options)
    return [json.loads(line, **options) for line in re.split("\r\n|\n|\r", text) if line.strip()]


def _cell(value: Any) -> Any:
    try:
        return value.as_py()
    except Exception:
        return None


def check(samples: list[Sample], path: Path) -> None:
    """Each sample is what the record of its name says, and that record can be read in one way only."""
    records = records_in(path)
    for sample in samples:
        named = [
            record
            for record in records
            if isinstance(record, dict) and str(record.get("problem_id")) == sample.sample_id
        ]
        named = named or [record for record in records if isinstance(record, dict) and sample.sample_id == "0"]  # "-0"
        assert any(_is(sample, record) for record in named), f"{sample!r:.500} is not what {named!r:.500} says"


def _is(sample: Sample, record: Any) -> bool:
    if getattr(record, "twice", None):
        return False
    options, kind, paths = record.get("options") or [], record.get("problem_type"), record.get("path") or []
    return (
        sample.question == record.get("problem")
        and (list(sample.options) == options or [option[3:] for option in sample.options] == options)
        and _spelling(WRITTEN_NAMES[sample.answer_kind]) == _spelling(kind)
        and [ref.path for ref in sample.media]
        == ([paths] if isinstance(paths, str) and paths else [one for one in paths if one])
        and _golds(sample, options, record["solution"]) == {sample.answer}
    )


def _spelling(kind: str) -> str:
    return re.sub(r"[\s_/-]+", " ", kind.strip().lower())


def _golds(sample: Sample, options: list[str], solution: str) -> set[str]:
    """Every way to read the gold answer."""
    _, *tagged = solution.split("<answer>")
    if not all("</answer>" in part for part in tagged):
        return set()
    texts = {part.split("</answer>", 1)[0].strip() for part in tagged}
    if len(texts) > 1:
        return texts
    (text,) = texts
    if sample.answer_kind != "multiple_choice":
        return {text}
    were_lettered = list(sample.options) == options
    if were_lettered and len(text) == 1 and "A" <= text <= "Z":
        return {text}
    readings = set()
    for option in sample.options:
        letter, shown = re.match(r"\s*\(?([A-Z])\s*[.):]\s*(.*)", option, re.DOTALL).groups()  # type: ignore[union-attr]
        cases = (letter, letter.lower())
        spellings = {
            f"{opens}{one}{closes}{sign}"
            for opens in ("(", "")
            for one in cases
            for closes in (")", "")
            for sign in (".", ")", ":", "")
        }
        found = re.match(r"\s*\(?([A-Z])\s*[.):]\s*(.*)", text, re.DOTALL)
        if text in spellings or text == shown.strip() or (found and found.groups() == (letter, shown.strip())):
            readings.add(letter)
    return readings
