"""Which outputs a judge is asked about, in which form, and what its reply makes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vlm_pg.answers.outputs import said_in
from vlm_pg.answers.whole import WholeReader
from vlm_pg.eval.contracts import Answered, Judged, Output
from vlm_pg.eval.judging.forms import Enquiry, Form, OutOfForm, enquiry, read_reply
from vlm_pg.types import AnswerKind, Sample, right_letters

# Texts that can mean the gold answer in words that no rule knows; the judge is also asked where rules call them wrong.
FREE_TEXTS: tuple[AnswerKind, ...] = ("exact", "free_form")
_FORMS: Mapping[AnswerKind, Form] = {
    "multiple_choice": "option",
    "multiple_select": "options",
    "yes_no": "yes_no",
    "exact": "equal",
    "free_form": "equal",
}
_OPTION_LINE = re.compile(r"^([A-Z])[.)] ", re.MULTILINE)
_KEPT_OF_REPLY = 1000


class TooLong(ValueError):
    """An output that is longer than a judge is shown."""


def enquiry_about(question: Answered, output: Output, most_characters: int) -> Enquiry | None:
    """What a judge is asked about an output; None: nothing, the rules are enough or there is nothing to read.

    Asked is about outputs that give the rules no answer and are neither empty nor cut off by the length limit, and
    about free texts (``FREE_TEXTS``) without full marks. Captions of TempCompass, which only a judge can score, are
    always asked about. Nothing is asked where the gold answer has no value, or where the set's rule leaves the output
    out.

    Raises:
        TooLong: there is something to ask, of more than ``most_characters``.
    """
    is_cut = output.finish_reason == "length"
    said = said_in(output.text, is_cut)
    text = "" if said is None else said.text.replace("\x00", "").replace("\x01", "").strip()
    if not text:
        return None
    caption = _caption_letters(question)
    if not caption and not _is_open(question, output, is_cut):
        return None
    if len(text) > most_characters:
        raise TooLong(f"the output has {len(text):,} characters, more than eval.judge.max_output_characters")
    if caption:
        parts = {"question": str(question.details["mc_question"]), "caption": text}
        return enquiry("caption", parts, caption)
    form = _FORMS.get(question.kind, "answer")
    parts = {"question": question.question}
    if question.options:
        parts["options"] = "\n".join(question.options)
    if form == "equal":
        parts["reference"] = question.gold
    letters = "".join(option[:1] for option in question.options)
    return enquiry(form, parts | {"output": text}, letters)


def decision(question: Answered, output: Output, asked: Enquiry, reply: str, whole: WholeReader) -> Judged:
    """What a judge's reply makes of an output: rules score what it found.

    Args:
        whole: scores answers that are no options, as it scores those it reads itself.
    """
    rules, kept = output.reading.score, reply[-_KEPT_OF_REPLY:]
    try:
        found = read_reply(asked, reply)
    except OutOfForm as error:
        return Judged(asked.form, False, None, rules, str(error), kept)
    if asked.form == "equal":
        right = found == "right"
        return Judged(asked.form, True, question.gold if right else output.reading.answer, float(right), "", kept)
    if asked.form == "caption":
        return Judged(asked.form, True, found, float(found == str(question.details["mc_answer"]).strip()[:1]), "", kept)
    if found is None:
        return Judged(asked.form, True, None, rules, "", kept)
    if asked.form in ("option", "options"):
        is_right = set(found.split(", ")) == right_letters(question.gold)
        return Judged(asked.form, True, found, float(is_right), "", kept)
    reading = whole.read(_sample(question), found, False)
    if reading.answer is None or reading.score is None:
        note = f"rules cannot read the judge's answer {found[:80]!r}"
        return Judged(asked.form, False, None, rules, note, kept)
    return Judged(asked.form, True, reading.answer, reading.score, "", kept)


def gold_of(question: Answered) -> str:
    """Kind and text of what decisions about a question's outputs are scored by: gold_of(...) == "numerical: 12"."""
    if _caption_letters(question):
        return f"caption: {question.details['mc_answer']}"
    return f"{question.kind}: {question.gold}"


def _is_open(question: Answered, output: Output, is_cut: bool) -> bool:
    """Whether the rules leave something to ask."""
    reading = output.reading
    if is_cut or not reading.counts or reading.score is None:
        return False
    if question.kind in FREE_TEXTS:
        return reading.answer is None or reading.score < 1.0
    if question.kind in ("multiple_choice", "multiple_select") and not question.options:
        return False
    return reading.answer is None


def _caption_letters(question: Answered) -> str:
    """The letters of the question that a caption of TempCompass is judged by; "" for all other questions."""
    if question.kind != "free_form" or not question.details.get("mc_answer"):
        return ""
    return "".join(_OPTION_LINE.findall(str(question.details.get("mc_question", ""))))


def _sample(question: Answered) -> Sample:
    return Sample(
        question.sample_id,
        question.question,
        (),
        question.options,
        question.gold,
        question.kind,
        source="",
        category=question.category,
        details=question.details,
    )
