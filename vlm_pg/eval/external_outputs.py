"""Outputs that were made elsewhere: reading them, scoring them, and giving ours to others.

Three forms are read: a JSON object from question id to a text or a list of texts; lines of JSON with "id" and "output"
or "outputs"; and the samples files of lmms-eval (``lmms_samples.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.data.json_stream import read_lines, read_members
from vlm_pg.errors import ConfigError, VlmPgError, printable
from vlm_pg.eval.aggregation import Figures, aggregate
from vlm_pg.eval.contracts import Answered, Output, Reader
from vlm_pg.eval.lmms_samples import is_lmms_sample, outputs_of_lmms_samples
from vlm_pg.eval.measures import NO_OUTPUT
from vlm_pg.types import Sample

_NAMED = 5
_FORMS = (
    'A .json file with an object {"question id": "text" or ["text", ...]}, a .jsonl file of lines {"id": ..., '
    '"output": "text"} or {"id": ..., "outputs": ["text", ...]}, or a samples file of lmms-eval is expected'
)


def read_outputs(
    path: Path, samples: Sequence[Sample], doc_key: str | None = None, has_all: bool = True
) -> dict[str, tuple[str, ...]]:
    """The outputs of a file by question id.

    Args:
        samples: the set's questions in their published order, by which lmms-eval numbers them.
        doc_key: the name in lmms-eval's "doc" that holds the question's id, where that is saved.
        has_all: whether ``samples`` has every row of the published set, so that places can be told.

    Raises:
        ConfigError: the file is missing, or is in no form that is read; with the line.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path}. {_FORMS}.")
    if path.suffix == ".json":
        return _once(path, ((line, name, value) for line, name, value in read_members(path)))
    if path.suffix != ".jsonl":
        raise ConfigError(f"{path} is no file of outputs by its name. {_FORMS}.")
    lines = list(read_lines(path))
    if lines and is_lmms_sample(lines[0][1]):
        if doc_key is None and not has_all:
            raise ConfigError(
                f"{path} names questions by their places in the set, and some records of the set cannot be used, so "
                "that places cannot be told. Name the key of doc that holds a question's id with --doc-key."
            )
        return outputs_of_lmms_samples(path, lines, samples, doc_key)
    return _once(path, (_members(path, line, value) for line, value in lines))


def score_outputs(
    samples: Sequence[Sample],
    outputs: Mapping[str, Sequence[str]],
    reader: Reader,
    aggregation: str,
    categories: Sequence[str] = (),
) -> tuple[list[Answered], Figures]:
    """Score outputs that were made elsewhere.

    Args:
        samples: the set's questions.
        outputs: by question id, as ``read_outputs`` gives them.
        aggregation: name of one in ``aggregation.AGGREGATIONS``.
        categories: details that figures are also given by.

    Returns:
        Every question, in the order of ``samples``, and the set's figures. Questions without an output have the fault
        "no_output", are in no figure, and are counted and named in the figures' notes; so are ids of outputs that no
        question has.

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
    answered = [_answered(sample, outputs.get(sample.sample_id, ()), reader) for sample in samples]
    notes = []
    if missing:
        notes.append(f"{len(missing)} of {len(samples)} questions have no output: {_list(missing)}.")
    if unknown:
        notes.append(f"{len(unknown)} of {len(outputs)} ids of outputs belong to no question: {_list(unknown)}.")
    return answered, aggregate(aggregation, answered, categories=categories).with_notes(notes)


def _answered(sample: Sample, texts: Sequence[str], reader: Reader) -> Answered:
    if not texts:
        return Answered.of(sample, (), (NO_OUTPUT, "no output was given for this question"))
    # Whether an output was cut off is not known of outputs from elsewhere.
    return Answered.of(sample, tuple(Output(text, reader(sample, text, False)) for text in texts))


def _once(path: Path, members: Iterator[tuple[int, str, Any]]) -> dict[str, tuple[str, ...]]:
    result: dict[str, tuple[str, ...]] = {}
    for line, name, value in members:
        if name in result:
            raise ConfigError(
                f"{path}:{line}: question {printable(name, 200)!r} is there twice. Give all outputs of a question as "
                "one list."
            )
        result[name] = _texts(path, line, name, value)
    return result


def _members(path: Path, line: int, value: Any) -> tuple[int, str, Any]:
    keys = [key for key in ("output", "outputs") if isinstance(value, dict) and key in value]
    name = value.get("id") if isinstance(value, dict) else None
    if len(keys) != 1 or not isinstance(name, str | int) or isinstance(name, bool):
        raise ConfigError(f"{path}:{line} does not say one question's outputs. {_FORMS}.")
    return line, str(name), value[keys[0]]


def _texts(path: Path, line: int, name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{path}:{line}: the output of question {printable(name, 200)!r} is neither a text nor a list of texts. "
            'Write "" for an output without text; leave out a question that was not asked.'
        )
    return tuple(texts)


def _list(names: Sequence[str]) -> str:
    some = [repr(printable(name, 200)) for name in names[:_NAMED]]
    return ", ".join([*some, "..."] if len(names) > _NAMED else some) or "none"
