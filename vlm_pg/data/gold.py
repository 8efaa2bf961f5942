"""What a record asks for: the kind of its answer, its options, the gold answer."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_pg.data.fields import fault, field
from vlm_pg.types import NONE_RIGHT, AnswerKind, right_letters

# Read without regard to case, and with a space, "_", "-" or "/" between words: "multiple_choice" is "multiple choice".
WRITTEN_NAMES: dict[AnswerKind, str] = {
    "multiple_choice": "multiple choice",
    "multiple_select": "multiple select",
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
_KINDS = {kind.translate(_BETWEEN_WORDS): kind for kind in WRITTEN_NAMES}
_OPENS, _CLOSES = "<answer>", "</answer>"
# "A. red", "A) red", "(A) red", "A: red"; not "A.M.".
_OPTION = re.compile(r"\s*\(?([A-Z])\s*[.):](?![A-Za-z][.)])\s*(.*)", re.DOTALL)
# So many options may have been lost of a list that still has its letters.
_LOST = 2
# From so many options on letters may come in another order: no four texts begin with A, B, C and D by chance.
_TURNED = 4
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:)]?")


def answer_kind_of(record: Mapping[str, Any]) -> AnswerKind:
    """How the answer is checked."""
    written = field(record, "problem_type", str)
    kind = _KINDS.get(" ".join(written.lower().translate(_BETWEEN_WORDS).split()))
    if kind is None:
        names = ", ".join(WRITTEN_NAMES.values())
        raise fault("unknown_answer_kind", f"'problem_type' is '{written}'", f"One of {names}", "it")
    return kind


def options_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The options with their letters; options written without any get theirs, in order.

    A capital and a point before each are letters only if they are those from A on in order, or four and more of them
    in another: "E. coli", "S. aureus" are texts. What may be letters all the same, some lost or turned, is refused:
    which option "B" means, the second or the one that begins so, nobody can know.
    """
    options = field(record, "options", list, default=[])
    if not all(isinstance(option, str) for option in options):
        raise fault("wrong_type", "'options' holds something that is not a string", "A list of strings", "it")
    if have_letters(options):
        return tuple(options)
    letters = [letter for letter, _ in map(_parted, options) if letter]
    if len(options) > len(string.ascii_uppercase) or (letters and max(letters) <= _last_of(len(options) + _LOST)):
        raise fault(
            "bad_options",
            f"'options' are {len(options)}, of which {len(letters)} begin with the letters {letters[:26]}",
            "The letters from A on in order before all of at most 26 options, as in 'A. red', or before none",
            "them",
        )
    return tuple(f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, options, strict=False))


def option_texts(options: Sequence[str]) -> dict[str, str]:
    """Texts by letter: option_texts(["A. red", "(B) .5"]) == {"A": "red", "B": ".5"}.

    ``options``: with their letters, as ``options_of`` returns them.
    """
    return dict(map(_parted, options))


def have_letters(options: Sequence[str]) -> bool:
    """Whether options surely are written with their letters; see ``options_of``."""
    letters = [letter for letter, _ in map(_parted, options)]
    known = list(string.ascii_uppercase[: len(options)])
    return bool(options) and (letters == known or (len(options) >= _TURNED and sorted(letters) == known))


def _parted(option: str) -> tuple[str, str]:
    """The letter an option begins with ("" without one), and the text behind it."""
    found = _OPTION.match(option)
    return (found[1], found[2].strip()) if found else ("", option)


def _last_of(count: int) -> str:
    return string.ascii_uppercase[min(count, len(string.ascii_uppercase)) - 1]


def answer_of(record: Mapping[str, Any], kind: AnswerKind, options: tuple[str, ...]) -> str:
    """The gold answer without tags; of options the letter, or "A, C" and "none" where several may be right."""
    solution = field(record, "solution", str)
    given = answers_in(solution)
    if not given:
        raise fault("no_answer_tag", f"'solution' is '{solution[:80]}'", "Text with '<answer>...</answer>'", "it")
    if not given[0]:
        raise fault("empty_answer", "the answer in 'solution' is empty", "The right answer", "it")
    if solution.count(_OPENS) > len(given):
        raise fault(
            "no_answer_tag", "the answer in 'solution' holds another '<answer>'", "One answer in its tags", "it"
        )
    if len(set(given)) > 1:
        came = f"'solution' gives {', '.join(repr(one[:80]) for one in dict.fromkeys(given[:4]))}"
        raise fault("ambiguous_answer", came, "One right answer", "it")
    answer = given[0]
    if kind == "multiple_select":
        return _selected(answer, options)
    if kind != "multiple_choice":
        return answer
    if len(options) < 2:
        raise fault("too_few_options", f"a multiple choice question has {len(options)} option(s)", "Two or more", "it")
    texts = option_texts(options)
    letters = _readings(answer, texts)
    if answer in texts and have_letters(field(record, "options", list, default=[])):
        return answer
    if len({texts[letter] for letter in letters}) > 1:
        raise fault(
            "ambiguous_answer",
            f"the answer '{answer[:80]}' may mean each of the options {', '.join(sorted(letters))}",
            "A letter and the text of its option, as in 'A. red',",
            "it",
        )
    if letters:
        return min(letters)
    raise fault(
        "answer_not_in_options", f"the answer is '{answer[:80]}'", f"One of the letters {', '.join(texts)}", "it"
    )


def answers_in(text: str) -> list[str]:
    """What stands between answer tags, in order: answers_in("<answer>B</answer> or <answer> A</answer>") == ["B", "A"].

    A tag that is not closed holds none. In time linear in the text's length.
    """
    found, start = [], text.find(_OPENS)
    while start >= 0 and (end := text.find(_CLOSES, start)) >= 0:
        found.append(text[start + len(_OPENS) : end].strip())
        start = text.find(_OPENS, end)
    return found


def _selected(answer: str, options: tuple[str, ...]) -> str:
    """The letters of all right options in their order, or "none"."""
    known = list(option_texts(options))
    if not known:
        raise fault("too_few_options", "a multiple select question has no options", "One or more", "it")
    if answer.lower() == NONE_RIGHT:
        return NONE_RIGHT
    letters = [letter.strip() for letter in answer.split(",")]
    if len(set(letters)) < len(letters) or not set(letters) <= set(known):
        raise fault(
            "answer_not_in_options",
            f"the answer is '{answer[:80]}'",
            f"Letters of {', '.join(known)} with commas between, each once, or '{NONE_RIGHT}',",
            "it",
        )
    return ", ".join(letter for letter in known if letter in letters)


def _readings(answer: str, texts: Mapping[str, str]) -> set[str]:
    """Letters of the options that the answer may mean: by its letter, its text, or both."""
    letter, spelled = _LETTER.fullmatch(answer), _OPTION.match(answer)
    found = {letter[1].upper()} & set(texts) if letter else set()
    for option, text in texts.items():
        if answer == text or (spelled and spelled[1] == option and spelled[2].strip() == text):
            found.add(option)
    return found


def check_gold(options: tuple[str, ...], gold: str) -> None:
    """Options need a text each, and no wrong one the text of a right one: the answer may be given as text.

    ``gold``: a letter, or as ``right_letters`` takes it.
    """
    texts = {letter: " ".join(text.split()) for letter, text in option_texts(options).items()}
    if not all(texts.values()):
        raise fault("bad_options", "'options' holds an option without text", "A text for each", "them")
    for letter in sorted(right_letters(gold)):
        if list(texts.values()).count(texts[letter]) > 1:
            raise fault(
                "bad_options",
                f"'options' holds the right one, '{texts[letter][:80]}', more than once",
                "A text that no other option has",
                "them",
            )
