"""Fields of a record, checked for type and Unicode; ``details``; values that cannot be read; options, answer kind,
gold answer and responses."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from vlm_pg.errors import SampleError
from vlm_pg.types import CONTROL_TOKEN, MEDIA_MARKS, NONE_RIGHT, AnswerKind, right_letters

# More is no description of a question, and would be held for every question of a set.
LONGEST_DETAILS = 20_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Unreadable:
    """A value that cannot be read, so that only a record that needs it is lost; ``reason``: of refusing a whole row.

    Unreadable("a whole number of 5000 digits")
    """

    what: str
    reason: str = "unreadable_value"


def fault(reason: str, came: str, allowed: str, correct: str) -> SampleError:
    """The refusal of a record: "CAME. ALLOWED is expected. Correct CORRECT, or remove the record."."""
    return SampleError(reason, f"{came}. {allowed} is expected. Correct {correct}, or remove the record.")


def field(record: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """A field of the given type; absent and null count the same."""
    value = record.get(name)
    if isinstance(value, Unreadable):
        raise fault("unreadable_value", f"'{name}' is {value.what}", f"A {kind.__name__} that can be read", "it")
    if value is None:
        if default is _REQUIRED:
            raise fault("missing_field", f"'{name}' is missing", f"A {kind.__name__} under that name", "the record")
        return default
    if not isinstance(value, kind):
        raise fault("wrong_type", f"'{name}' is a {type(value).__name__}", f"A {kind.__name__}", "it")
    return value


def id_of(record: Mapping[str, Any]) -> str:
    """The record's ``problem_id``, a number or string, as text."""
    value = record.get("problem_id")
    if isinstance(value, Unreadable):
        raise fault("unreadable_value", f"'problem_id' is {value.what}", "A whole number or a string", "it")
    if isinstance(value, bool) or not isinstance(value, int | str | None):
        raise fault("wrong_type", f"'problem_id' is a {type(value).__name__}", "A whole number or a string", "it")
    if value is None or not str(value).strip():
        raise fault("missing_field", "'problem_id' is missing", "A number or name of its own", "the record")
    return str(value)


def check_text(name: str, text: str) -> None:
    """Refuse lone surrogates: no tokenizer takes them, and the original character is unknown."""
    found = _SURROGATE.search(text)
    if found:
        raise fault(
            "not_unicode",
            f"'{name}' holds half of a character (\\u{ord(found[0]):04x}, at {found.start()}), as text that was cut "
            "inside an emoji does",
            "Whole Unicode characters",
            "it",
        )


def check_tokens(what: str, text: str) -> None:
    """Refuse control tokens in a text, called ``what`` in the message."""
    token = CONTROL_TOKEN.search(text)
    if token:
        raise fault(
            "media_token_in_text",
            f"{what} contains '{token[0]}'",
            "Control tokens may come from the prompt builder only; text without them",
            "the text",
        )


def turns_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The turns after the question: the assistant's first, then the user's and the assistant's in alternation."""
    turns = field(record, "turns", list, default=[])
    if not all(isinstance(turn, str) for turn in turns):
        raise fault("wrong_type", "'turns' holds something that is not a string", "A list of strings", "it")
    if turns and len(turns) % 2 == 0:
        came = f"'turns' has {len(turns)} turns, so that the last one is the user's"
        raise fault("bad_conversation", came, "An odd number, from the assistant's first turn to its last,", "it")
    for index, turn in enumerate(turns):
        _check_turn(f"turns[{index}]", turn)
    return tuple(turns)


def rejected_of(record: Mapping[str, Any], turns: Sequence[str]) -> str:
    """The rejected response of a preference pair, "" without one."""
    rejected: str = field(record, "rejected", str, default="")
    if not rejected:
        return ""
    _check_turn("rejected", rejected)
    if len(turns) > 1:
        came = f"'rejected' is given beside {len(turns)} turns"
        raise fault("bad_preference", came, "One turn, the chosen response,", "'turns' or 'rejected'")
    return rejected


def _check_turn(name: str, text: str) -> None:
    check_text(name, text)
    if not text.strip():
        raise fault("empty_turn", f"'{name}' is empty", "Text", "it")
    check_tokens(f"'{name}'", text)
    if mark := next((mark for mark in MEDIA_MARKS.values() if mark in text), None):
        allowed = "Media in the question alone, the first turn of the user,"
        raise fault("media_in_later_turn", f"'{name}' contains '{mark}'", allowed, "the text")


def details_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record's ``details``, further published values of a question: an object, or its JSON as text; {} without.

    Raises:
        SampleError: they are no object, or longer than ``LONGEST_DETAILS`` characters.
    """
    value = record.get("details")
    if value is None or value == "":
        return {}
    if isinstance(value, Unreadable):
        raise fault("unreadable_value", f"'details' is {value.what}", "An object that can be read", "it")
    if isinstance(value, str):
        _check_length(value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise fault("wrong_type", "'details' is a text that is no JSON", "An object, or its JSON", "it") from None
    if not isinstance(value, Mapping):
        raise fault("wrong_type", f"'details' is a {type(value).__name__}", "An object, or its JSON", "it")
    written = written_details(value)
    _check_length(written)
    check_text("details", written)
    return {str(name): one for name, one in json.loads(written).items()} if written else {}


def written_details(details: Mapping[str, Any]) -> str:
    """The JSON of details with sorted keys, so that equal details are equal texts; "" without any.

    Raises:
        SampleError: a value that JSON does not have.
    """
    if not details:
        return ""
    try:
        return json.dumps(dict(details), ensure_ascii=False, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        expected = "Texts, finite numbers, true, false, null, lists and objects of them"
        raise fault("wrong_type", "'details' holds a value that JSON does not have", expected, "it") from None


def _check_length(written: str) -> None:
    if len(written) > LONGEST_DETAILS:
        expected = f"At most {LONGEST_DETAILS:,}"
        raise fault("details_too_long", f"'details' has {len(written):,} characters", expected, "them")


# "A. red", "A) red", "(A) red", "A: red"; not "A.M.".
OPTION = re.compile(r"\s*\(?([A-Z])\s*[.):](?![A-Za-z][.)])\s*(.*)", re.DOTALL)
# "A.U.S. Army" too, which may be a letter before "U.S. Army".
_GLUED = re.compile(r"\s*\(?([A-Z])[.):]\s*(\S.*)", re.DOTALL)
LETTER = re.compile(r"\(?([A-Za-z])\)?[.:)]?")
# So many options may have been lost of a list that still has its letters.
_LOST = 2
# From so many options on letters may come in another order: no four texts begin with A, B, C and D by chance.
_REORDERED = 4


class Closed(NamedTuple):
    """Options with the letters from A on, after some were lost, and the letter of the right one."""

    options: tuple[str, ...]
    letter: str


def options_of(record: Mapping[str, Any], gold: str = "") -> tuple[str, ...]:
    """The options with their letters; options written without any get theirs, in order.

    A capital and a point before each are letters only if they are those from A on in order, or four and more of them
    in another: "E. coli", "S. aureus" are texts. What may be letters all the same, some lost or reordered, is refused:
    whether option "B" is the second or the one that begins so is unknown. Where some are lost and the gold
    answer (``gold``, as written, without tags) gives its option's text, they get those from A on (``close_gap``).
    """
    options = field(record, "options", list, default=[])
    if not all(isinstance(option, str) for option in options):
        raise fault("wrong_type", "'options' holds something that is not a string", "A list of strings", "it")
    if have_letters(options):
        return tuple(options)
    if glued := unglued(options):
        return tuple(f"{letter}. {text}" for letter, text in glued)
    if closed := close_gap(options, gold):
        return closed.options
    letters = [letter for letter, _ in map(_parted, options) if letter]
    if len(options) > len(string.ascii_uppercase) or (letters and max(letters) <= _last_of(len(options))):
        raise fault(
            "bad_options",
            f"'options' are {len(options)}, of which {len(letters)} begin with the letters {letters[:26]}",
            "The letters from A on in order before all of at most 26 options, as in 'A. red', or before none, or, "
            "where some are lost, an answer that is the right one's text",
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
    return bool(options) and (letters == known or (len(options) >= _REORDERED and sorted(letters) == known))


def unglued(options: Sequence[str]) -> list[tuple[str, str]]:
    """Letters and texts of options of which some run together, as in "A.U.S. Army", "B. NATO"; none of others.

    All must begin with their letters in order, one of them as is written nowhere else: "A.D.", "B.C." are texts. As
    letters and positions agree, no answer means another option for it.
    """
    found = [_GLUED.fullmatch(option) for option in options]
    parted = [(match[1], match[2].strip()) for match in found if match]
    in_order = [letter for letter, _ in parted] == list(string.ascii_uppercase[: len(options)])
    return parted if in_order and len(parted) == len(options) and any(map(OPTION.match, options)) else []


def is_gap(letters: Sequence[str]) -> bool:
    """Whether these are the letters from A on in order, of which a few are lost: A, B, D."""
    ordered = all(first < second for first, second in pairwise(letters))
    whole = list(letters) == list(string.ascii_uppercase[: len(letters)])
    return len(letters) > 1 and letters[0] == "A" and ordered and not whole and letters[-1] <= _last_of(len(letters))


def close_gap(options: Sequence[str], gold: str, same: Callable[[str, str], bool] = str.__eq__) -> Closed | None:
    """Options that have lost some of their letters with those from A on, if the gold answer gives the right one's text.

    close_gap(["A. red", "B. blue", "D. green"], "D. green") == Closed(("A. red", "B. blue", "C. green"), "C")

    None for other options, where the answer is but a letter, which may count what was lost or not, or fits no option or
    several, and where a text has one of the letters in it that would be another's ("both C and D", "blue C. green").

    ``gold``, without tags, is a text, alone or behind its letter; ``same`` compares two texts.
    """
    parted = list(map(_parted, options))
    letters = [letter for letter, _ in parted]
    bare = LETTER.fullmatch(gold.strip())
    if not all(letters) or not is_gap(letters) or (bare and bare[1].upper() <= _last_of(len(options))):
        return None
    first = next(known for known, letter in zip(string.ascii_uppercase, letters, strict=False) if known != letter)
    if any(re.search(rf"(?<![A-Za-z])[{first}-{letters[-1]}](?![A-Za-z])", text) for _, text in parted):
        return None
    gold_letter, gold_text = _parted(gold.strip())
    right = [
        index
        for index, (letter, text) in enumerate(parted)
        if same(gold.strip(), text) or (gold_letter == letter and same(gold_text, text))
    ]
    if len(right) != 1:
        return None
    closed = tuple(f"{letter}. {text}" for letter, (_, text) in zip(string.ascii_uppercase, parted, strict=False))
    return Closed(closed, string.ascii_uppercase[right[0]])


def _parted(option: str) -> tuple[str, str]:
    """The letter an option begins with ("" without one), and the text behind it."""
    found = OPTION.match(option)
    return (found[1], found[2].strip()) if found else ("", option)


def _last_of(count: int) -> str:
    """The last letter that so many options may have, some lost."""
    return string.ascii_uppercase[min(count + _LOST, len(string.ascii_uppercase)) - 1]


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
    """How the answer is checked; free-form without ``problem_type`` where the record needs no answer."""
    if record.get("problem_type") is None and _needs_no_answer(record):
        return "free_form"
    written = field(record, "problem_type", str)
    kind = _KINDS.get(" ".join(written.lower().translate(_BETWEEN_WORDS).split()))
    if kind is None:
        names = ", ".join(WRITTEN_NAMES.values())
        raise fault("unknown_answer_kind", f"'problem_type' is '{written}'", f"One of {names}", "it")
    return kind


def _needs_no_answer(record: Mapping[str, Any]) -> bool:
    """Whether a record has no gold answer and turns instead."""
    return record.get("solution") in (None, "") and bool(record.get("turns"))


def answer_of(record: Mapping[str, Any], kind: AnswerKind, options: tuple[str, ...]) -> str:
    """The gold answer without tags; of options the letter, or "A, C" and "none" where several may be right. "" in a
    record with turns and without ``solution``."""
    if _needs_no_answer(record):
        return ""
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
