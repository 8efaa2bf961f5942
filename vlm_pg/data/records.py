"""Records in Video-R1's format to ``Sample`` and back.

    {"problem_id": 8, "problem": "What object is filmed?", "data_type": "video", "problem_type": "multiple choice",
     "options": ["A. a keyboard", "B. a piano"], "process": "", "solution": "<answer>A</answer>",
     "path": "./video_90.mov", "data_source": "real-media"}

``problem_type`` says how the answer is checked: one of the five kinds of Video-R1, or multiple select (all right
options and no other: "<answer>A, C</answer>" or "<answer>none</answer>"), mathematics, exact, yes/no, box, time span,
mean relative accuracy. ``process`` is the reasoning that leads to the answer, for supervised training. ``data_type`` is
image, video or text (then ``path`` is empty); for several media ``path`` is a list, and where images and videos are
mixed ``data_type`` is a list beside it. Media come before the question, or where "<image>" and "<video>" stand in
``problem`` and ``options``: the n-th "<image>" is the n-th image, and there is one for each or none.

May be added: ``category``, which evaluation reports by; ``details``, an object of what an evaluation set publishes of
a question beside that (in Parquet its JSON as a text); of a video ``start`` and ``end`` of the clip that is meant,
``times`` of the frames to show, in seconds since its first frame, and ``subtitles``, the path of its .srt or .vtt file;
``folder_fps`` where ``path`` is a folder of numbered pictures, of which so many are shown a second. Where ``path`` is a
list each of these is a list with one entry (or null) for each medium. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlm_pg.data.details import details_of
from vlm_pg.data.embedded import embedded_in
from vlm_pg.data.fields import check_text, fault, field, id_of
from vlm_pg.data.files import read_raw
from vlm_pg.data.gold import WRITTEN_NAMES, answer_kind_of, answer_of, answers_in, check_gold
from vlm_pg.data.option_letters import options_of
from vlm_pg.data.references import check_marks, media_of, parts_of
from vlm_pg.data.unreadable import Unreadable
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.files import replacing
from vlm_pg.types import CONTROL_TOKEN, BadSample, Sample

ID_LIMIT = 200


def read_records(
    path: Path, unpack: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
) -> tuple[list[Sample], list[BadSample]]:
    """All usable samples of a file or folder in its order, and the records that are not.

    Args:
        path: as ``read_raw`` takes it.
        unpack: puts paths in the place of media that stand in a row (``Embedded``). None: such records are refused.

    Raises:
        ConfigError: the file is missing, does not parse (with the line), has no records, or holds media nobody unpacks.
    """
    first_at: dict[str, str] = {}
    samples: list[Sample] = []
    bad: list[BadSample] = []
    for one in stream_records(path, first_at.setdefault, unpack):
        if isinstance(one, Sample):
            samples.append(one)
        else:
            bad.append(one)
    return samples, bad


def stream_records(
    path: Path,
    first_at: Callable[[str, str], str],
    unpack: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Iterator[Sample | BadSample]:
    """As ``read_records``, one record after the other.

    Args:
        path, unpack: as of ``read_records``.
        first_at: ``(sample id, place)`` to the place that the id was first used at, which it remembers.
    """
    found = False
    for place, record in read_raw(path):
        found = True
        where = place.within(path)
        if unpack is None:
            _refuse_embedded(path, record)
        try:
            sample = parse_record(record if unpack is None else with_paths(record, unpack), where)
            earlier = first_at(sample.sample_id, where)
            if earlier != where:
                raise SampleError(
                    "duplicate_id",
                    f"problem_id '{sample.sample_id}' was used before, at {earlier}. Each record needs its own. "
                    "Renumber one of them.",
                )
            yield sample
        except SampleError as error:
            yield BadSample(_name_of(record, where), error.reason, str(error), where)
    if not found:
        raise _no_records(path)


def refuse_no_records(path: Path) -> None:
    """Refuse a file or folder that ``read_raw`` refuses at its beginning, or that has no record.

    Raises:
        ConfigError: as ``read_records``.
    """
    if next(iter(read_raw(path)), None) is None:
        raise _no_records(path)


def _no_records(path: Path) -> ConfigError:
    return ConfigError(
        f"Data file '{printable(str(path), 300)}' has no records. At least one is expected. Check how the file was "
        "prepared."
    )


def with_paths(record: Any, unpack: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """The record with paths in the place of media in its 'path'; those in other columns are nobody's concern."""
    return {**record, **unpack({"path": record["path"]})} if "path" in embedded_in(record) else record


def _refuse_embedded(path: Path, record: Any) -> None:
    """A record whose media are there under a path may hold further ones, which nobody reads."""
    inside = embedded_in(record)
    if not inside or record.get("data_type") == "text":
        return
    paths = record.get("path")
    if paths and all(isinstance(one, str) for one in (paths if isinstance(paths, list) else [paths])):
        return
    raise ConfigError(
        f"Data set '{printable(str(path), 300)}' holds media inside its rows ({printable(', '.join(inside), 200)}). "
        "Training reads media from files, and records name them in 'path'. Prepare it first: 'vlm-pg prepare' lists "
        "the data sets it knows, and 'vlm-pg prepare video_r1 --train' takes records in Video-R1's format."
    )


def write_records(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines that ``read_records`` reads back equal. The file appears whole or not at all.

    Names of media that are not UTF-8 are written with JSON's escapes.
    """
    if path.suffix.lower() != ".jsonl":
        raise ConfigError(f"Records are written to .jsonl files; got '{path}'. Choose a name that ends in .jsonl.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for sample in samples:
            file.write(line_of_record(sample))


def line_of_record(sample: Sample) -> bytes:
    """A sample as a line of JSON."""
    return (json.dumps(to_record(sample), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def parse_record(record: Any, where: str = "") -> Sample:
    """One record to a sample that says where it was read.

    Raises:
        SampleError: with the reason why it cannot be used.
    """
    if isinstance(record, Unreadable):
        raise fault("unreadable_value", f"the record is {record.what}", "An object with one value for each name", "it")
    if not isinstance(record, Mapping):
        raise fault("not_a_record", f"the record is a {type(record).__name__}", "An object with named fields", "it")
    sample_id = id_of(record)
    question = field(record, "problem", str)
    if not question.strip():
        raise fault("empty_question", "'problem' is empty", "The text of a question", "it")
    solution = record.get("solution")
    options = options_of(record, next(iter(answers_in(solution)), "") if isinstance(solution, str) else "")
    _check_unicode(sample_id, question, options)
    token = CONTROL_TOKEN.search("\n".join((question, *options)))
    if token:
        raise fault(
            "media_token_in_text",
            f"the text contains '{token[0]}'",
            "Control tokens may come from the prompt builder only; text without them",
            "the text",
        )
    answer_kind = answer_kind_of(record)
    answer = answer_of(record, answer_kind, options)
    if answer_kind in ("multiple_choice", "multiple_select"):
        check_gold(options, answer)
    source = field(record, "data_source", str, default="unknown") or "unknown"
    sample = Sample(
        sample_id=sample_id,
        question=question,
        media=media_of(record),
        options=options,
        answer=answer,
        answer_kind=answer_kind,
        source=source,
        category=field(record, "category", str, default=source) or source,
        process=field(record, "process", str, default=""),
        details=details_of(record),
        where=where,
    )
    texts = {"solution": sample.answer, "data_source": source, "category": sample.category, "process": sample.process}
    for name, text in texts.items():
        check_text(name, text)
    check_marks(sample)
    return sample


def to_record(sample: Sample) -> dict[str, Any]:
    """The record of a sample, the inverse of ``parse_record``."""
    kinds = [ref.kind for ref in sample.media]
    paths = [ref.path for ref in sample.media]
    record: dict[str, Any] = {
        "problem_id": sample.sample_id,
        "problem": sample.question,
        "data_type": "text" if not kinds else kinds[0] if len(set(kinds)) == 1 else kinds,
        "problem_type": WRITTEN_NAMES[sample.answer_kind],
        "options": list(sample.options),
        "process": sample.process,
        "solution": f"<answer>{sample.answer}</answer>",
        "path": "" if not paths else paths[0] if len(paths) == 1 else paths,
        "data_source": sample.source,
    }
    if sample.category != sample.source:
        record["category"] = sample.category
    if sample.details:
        record["details"] = dict(sample.details)
    return record | parts_of(sample.media)


def _check_unicode(sample_id: str, question: str, options: tuple[str, ...]) -> None:
    check_text("problem_id", sample_id)
    check_text("problem", question)
    for option in options:
        check_text("options", option)


def _name_of(record: Any, where: str) -> str:
    """What to call a bad record: its id, or its place when it has none."""
    value = record.get("problem_id") if isinstance(record, Mapping) else None
    return printable(str(value), ID_LIMIT) if isinstance(value, int | str) and str(value).strip() else where
