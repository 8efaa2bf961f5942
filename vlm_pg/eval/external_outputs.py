"""Outputs of other programs: reading and scoring them, and writing ours in lmms-eval's format.

Three forms are read: a JSON object from question id to a text or a list of texts; lines of JSON with "id" and "output"
or "outputs"; and the samples files of lmms-eval (``<date>_samples_<task>.jsonl``, written with ``--log_samples``).

A line of these is one question: ``doc_id`` (its index in the set's published order, from 0), ``target`` (the gold
answer, as text), ``resps`` (for each request the list of its outputs, or its output), ``filtered_resps`` (what the task
scored), ``input``, ``doc_hash`` and the task's metrics. ``resps`` is left out where it equals ``filtered_resps``, and
``doc`` (the published row) by most versions (``loggers/evaluation_tracker.py``, ``save_results_samples``).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_pg.data.json_stream import read_lines, read_members
from vlm_pg.data.records import stream_records
from vlm_pg.errors import ConfigError, VlmPgError, printable
from vlm_pg.eval.aggregation import Figures, aggregate
from vlm_pg.eval.contracts import Answered, Output, Reader
from vlm_pg.eval.measures import NO_OUTPUT
from vlm_pg.files import json_line, write_bytes_atomic
from vlm_pg.types import Sample

_MAX_NAMES = 5
_FORMS = (
    'A .json file with an object {"question id": "text" or ["text", ...]}, a .jsonl file of lines {"id": ..., '
    '"output": "text"} or {"id": ..., "outputs": ["text", ...]}, or a samples file of lmms-eval is expected'
)
_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?")
_LETTER = re.compile(r"([A-Z])[.)] ?")
_WITH_NUMBERS = ("numerical", "regression", "mean_relative_accuracy", "time_span")
# lmms-lab/charades_sta has its times as 16-bit floats, up to 0.0125 s beside the published ones.
_TOLERANCE = 0.02
_ADVICE = 'Name the key of "doc" that holds the question\'s id, or give the outputs by id: {"id": ..., "output": ...}.'


def read_outputs(
    path: Path, samples: Sequence[Sample], doc_key: str | None = None, has_all: bool = True
) -> dict[str, tuple[str, ...]]:
    """The outputs of a file by question id.

    Args:
        samples: the set's questions in their published order, by which lmms-eval numbers them.
        doc_key: the name in lmms-eval's "doc" that holds the question's id, where that is saved.
        has_all: whether ``samples`` has every row of the published set, so that indices can be used.

    Raises:
        ConfigError: the file is missing or in no known form, or has other questions; with the line.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path}. {_FORMS}.")
    if path.suffix == ".json":
        return _by_id(path, read_members(path))
    if path.suffix != ".jsonl":
        raise ConfigError(f"{path} is no file of outputs by its name. {_FORMS}.")
    lines = list(read_lines(path))
    first = lines[0][1] if lines else None
    if isinstance(first, dict) and "doc_id" in first and ("resps" in first or "filtered_resps" in first):
        if doc_key is None and not has_all:
            raise ConfigError(
                f"{path} names questions by their indices in the set, and some records of the set cannot be used, so "
                "that indices are unknown. Name the key of doc that holds a question's id with --doc-key."
            )
        return _of_lmms_samples(path, lines, samples, doc_key)
    return _by_id(path, (_member(path, line, value) for line, value in lines))


def score_outputs(
    samples: Sequence[Sample],
    outputs: Mapping[str, Sequence[str]],
    reader: Reader,
    aggregation: str,
    categories: Sequence[str] = (),
) -> tuple[list[Answered], Figures]:
    """Score outputs of another program.

    Args:
        outputs: by question id, as of ``read_outputs``.
        aggregation, categories: see ``aggregate``.

    Returns:
        Every question, in the order of ``samples``, and the set's figures. Questions without an output have the fault
        "no_output", enter no figure, and are counted and named in the figures' notes; so are ids without a question.

    Raises:
        VlmPgError: no output belongs to a question; see also ``aggregate``.
    """
    known = {sample.sample_id for sample in samples}
    unknown = [name for name in outputs if name not in known]
    missing = [sample.sample_id for sample in samples if not outputs.get(sample.sample_id)]
    if len(missing) == len(samples):
        raise VlmPgError(
            f"None of the {len(outputs)} outputs belongs to one of the {len(samples)} questions. Outputs are for "
            f"{_list(list(outputs))}; questions are {_list([sample.sample_id for sample in samples])}. Give the "
            "outputs under the ids of the set's records."
        )
    answered = []
    for sample in samples:
        # Whether an output was truncated is unknown.
        read = tuple(Output(text, reader(sample, text, False)) for text in outputs.get(sample.sample_id, ()))
        fault = None if read else (NO_OUTPUT, "no output was given for this question")
        answered.append(Answered.of(sample, read, fault))
    notes = []
    if missing:
        notes.append(f"{len(missing)} of {len(samples)} questions have no output: {_list(missing)}.")
    if unknown:
        notes.append(f"{len(unknown)} of {len(outputs)} ids of outputs belong to no question: {_list(unknown)}.")
    figures = aggregate(aggregation, answered, categories=categories)
    return answered, replace(figures, notes=(*figures.notes, *notes))


def _by_id(path: Path, members: Iterator[tuple[int, str, Any]]) -> dict[str, tuple[str, ...]]:
    result: dict[str, tuple[str, ...]] = {}
    for line, name, value in members:
        if name in result:
            raise ConfigError(
                f"{path}:{line}: question {printable(name, 200)!r} is there twice. Give all outputs of a question as "
                "one list."
            )
        result[name] = _output_texts(path, line, name, value)
    return result


def _member(path: Path, line: int, value: Any) -> tuple[int, str, Any]:
    keys = [key for key in ("output", "outputs") if isinstance(value, dict) and key in value]
    name = value.get("id") if isinstance(value, dict) else None
    if len(keys) != 1 or not isinstance(name, str | int) or isinstance(name, bool):
        raise ConfigError(f"{path}:{line} does not say one question's outputs. {_FORMS}.")
    return line, str(name), value[keys[0]]


def _output_texts(path: Path, line: int, name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{path}:{line}: the output of question {printable(name, 200)!r} is neither a text nor a list of texts. "
            'Write "" for an output without text; leave out a question that was not asked.'
        )
    return tuple(texts)


def _list(names: Sequence[str]) -> str:
    some = [repr(printable(name, 200)) for name in names[:_MAX_NAMES]]
    return ", ".join([*some, "..."] if len(names) > _MAX_NAMES else some) or "none"


# ---- samples files of lmms-eval ----


def _of_lmms_samples(
    path: Path, lines: Sequence[tuple[int, Any]], samples: Sequence[Sample], doc_key: str | None
) -> dict[str, tuple[str, ...]]:
    """The outputs of a samples file by our question ids; ``lines``: values with their line numbers.

    An index is right only if ``samples`` has every published row, in order. So targets are compared with the gold
    answers: one that contradicts is refused, and so is a file of which at most half confirm.
    """
    by_id = {sample.sample_id: sample for sample in samples}
    result: dict[str, tuple[str, ...]] = {}
    confirmed = 0
    for number, line in lines:
        where = f"{path}:{number}"
        name = _id_by_index(where, line, samples) if doc_key is None else _id_in_doc(where, line, doc_key)
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
                f"have the same questions in the same order. {_ADVICE}"
            )
        confirmed += agrees is True
        result[name] = _outputs(where, line)
    if doc_key is None and confirmed * 2 <= len(lines):
        raise ConfigError(
            f"{path}: {confirmed} of {len(lines)} targets confirm that the file and the set have the same order, and "
            f"more than half are expected to. {_ADVICE}"
        )
    return result


def write_lmms_samples(path: Path, answered: Sequence[Answered], indices: Mapping[str, int]) -> None:
    """Write answers as lmms-eval would: a line per question with outputs, in the set's order.

    ``filtered_resps`` equals ``resps``; beside lmms-eval's keys, ``answers`` has the answers read, ``accuracy`` their
    mean score.

    Args:
        indices: ``doc_id`` of each question by its id (``record_indices``).
    """
    rows = (_row(indices[question.sample_id], question) for question in answered if question.outputs)
    write_bytes_atomic(path, b"".join(map(json_line, rows)))


def record_indices(records: Path) -> dict[str, int]:
    """The index of each usable record among all records of a set, unusable and excluded ones included, by its id."""
    first_at: dict[str, str] = {}
    found = enumerate(stream_records(records, first_at.setdefault))
    return {one.sample_id: index for index, one in found if isinstance(one, Sample)}


def _row(index: int, question: Answered) -> dict[str, Any]:
    texts = [output.text for output in question.outputs]
    doc = {
        **question.details,
        "id": question.sample_id,
        "question": question.question,
        "options": list(question.options),
        "category": question.category,
    }
    text = json.dumps(doc, indent=2, ensure_ascii=False)
    return {
        "doc_id": index,
        "doc": doc,
        "target": question.gold,
        "input": question.question,
        "resps": [texts],
        "filtered_resps": texts,
        "doc_hash": hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(),
        "answers": [output.reading.answer for output in question.outputs],
        "accuracy": question.score,
    }


def _id_by_index(where: str, line: Any, samples: Sequence[Sample]) -> str:
    index = line.get("doc_id") if isinstance(line, dict) else None
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(samples):
        raise ConfigError(
            f"{where}: doc_id {printable(repr(index), 200)} is no index in the set of {len(samples)} questions. Whole "
            "numbers from 0 are expected; give the set that the outputs were made for, with all its rows."
        )
    return samples[index].sample_id


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
    """Whether a target is the gold answer; None where the two cannot be compared."""
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
            return all(math.isclose(float(a), float(b), abs_tol=_TOLERANCE) for a, b in zip(theirs, ours, strict=True))
    return None
