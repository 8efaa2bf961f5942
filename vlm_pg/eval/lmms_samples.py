"""The samples files of lmms-eval (``<date>_samples_<task>.jsonl``, written with ``--log_samples``), read and written.

A line is one question: ``doc_id`` (its place in the set's published order, from 0), ``target`` (the gold answer, as
text), ``resps`` (for each request the list of its outputs, or its output), ``filtered_resps`` (what the task scored),
``input``, ``doc_hash`` and the task's metrics. ``resps`` is left out where it says what ``filtered_resps`` says, and
``doc`` (the published row) by most versions (``loggers/evaluation_tracker.py``, ``save_results_samples``).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.data.records import stream_records
from vlm_pg.errors import ConfigError, printable
from vlm_pg.eval.contracts import Answered
from vlm_pg.files import json_line, write_bytes_atomic
from vlm_pg.types import Sample

_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?")
_LETTER = re.compile(r"([A-Z])[.)] ?")
_WITH_NUMBERS = ("numerical", "regression", "mean_relative_accuracy", "time_span")
# lmms-lab/charades_sta has its times as 16-bit floats, up to 0.0125 s beside the published ones.
_SLACK = 0.02
_INSTEAD = 'Name the key of "doc" that holds the question\'s id, or give the outputs by id: {"id": ..., "output": ...}.'


def is_lmms_sample(line: Any) -> bool:
    """Whether the value of a line is one of such a file."""
    return isinstance(line, dict) and "doc_id" in line and ("resps" in line or "filtered_resps" in line)


def outputs_of_lmms_samples(
    path: Path, lines: Sequence[tuple[int, Any]], samples: Sequence[Sample], doc_key: str | None = None
) -> dict[str, tuple[str, ...]]:
    """The outputs of such a file by our question ids.

    A place in the published order is right only if ``samples`` has every published row, in order. So the targets are
    held against the gold answers: one that contradicts is refused, and so is a file of which not most confirm.

    Args:
        lines: values with their line numbers.
        samples: the questions in their published order.
        doc_key: the name in ``doc`` that holds a question's id, where it is saved; places are not needed then.

    Raises:
        ConfigError: a line is none of such a file, or the questions are not the file's.
    """
    by_id = {sample.sample_id: sample for sample in samples}
    result: dict[str, tuple[str, ...]] = {}
    confirmed = 0
    for number, line in lines:
        where = f"{path}:{number}"
        name = _place(where, line, samples) if doc_key is None else _id_in_doc(where, line, doc_key)
        if name in result:
            raise ConfigError(
                f"{where}: question {printable(name, 200)!r} is there twice. A task with several filters writes a line "
                "for each; keep the lines of one."
            )
        agrees = _agrees(line.get("target"), by_id[name]) if name in by_id else None
        if agrees is False:
            raise ConfigError(
                f"{where}: target {printable(str(line['target']), 200)!r} is not the gold answer of question "
                f"{printable(name, 200)!r} ({printable(by_id[name].answer, 200)!r}), so the file and the set do not "
                f"have the same questions in the same order. {_INSTEAD}"
            )
        confirmed += agrees is True
        result[name] = _outputs(where, line)
    if doc_key is None and confirmed * 2 <= len(lines):
        raise ConfigError(
            f"{path}: {confirmed} of {len(lines)} targets confirm that the file and the set have the same order, and "
            f"more than half are expected to. {_INSTEAD}"
        )
    return result


def write_lmms_samples(path: Path, answered: Sequence[Answered], places: Mapping[str, int]) -> None:
    """Write the answers to a set as lmms-eval would: a line a question that was asked, all outputs in ``resps``.

    ``filtered_resps`` are the outputs as they are; beside lmms-eval's keys, ``answers`` has what was read of them,
    ``accuracy`` the mean of their scores.

    Args:
        answered: the questions that were asked, in the set's order.
        places: ``doc_id`` of each of them by its id (``record_places``).
    """
    rows = (_row(places[question.sample_id], question) for question in answered if question.outputs)
    write_bytes_atomic(path, b"".join(map(json_line, rows)))


def record_places(records: Path) -> dict[str, int]:
    """The place of each usable record among all records of a set, from 0, by its id.

    Those that a protocol does not ask and those that cannot be used have a place, too, as in lmms-eval's count.
    """
    first_at: dict[str, str] = {}
    found = enumerate(stream_records(records, first_at.setdefault))
    return {one.sample_id: place for place, one in found if isinstance(one, Sample)}


def _row(place: int, question: Answered) -> dict[str, Any]:
    texts = [output.text for output in question.outputs]
    doc = {
        **question.details,
        "id": question.sample_id,
        "question": question.question,
        "options": list(question.options),
        "category": question.category,
    }
    return {
        "doc_id": place,
        "doc": doc,
        "target": question.gold,
        "input": question.question,
        "resps": [texts],
        "filtered_resps": texts,
        "doc_hash": hashlib.sha256(
            json.dumps(doc, indent=2, ensure_ascii=False).encode("utf-8", "replace")
        ).hexdigest(),
        "answers": [output.reading.answer for output in question.outputs],
        "accuracy": question.score,
    }


def _place(where: str, line: Any, samples: Sequence[Sample]) -> str:
    place = line.get("doc_id") if isinstance(line, dict) else None
    if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < len(samples):
        raise ConfigError(
            f"{where}: doc_id {printable(repr(place), 200)} is no place in the set of {len(samples)} questions. Whole "
            "numbers from 0 are expected; give the set that the outputs were made for, with all its rows."
        )
    return samples[place].sample_id


def _id_in_doc(where: str, line: Any, key: str) -> str:
    doc = line.get("doc") if isinstance(line, dict) else None
    value = doc.get(key) if isinstance(doc, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        there = ", ".join(map(str, doc)) if isinstance(doc, dict) else "no doc is saved"
        raise ConfigError(
            f"{where}: its doc has no id under {key!r} ({printable(there, 500)}). Name a key that holds the question's "
            "id in every line."
        )
    return str(value)


def _outputs(where: str, line: Any) -> tuple[str, ...]:
    texts = list(_texts(line.get("resps", line.get("filtered_resps"))))
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where}: resps and filtered_resps hold no texts. Lists of generated texts are expected.")
    return tuple(texts)


def _texts(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    else:
        yield value


def _agrees(target: Any, sample: Sample) -> bool | None:
    """Whether a target is the gold answer; None where the two are not to be compared."""
    if not isinstance(target, str | int | float):
        return None
    text, gold = str(target).strip(), sample.answer.strip()
    if text.casefold() == gold.casefold():
        return True
    if sample.answer_kind == "yes_no":
        return False if text.casefold() in ("yes", "no") else None
    if sample.answer_kind == "multiple_choice":
        texts = {option[:1]: _LETTER.sub("", option, count=1).strip() for option in sample.options}
        if texts.get(gold) == text:
            return True
        return False if text in texts or text in texts.values() else None
    if sample.answer_kind in _WITH_NUMBERS:
        theirs, ours = _NUMBER.findall(text), _NUMBER.findall(gold)
        if theirs and len(theirs) == len(ours):
            return all(math.isclose(float(a), float(b), abs_tol=_SLACK) for a, b in zip(theirs, ours, strict=True))
    return None
