"""Records in Video-R1's format to ``Sample`` and back.

    {"problem_id": 8, "problem": "What object is filmed?", "data_type": "video", "problem_type": "multiple choice",
     "options": ["A. a keyboard", "B. a piano"], "process": "", "solution": "<answer>A</answer>",
     "path": "./video_90.mov", "data_source": "real-media"}

``problem_type`` says how the answer is checked: one of the five kinds of Video-R1, or mathematics, exact, yes/no, box,
time span, mean relative accuracy. ``data_type`` is image, video or text (then ``path`` is empty); for several media
``path`` is a list, and where images and videos are mixed ``data_type`` is a list beside it. ``category`` may be added;
evaluation reports by it. Other keys are ignored.
"""

from __future__ import annotations

import json
import os
import re
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from vlm_pg.data.files import read_raw
from vlm_pg.data.unreadable import Unreadable
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.types import AnswerKind, BadSample, MediaKind, MediaRef, Sample

# Read without regard to case, and with a space, "_", "-" or "/" between words: "multiple_choice" is "multiple choice".
_WRITTEN_NAMES: dict[AnswerKind, str] = {
    "multiple_choice": "multiple choice",
    "numerical": "numerical",
    "ocr": "OCR",
    "free_form": "free-form",
    "regression": "regression",
    "mean_relative_accuracy": "mean relative accuracy",
    "mathematics": "mathematics",
    "box": "box",
    "time_span": "time span",
    "exact": "exact",
    "yes_no": "yes/no",
}
_BETWEEN_WORDS = str.maketrans("_-/", "   ")
_KINDS = {kind.translate(_BETWEEN_WORDS): kind for kind in _WRITTEN_NAMES}
MEDIA_TOKEN = re.compile(r"<\|(?:vision_start|vision_end|vision_pad|image_pad|video_pad|im_start|im_end|endoftext)\|>")
_OPENS, _CLOSES = "<answer>", "</answer>"
_OPTION = re.compile(r"\s*\(?([A-Z])\s*[.):]\s*(.*)", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
ID_LIMIT = 200
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:)]?")


def read_records(path: Path) -> tuple[list[Sample], list[BadSample]]:
    """All usable samples of a file in its order, and the records that are not.

    Raises:
        ConfigError: the file is missing, does not parse (with the line), or has no records.
    """
    samples: list[Sample] = []
    bad: list[BadSample] = []
    first_at: dict[str, str] = {}
    for line, record in read_raw(path):
        where = f"{path.name}:{line}"
        try:
            sample = parse_record(record)
            if sample.sample_id in first_at:
                raise SampleError(
                    "duplicate_id",
                    f"problem_id '{sample.sample_id}' was used before, at {first_at[sample.sample_id]}. Each record "
                    "needs its own. Renumber one of them.",
                )
        except SampleError as error:
            bad.append(BadSample(_id_of(record, where), error.reason, str(error), where))
            continue
        first_at[sample.sample_id] = where
        samples.append(sample)
    if not samples and not bad:
        raise ConfigError(
            f"Data file '{path}' has no records. At least one is expected. Check how the file was prepared."
        )
    return samples, bad


def write_records(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines that ``read_records`` reads back equal. The file appears whole or not at all.

    Names of media that are not UTF-8 are written with JSON's escapes.
    """
    if path.suffix.lower() != ".jsonl":
        raise ConfigError(f"Records are written to .jsonl files; got '{path}'. Choose a name that ends in .jsonl.")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for sample in samples:
                file.write(json.dumps(to_record(sample), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def parse_record(record: Any) -> Sample:
    """One record to a sample.

    Raises:
        SampleError: with the reason why it cannot be used.
    """
    if not isinstance(record, Mapping):
        raise _bad("not_a_record", f"the record is a {type(record).__name__}", "An object with named fields", "it")
    sample_id = _sample_id(record)
    question = _field(record, "problem", str)
    if not question.strip():
        raise _bad("empty_question", "'problem' is empty", "The text of a question", "it")
    options = _options(record)
    _check_unicode(sample_id, question, options)
    token = MEDIA_TOKEN.search("\n".join((question, *options)))
    if token:
        raise _bad(
            "media_token_in_text",
            f"the text contains '{token[0]}'",
            "Control tokens may come from the prompt builder only; text without them",
            "the text",
        )
    answer_kind = _answer_kind(record)
    answer = _answer(record, answer_kind, options)
    if answer_kind == "multiple_choice":
        _check_gold(options, answer)
    source = _field(record, "data_source", str, default="unknown") or "unknown"
    sample = Sample(
        sample_id=sample_id,
        question=question,
        media=_media(record),
        options=options,
        answer=answer,
        answer_kind=answer_kind,
        source=source,
        category=_field(record, "category", str, default=source) or source,
    )
    for name, text in (("solution", sample.answer), ("data_source", source), ("category", sample.category)):
        _check_text(name, text)
    return sample


def to_record(sample: Sample) -> dict[str, Any]:
    """The record of a sample, the inverse of ``parse_record``."""
    kinds = [ref.kind for ref in sample.media]
    paths = [ref.path for ref in sample.media]
    record = {
        "problem_id": sample.sample_id,
        "problem": sample.question,
        "data_type": "text" if not kinds else kinds[0] if len(set(kinds)) == 1 else kinds,
        "problem_type": _WRITTEN_NAMES[sample.answer_kind],
        "options": list(sample.options),
        "process": "",
        "solution": f"<answer>{sample.answer}</answer>",
        "path": "" if not paths else paths[0] if len(paths) == 1 else paths,
        "data_source": sample.source,
    }
    if sample.category != sample.source:
        record["category"] = sample.category
    return record


def _bad(reason: str, came: str, allowed: str, correct: str) -> SampleError:
    return SampleError(reason, f"{came}. {allowed} is expected. Correct {correct}, or remove the record.")


def _check_unicode(sample_id: str, question: str, options: tuple[str, ...]) -> None:
    _check_text("problem_id", sample_id)
    _check_text("problem", question)
    for option in options:
        _check_text("options", option)


def _check_text(name: str, text: str) -> None:
    """Refuse halves of characters: no tokenizer takes them, and which character it was cannot be known."""
    found = _SURROGATE.search(text)
    if found:
        raise _bad(
            "not_unicode",
            f"'{name}' holds half of a character (\\u{ord(found[0]):04x}, at {found.start()}), as text that was cut "
            "inside an emoji does",
            "Whole Unicode characters",
            "it",
        )


def _check_gold(options: tuple[str, ...], gold: str) -> None:
    """Options need a text each, and the right one a text of its own: the answer may be given as text."""
    texts = {found[1]: " ".join(found[2].split()) for option in options if (found := _OPTION.match(option))}
    if not all(texts.values()):
        raise _bad("bad_options", "'options' holds an option without text", "A text for each", "them")
    if list(texts.values()).count(texts[gold]) > 1:
        raise _bad(
            "bad_options",
            f"'options' holds the right one, '{texts[gold][:80]}', more than once",
            "A text that no other option has",
            "them",
        )


_REQUIRED: Any = object()


def _field(record: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """A field of the given type; absent and null count the same."""
    value = record.get(name)
    if isinstance(value, Unreadable):
        raise _bad("unreadable_value", f"'{name}' is {value.what}", f"A {kind.__name__} that can be read", "it")
    if value is None:
        if default is _REQUIRED:
            raise _bad("missing_field", f"'{name}' is missing", f"A {kind.__name__} under that name", "the record")
        return default
    if not isinstance(value, kind):
        raise _bad("wrong_type", f"'{name}' is a {type(value).__name__}", f"A {kind.__name__}", "it")
    return value


def _sample_id(record: Mapping[str, Any]) -> str:
    value = record.get("problem_id")
    if isinstance(value, Unreadable):
        raise _bad("unreadable_value", f"'problem_id' is {value.what}", "A whole number or a string", "it")
    if isinstance(value, bool) or not isinstance(value, int | str | None):
        raise _bad("wrong_type", f"'problem_id' is a {type(value).__name__}", "A whole number or a string", "it")
    if value is None or not str(value).strip():
        raise _bad("missing_field", "'problem_id' is missing", "A number or name of its own", "the record")
    return str(value)


def _id_of(record: Any, where: str) -> str:
    """What to call a bad record: its id, or its place when it has none."""
    value = record.get("problem_id") if isinstance(record, Mapping) else None
    return printable(str(value), ID_LIMIT) if isinstance(value, int | str) and str(value).strip() else where


def _answer_kind(record: Mapping[str, Any]) -> AnswerKind:
    written = _field(record, "problem_type", str)
    kind = _KINDS.get(" ".join(written.lower().translate(_BETWEEN_WORDS).split()))
    if kind is None:
        names = ", ".join(_WRITTEN_NAMES.values())
        raise _bad("unknown_answer_kind", f"'problem_type' is '{written}'", f"One of {names}", "it")
    return kind


def _options(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The options with their letters; options written without any letters get theirs, in order."""
    options = _field(record, "options", list, default=[])
    if not all(isinstance(option, str) for option in options):
        raise _bad("wrong_type", "'options' holds something that is not a string", "A list of strings", "it")
    letters = [match[1] if (match := _OPTION.match(option)) else None for option in options]
    if not any(letters) and len(options) <= len(string.ascii_uppercase):
        return tuple(f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, options, strict=False))
    if None in letters or len(set(letters)) != len(letters):
        raise _bad(
            "bad_options",
            f"'options' carry the letters {letters}",
            "A different letter for each of at most 26 options, as in 'A. red', or none at all",
            "them",
        )
    return tuple(options)


def _answer(record: Mapping[str, Any], kind: AnswerKind, options: tuple[str, ...]) -> str:
    """The gold answer without tags; for multiple choice the letter."""
    solution = _field(record, "solution", str)
    start = solution.find(_OPENS) + len(_OPENS)
    end = solution.find(_CLOSES, start)
    if start < len(_OPENS) or end < 0:
        raise _bad("no_answer_tag", f"'solution' is '{solution[:80]}'", "Text with '<answer>...</answer>'", "it")
    answer = solution[start:end].strip()
    if not answer:
        raise _bad("empty_answer", "the answer in 'solution' is empty", "The right answer", "it")
    if kind != "multiple_choice":
        return answer
    if len(options) < 2:
        raise _bad("too_few_options", f"a multiple choice question has {len(options)} option(s)", "Two or more", "it")
    texts = {found[1]: found[2].strip() for option in options if (found := _OPTION.match(option))}
    letter = _LETTER.fullmatch(answer)
    if letter and letter[1].upper() in texts:
        return letter[1].upper()
    spelled = _OPTION.match(answer)
    for option, text in texts.items():
        if answer == text or (spelled and spelled[1] == option and spelled[2].strip() == text):
            return option
    raise _bad(
        "answer_not_in_options", f"the answer is '{answer[:80]}'", f"One of the letters {', '.join(texts)}", "it"
    )


def _media(record: Mapping[str, Any]) -> tuple[MediaRef, ...]:
    """The media in order; ``data_type`` holds for all of them or is a list with one entry for each."""
    path = record.get("path")
    paths = [path] if isinstance(path, str) else [] if path is None else path
    if not isinstance(paths, list) or not all(isinstance(item, str) for item in paths):
        raise _bad("wrong_type", f"'path' is a {type(path).__name__}", "A string or a list of strings", "it")
    written = record.get("data_type")
    if written is None:
        raise _bad("missing_field", "'data_type' is missing", "image, video or text", "the record")
    if written == "text":
        if any(paths):
            raise _bad("media_in_text_record", f"'data_type' is text but 'path' is {paths}", "An empty path", "either")
        return ()
    kinds = written if isinstance(written, list) else [written] * len(paths)
    allowed = get_args(MediaKind)
    if not all(isinstance(kind, str) and kind in allowed for kind in (kinds if kinds is written else [written])):
        expected = "image, video, text, or a list of the first two"
        raise _bad("unknown_data_type", f"'data_type' is {written!r}", expected, "it")
    if not paths or not all(paths):
        raise _bad("missing_field", "'path' is missing or empty", f"The path of the {written}", "the record")
    if len(kinds) != len(paths):
        raise _bad("wrong_type", f"'data_type' lists {len(kinds)} kinds for {len(paths)} paths", "One for each", "it")
    return tuple(MediaRef(kind, item) for kind, item in zip(kinds, paths, strict=True))
