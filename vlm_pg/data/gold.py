"""What a record asks for: the kind of its answer, the gold answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_pg.data.fields import fault, field
from vlm_pg.data.option_letters import LETTER, OPTION, close_gap, have_letters, option_texts
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


def answer_kind_of(record: Mapping[str, Any]) -> AnswerKind:
    """How the answer is checked."""
    written = field(record, "problem_type", str)
    kind = _KINDS.get(" ".join(written.lower().translate(_BETWEEN_WORDS).split()))
    if kind is None:
        names = ", ".join(WRITTEN_NAMES.values())
        raise fault("unknown_answer_kind", f"'problem_type' is '{written}'", f"One of {names}", "it")
    return kind


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
    written = field(record, "options", list, default=[])
    if closed := close_gap(written, answer):
        return closed.letter
    letters = _readings(answer, texts)
    if answer in texts and have_letters(written):
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
    letter, spelled = LETTER.fullmatch(answer), OPTION.match(answer)
    found = {letter[1].upper()} & set(texts) if letter else set()
    for option, text in texts.items():
        is_spelled = spelled and spelled[1] == option and spelled[2].strip() == text
        if is_spelled or answer in (text, f"{option}.{text}"):
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
