"""Questions, options and gold answers of rows, as records have them."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from data_pipelines.engine.fields import plain_number, unusable
from vlm_pg.answers.options import same_text
from vlm_pg.data.fields import answers_in, close_gap, have_letters, is_gap, unglued
from vlm_pg.data.tables import Label
from vlm_pg.types import MEDIA_MARKS

# "A. red", "A) red", "(A) red", "A: red"; not "D.C. is shown", unless the lines below show that it is an option.
_OPTION = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])(?:[.)]|:(?=\s)))(?![A-Za-z][.)])\s*(.*?)\s*")
_HEADING = re.compile(r"\s*(?:options|choices)\s*:?\s*", re.IGNORECASE)
_GOLD = re.compile(r"\(?([A-J])(?:[.):](?![A-Za-z][.)])|$)+\s*(.*)", re.DOTALL)
_MARKS = tuple(MEDIA_MARKS.values())
_OPENS, _CLOSES = "<answer>", "</answer>"
_TAG = re.compile(r"</?answer>")
_COUNT = re.compile(r"0|[1-9][0-9]{0,8}")
# Numbers are compared after rounding to two decimals: those with more, and fractions, as mathematics is.
_NUMBER = re.compile(r"-?(?:[0-9]{1,9}|[0-9]{1,3}(?:,[0-9]{3}){1,3})(?:\.[0-9]{1,2})?")
_MATHEMATICS = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{3,9}|/[0-9]{1,9})")


def lettered(texts: Sequence[str]) -> list[str]:
    """Options with their letters: lettered(["red", "blue"]) == ["A. red", "B. blue"].

    Raises SampleError: ``bad_options``: more than there are letters.
    """
    return [f"{letter}. {text}" for letter, text in zip(_letters(len(texts)), texts, strict=True)]


def split_options(text: str, gap: bool = False) -> tuple[str, list[str]]:
    r"""The question, and the options in the lines below it, in order; none where no line begins as an option.

    split_options("Which?\nOptions:\nA. red\n(B) blue") == ("Which?", ["A. red", "B. blue"])

    Args:
        gap: accept options with a few letters lost, for callers that resolve the answer then (``close_gap``).

    Raises SampleError: ``bad_options``: the lines are not the letters from A on, each once, other text follows, or a
    heading stands elsewhere than above them.
    """
    lines = text.strip().splitlines()
    found = [_OPTION.fullmatch(line) for line in lines]
    first = next((index for index, option in enumerate(found) if option), len(lines))
    options = [(option[1] or option[2], option[3]) for option in found[first:] if option]
    whole = len(options) == sum(1 for line in lines[first:] if line.strip())
    if options and (options[0][0] != "A" or not whole):
        # some may run together with their letters: "A.U.S. Army"; line 0 is the question's
        for index in range(first, 0, -1):
            if lines[index].strip() and (glued := unglued([line for line in lines[index:] if line.strip()])):
                first, options, whole = index, glued, True
                break
    question = "\n".join(lines[:first]).rstrip().splitlines()
    if options and question and _HEADING.fullmatch(question[-1]):
        question.pop()
    if any(_HEADING.fullmatch(line) for line in question):
        raise unusable("bad_options", "no options stand below their heading", "'Options:', then a line for each,")
    written = [f"{letter}. {option}" for letter, option in options]
    if not whole or not (gap and is_gap([letter for letter, _ in options])):
        check_letters(written, whole)
    return "\n".join(question).strip(), written


def check_letters(options: Sequence[str], whole: bool = True) -> None:
    """Refuse options, as ``split_options`` returns them, of which some are lost.

    Raises SampleError: ``bad_options``.
    """
    letters = [option[0] for option in options]
    if not whole or len(options) == 1 or sorted(letters) != list(string.ascii_uppercase[: len(options)]):
        came = f"the lines of options begin with {', '.join(letters)}{'' if whole else ', and with no letter'}"
        raise unusable("bad_options", came, "Two or more as the last lines, each letter from A on once,")


def letter_at(index: Any, count: int) -> str:
    """The letter of an option by its index from 0: a number, text, or a class label.

    Raises SampleError: ``answer_not_in_options`` or ``bad_options``.
    """
    written = plain_number(index.number if isinstance(index, Label) else index).strip()
    if written not in map(str, range(count)):
        raise unusable(
            "answer_not_in_options", f"the answer is '{written[:80]}'", f"The number of an option, 0 to {count - 1},"
        )
    return _letters(count)[int(written)]


def letter_of_text(text: str, texts: Sequence[str]) -> str:
    """The letter of the one option with this text, spaces aside.

    Raises SampleError: ``answer_not_in_options``, ``ambiguous_answer`` where several match, or ``bad_options``.
    """
    same = [index for index, option in enumerate(texts) if " ".join(option.split()) == " ".join(text.split())]
    if len(same) > 1:
        raise unusable("ambiguous_answer", f"{len(same)} options read '{text[:80]}'", "One right option")
    if not same:
        raise unusable("answer_not_in_options", f"the answer is '{text[:80]}'", f"One of {list(texts)}")
    return _letters(len(texts))[same[0]]


def letter_of(gold: str, options: Sequence[str]) -> str:
    """The letter of the option that a gold answer without tags names by letter ("A", "A.", "(A)"), text, or both.

    Raises SampleError: ``answer_not_in_options``, or ``ambiguous_answer``: letter and text, or several texts, disagree.
    """
    texts = dict(option.split(". ", 1) for option in options)
    found = {letter for letter, text in texts.items() if same_text(gold, text) or same_text(gold, f"{letter}.{text}")}
    letter, text = letter_and_text(gold)
    if letter in texts:
        found |= {letter} if not text or same_text(text, texts[letter]) else set()
        if text and not found:
            raise unusable("ambiguous_answer", f"the answer is '{gold[:80]}'", "A letter with the text of its option")
    if len(found) > 1:
        raise unusable("ambiguous_answer", f"'{gold[:80]}' may be each of {', '.join(sorted(found))}", "One option")
    if not found:
        raise unusable("answer_not_in_options", f"the answer is '{gold[:80]}'", f"One of {list(options)}")
    return found.pop()


def letter_and_text(gold: str) -> tuple[str, str]:
    """Letter and text of an answer that begins with a letter, ("", "") of others: "A. Black." -> ("A", "Black.")."""
    labelled = _GOLD.fullmatch(gold.strip())
    return (labelled[1], labelled[2].strip()) if labelled else ("", "")


def _letters(count: int) -> str:
    if count > len(string.ascii_uppercase):
        raise unusable("bad_options", f"the question has {count} options", "26 at most, one for each letter,")
    return string.ascii_uppercase[:count]


def without_sentences(text: str, sentences: Sequence[str]) -> str:
    """The stripped text without these sentences at its start and end, in any order.

    without_sentences("<image>\\nHow many?\\nAnswer briefly.", ["<image>", "Answer briefly."]) == "How many?"
    """
    text, before = text.strip(), None
    while text != before:
        before = text
        for sentence in sentences:
            text = text.removeprefix(sentence).removesuffix(sentence).strip()
    return text


def check_removed_marks(text: str, stripped: str, media: int) -> None:
    """Refuse a question from which media marks are removed, unless there is one for each medium, of whatever kind:
    video sets are published with "<image>".

    Args:
        text, stripped: the question as published, and without marks.
        media: how many images and videos the record names.

    Raises SampleError: ``media_mark_without_medium``.
    """
    removed = sum(text.count(mark) - stripped.count(mark) for mark in _MARKS)
    if removed and removed != media:
        came = (
            f"{removed} mark(s) ({' or '.join(_MARKS)}) are removed from the question, and the row names {media} media"
        )
        allowed = "One mark for each medium before or after the question, or marks that are not removed,"
        raise unusable("media_mark_without_medium", came, allowed)


def without_mark(text: str) -> str:
    """The text without the mark, "<image>" or "<video>", at its start or end.

    Raises SampleError: ``media_token_in_text``: there is another one.
    """
    text = text.strip()
    if mark := next((mark for mark in _MARKS if text.startswith(mark) or text.endswith(mark)), ""):
        text = text.removeprefix(mark) if text.startswith(mark) else text.removesuffix(mark)
    if left := next((mark for mark in _MARKS if mark in text), ""):
        came = f"the question holds '{left}' amid its text, or again"
        raise unusable("media_token_in_text", came, "One such mark, before or after the question,")
    return text.strip()


def untagged(solution: str) -> str:
    """The text between answer tags: untagged("So <answer>B</answer>") == "B".

    Raises SampleError: ``no_answer_tag``: there are none, or not in pairs; ``ambiguous_answer``: they disagree.
    """
    found = answers_in(solution)
    if not found or {solution.count(_OPENS), solution.count(_CLOSES)} != {len(found)}:
        raise unusable("no_answer_tag", f"the answer is '{solution[:80]}'", f"One answer as {_OPENS}it{_CLOSES}")
    if len(set(found)) > 1:
        raise unusable("ambiguous_answer", f"the answers are {found[:4]}", "One right answer")
    return found[0]


def untagged_once(text: str) -> str:
    """A gold answer without the optional tags around it: untagged_once("<answer>B</answer>") == "B".

    Raises SampleError: ``no_answer_tag``: there are other tags, or text beside them.
    """
    inner = text.strip()
    if inner.startswith(_OPENS) and inner.endswith(_CLOSES):
        inner = inner[len(_OPENS) : -len(_CLOSES)]
    if _TAG.search(inner):
        raise unusable("no_answer_tag", f"the answer is '{text[:80]}'", f"One answer, or {_OPENS}it{_CLOSES},")
    return inner.strip()


def answered(kind: str, gold: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a record for its gold answer and how it is checked.

    answered("numerical", "3") == {"problem_type": "numerical", "options": [], "solution": "<answer>3</answer>"}

    Raises SampleError: ``no_answer_tag``: the answer contains such tags.
    """
    if _TAG.search(gold):
        raise unusable("no_answer_tag", f"the answer '{gold[:80]}' holds tags", "An answer without")
    return {"problem_type": kind, "options": list(options), "solution": f"{_OPENS}{gold.strip()}{_CLOSES}"}


def open_answer(gold: str) -> dict[str, Any]:
    """As ``answered``, for sets of open questions: the answer kind from the gold answer.

    "Yes" and "No" are yes/no, whole numbers and those with up to two decimals numerical, other decimals and fractions
    mathematics; others are exact. They are names, short texts and quantities with units, for which word overlap is no
    measure: "48 g/mol" is no half of "84 g/mol". open_answer("1.06")["problem_type"] == "numerical"
    """
    gold = gold.strip()
    if gold.lower() in ("yes", "no"):
        return answered("yes/no", gold.lower())
    kinds = {"numerical": _NUMBER, "mathematics": _MATHEMATICS}
    return answered(next((kind for kind, pattern in kinds.items() if pattern.fullmatch(gold)), "exact"), gold)


def open_or_choice(text: str, gold: str) -> dict[str, Any]:
    """The fields of a record for a question with its options as lines below it, and a gold answer in any spelling.

    open_or_choice("Which?\\nA. red\\nB. blue", "B. Blue.")["solution"] == "<answer>B</answer>". Without options a
    question is yes/no or numerical where the whole answer is that, else free-form.

    Raises SampleError: as ``split_options``, ``letter_of`` and ``answered``; ``too_few_options``: the answer is a
    letter, and there are no options.
    """
    question, options = split_options(text, gap=True)
    if closed := close_gap(options, gold, same_text):
        return {"problem": question, **answered("multiple choice", closed.letter, closed.options)}
    if options:
        check_letters(options)
        # Options in lines certainly begin with their letters; in records a few in another order would not.
        ordered = options if have_letters(options) else sorted(options)
        return {"problem": question, **answered("multiple choice", letter_of(gold, options), ordered)}
    bare = gold.strip().removesuffix(".").strip()
    if bare.lower() in ("yes", "no"):
        return {"problem": question, **answered("yes/no", bare.lower())}
    if _COUNT.fullmatch(bare):
        return {"problem": question, **answered("numerical", bare)}
    if letter_and_text(gold)[0]:
        raise unusable("too_few_options", f"the answer is '{gold[:80]}', and the question has no options", "Options")
    # Free-form only now: by word overlap "not 3" would earn a part of 3.
    return {"problem": question, **answered("free-form", gold)}
