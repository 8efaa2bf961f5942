"""lmms-eval's reading of choices that ranks the forms in which letters stand (``_task_utils/mcq_extract.py``)."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_pg.answers.published.rule import chosen, letters_of
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_TRIMMED = (",", ".", "!", "?", ";", ":", "'", '"')
_STEMS = (
    "answer is",
    "correct answer is",
    "best answer is",
    "correct option is",
    "best option is",
    "choice is",
    "correct choice is",
)
# After the first place of each of these every letter counts, however far behind it stands.
_PHRASES = (
    *_STEMS,
    *(f"the {stem}" for stem in _STEMS),
    *("my answer is", "my choice is", "i choose", "i select", "i pick"),
    *("옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは"),
)
_START, _END, _PHRASE = 10, 9, 7
# "(A)", "A.", "A:", "A)", "A ": form, and its rank.
_FORMS = (("({})", 6), ("{}.", 5), ("{}:", 4), ("{})", 3), ("{} ", 2))


def ranked_letter(output: str, letters: Sequence[str]) -> str:
    """The letter in the form of highest rank; of several in that form, the last in the text. "" without any.

    Ranks: at the start, at the end, after a phrase such as "answer is", "(A)", "A.", "A:", "A)", "A ", anywhere.

    ranked_letter("(A) Vitamin C.", "ABCD") == "C"
    """
    text = output.strip()
    for mark in _TRIMMED:
        text = text.strip(mark)
    body, text = text.strip(), f" {text} "
    found = [(rank, text.rfind(form.format(one)), one) for one in letters for form, rank in _FORMS]
    found = [entry for entry in found if entry[1] != -1]
    found += _after_phrases(text, letters)
    for one in letters:
        if body.startswith(one) and not body[1:2].isalpha():
            found.append((_START, 0, one))
        if body.endswith(one) and not body[-2:-1].isalpha():
            found.append((_END, len(text) - 1, one))
    if not found:
        found = [(0, text.rfind(one), one) for one in letters if one in text]
    # Of equals the first that was found wins, as in a stable sort.
    return max(found, key=lambda entry: entry[:2])[2] if found else ""


def _after_phrases(text: str, letters: Sequence[str]) -> list[tuple[int, int, str]]:
    lowered = text.lower()
    found = []
    for phrase in _PHRASES:
        start = lowered.find(phrase)
        if start != -1:
            places = [(text.find(one, start + len(phrase)), one) for one in letters]
            found += [(_PHRASE, place, one) for place, one in places if place != -1]
    return found


def ranked(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The letter by ``ranked_letter``; an output without any is wrong."""
    return chosen(sample, ranked_letter(output, letters_of(sample)))
