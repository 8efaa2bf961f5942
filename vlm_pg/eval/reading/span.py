"""Spans of time: when a whole output says that the event happens."""

from __future__ import annotations

import re

from vlm_pg.answers.clauses import affirmed
from vlm_pg.answers.time_span import check_time_span
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.number_words import digits_for_words, language_of
from vlm_pg.eval.reading.opposites import STATES, says_opposite
from vlm_pg.eval.reading.said import with_lists_on_one_line
from vlm_pg.eval.reading.spelling import plain_numbers, plain_prose, without_abbreviations
from vlm_pg.eval.reading.statements import (
    first_correction,
    is_beside_the_point,
    is_check,
    last_correction,
    statements,
    table_cells,
)
from vlm_pg.eval.reading.stems import words_in
from vlm_pg.eval.reading.subjects import about_the_asked, of_the_deed
from vlm_pg.eval.reading.thinking import Said
from vlm_pg.eval.reading.times import Span, frames_as_span, spans_in, times_in
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample

MAX_STATEMENT_CHARACTERS = 2000

_CLOCK_COMMA = re.compile(r"(?<=:[0-5][0-9]),(?=[0-9]{1,3}(?![0-9]))")
_SEGMENT = re.compile(
    r"(?:[a-z]{3,10}\s{0,3}[0-9]{0,3}\s{0,3}[:.)]\s{0,3})?[\[(<]?\s{0,2}[0-9][0-9:.]{0,12}\s?(?:s|sec|seconds|秒)?\s{0,3}(?:-|to|~|,)\s{0,3}[0-9][0-9:.]{0,12}\s?"
    r"(?:s|sec|seconds|秒)?\s{0,2}[\])>]?\s{0,3}(?:[:|-].{0,400}|[.,]?)",
    re.IGNORECASE | re.DOTALL,
)
_ORDINALS = {
    "first": 0,
    "second": 1,
    "third": 2,
    "fourth": 3,
    "fifth": 4,
    "sixth": 5,
    "seventh": 6,
    "eighth": 7,
    "last": -1,
}
_POINTER = re.compile(
    rf"\b(?:the\s{{1,3}}({'|'.join(_ORDINALS)})(?:\s{{1,3}}(?:of|one|segment|span|interval|"
    rf"part|event)\b)|(?:segment|span|interval|part)\s{{1,3}}#?([0-9]{{1,2}}))",
    re.IGNORECASE,
)
_ALSO = re.compile(
    r"\b(?:also|again|another|additionally|a\s{1,3}second\s{1,3}time|once\s{1,3}more|auch|aussi|también)\b|又|再次|还",
    re.I,
)
_HEADERS = (
    re.compile(r"\b(?:start|begin)|开始|beginn|début|inicio", re.I),
    re.compile(r"\b(?:end|stop|finish)|结束|fin\b", re.I),
)


def read_span(sample: Sample, said: Said, settings: RewardSettings | None = None) -> Reading:
    """When ``said`` says that the event of a question for a span of time happens.

    The last statement of a span counts: what the last tag or box holds, else the last sentence that has one; a
    change of mind is followed. Understood are times in seconds, minutes and seconds, clock times, frames with their
    rate, start and end in any order where they are named, a start and a length, the beginning. Several spans side by
    side, one that does not end after it starts, shares of the video and frames without a rate are none.

    Returns:
        "[start, end]" in seconds; the score is the intersection with the gold span over their union
        (``rewards/time_span``). Recall at thresholds (Charades-STA's R@1) is for aggregation.
    """
    span = _answered(said, frozenset(words_in(sample.question)))
    answer = None if span is None else f"[{_written(span[0])}, {_written(span[1])}]"
    verdict = check_time_span(answer or "", sample, settings or RewardSettings())
    return Reading(answer, verdict.value, verdict.note)


def _answered(said: Said, asked: frozenset[str]) -> Span | None:
    language = language_of(said.text)
    text = _prepared(said.text, language)
    if said.final is None:
        return _in_prose(text, said.is_cut, asked)
    finals = [_prepared(one, language) for one in (*said.beside, said.final)]
    spans = {_only(_last_spans(statements(one), one, asked)) for one in finals}
    span = spans.pop() if len(spans) == 1 else None
    if span is None and len(finals) <= 2:
        # Start and end in a box each: "\boxed{12.4} to \boxed{18.7}".
        times = times_in(finals[-1])
        around = _in_prose(text, said.is_cut, asked) if len(times) == 1 and said.final.strip() else None
        return around if around and around[1] == times[0].seconds else _corrected(said, language, asked)
    after = _prepared(said.after, language)
    place = first_correction(after)
    if place is None or (is_check(after) and not spans_in(after[place:])):
        return span
    return _corrected(said, language, asked)


def _corrected(said: Said, language: str, asked: frozenset[str]) -> Span | None:
    after = _prepared(said.after, language)
    place = first_correction(after)
    return _in_prose(after[place:], said.is_cut, asked) if place is not None and spans_in(after[place:]) else None


def _prepared(text: str, language: str) -> str:
    plain = without_abbreviations(plain_prose(_CLOCK_COMMA.sub(".", with_lists_on_one_line(text[-100_000:]))))
    return digits_for_words(plain_numbers(plain, language), language)


def _in_prose(text: str, is_cut: bool, asked: frozenset[str]) -> Span | None:
    place = last_correction(text)
    if place is not None and spans_in(text[place:]):
        text = text[place:]
    said = statements(text)
    if is_cut:
        said = said[:-1]
    return _only(_segments(said) or _last_spans(said, text, asked))


def _segments(said: list[str]) -> list[Span]:
    """Of a list of segments the one that is pointed to, all of them if none is; [] if there is no list."""
    listed = [one for one in said if _SEGMENT.fullmatch(one)]
    spans = [spans[0] for one in listed if len(spans := spans_in(one)) == 1]
    if len(set(spans)) < 2:
        return []
    behind = said[said.index(listed[-1]) + 1 :]
    if any(spans_in(one) for one in behind):
        return []
    for one in behind:
        if pointer := _POINTER.search(one):
            place = _ORDINALS[pointer[1].lower()] if pointer[1] else int(pointer[2]) - 1
            return [spans[place]] if -1 <= place < len(spans) else spans
    return spans


def _last_spans(said: list[str], text: str, asked: frozenset[str]) -> list[Span]:
    """The spans of the last statement that names any, and of the one before where it adds to that."""
    earlier: list[Span] = []
    found: list[Span] = []
    for one in reversed(said):
        if is_beside_the_point(one) and len(said) > 1:
            continue
        told = about_the_asked(
            one[:MAX_STATEMENT_CHARACTERS], asked, lambda part: len(spans_in(part)) == 1, any_verb=True
        )
        if told == one[:MAX_STATEMENT_CHARACTERS]:
            told = of_the_deed(told, asked, lambda part: len(spans_in(part)) == 1)
        if says_opposite(words_in(told), asked, STATES):
            return []  # the door is closed, where its opening is asked for
        spans = _row(one, said) if table_cells(one) else spans_in(affirmed(told))
        if not spans and told != one[:MAX_STATEMENT_CHARACTERS]:
            return []  # what is asked about is denied, and the span beside it is another thing's
        if spans and found:
            earlier = spans
            break
        if spans:
            found = spans
            if not _ALSO.search(one):
                break
    if found:
        return list(dict.fromkeys([*earlier, *found]))
    # Start and end in lines or sentences of their own.
    together = spans_in(affirmed(" , ".join(said[-6:])[:MAX_STATEMENT_CHARACTERS]))
    if together:
        return together
    frames = frames_as_span(text[-MAX_STATEMENT_CHARACTERS:])
    return [frames] if frames else []


def _row(statement: str, said: list[str]) -> list[Span]:
    """The span of a table's row by its columns' heads."""
    cells = table_cells(statement)
    heads = next((table_cells(one) for one in said if table_cells(one)), [])
    columns = [next((place for place, head in enumerate(heads) if pattern.search(head)), -1) for pattern in _HEADERS]
    if min(columns) < 0 or max(columns) >= len(cells):
        return spans_in(statement)
    times = [times_in(cells[column]) for column in columns]
    return [(times[0][0].seconds, times[1][0].seconds)] if all(len(one) == 1 for one in times) else []


def _only(spans: list[Span]) -> Span | None:
    return spans[0] if len(spans) == 1 and spans[0][1] > spans[0][0] else None


def _written(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
