"""Options of a multiple choice question: letters, texts, and which letters a sentence states."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from vlm_pg.answers.clauses import Clause, clauses, phrases
from vlm_pg.answers.latex import one_spelling
from vlm_pg.answers.plain_text import plain, plain_formula, same_but_for_case, without_marks
from vlm_pg.types import Sample

Choices = tuple[tuple[str, str], ...]

_LABELLED = re.compile(r"\s*\(?([A-Za-z])[.):]\s*(.*)", re.DOTALL)
_LINE = re.compile(r"^\s{0,8}\(?([A-Z])[.):、]\s{0,8}(\S.*)$", re.MULTILINE)
_CLOSING = ".。!?;,"
_BRACKETED = re.compile(r"\s*\(([^()]*)\)\s*")


def split_options(options: Sequence[str]) -> list[tuple[str, str]]:
    """Letter and text of each option: "B. red" -> ("B", "red"). Options without labels are lettered in order."""
    labelled = [_LABELLED.match(option) for option in options]
    if options and all(labelled):
        return [(match[1].upper(), match[2].strip()) for match in labelled if match]
    return list(zip(string.ascii_uppercase, (option.strip() for option in options), strict=False))


def choices_of(sample: Sample) -> Choices:
    """The sample's options; if it has none, those that stand in its question, a line each, or the gold answer's own."""
    return _choices(sample.options, sample.question, sample.answer)


@lru_cache(maxsize=1024)
def _choices(options: tuple[str, ...], question: str, answer: str) -> Choices:
    """Remembered, since all responses to a question are read with its options."""
    if options:
        return plain_choices(options)
    lines = _LINE.findall(plain(question))
    if [letter for letter, _ in lines] == list(string.ascii_uppercase[: len(lines)]) and len(lines) > 1:
        return tuple((letter, without_marks(text)) for letter, text in lines)
    own = _LABELLED.fullmatch(plain(answer).strip())
    return ((own[1].upper(), without_marks(own[2])),) if own and own[2] else ()


def plain_choices(options: Sequence[str]) -> Choices:
    """``split_options`` with texts as they are compared."""
    return tuple((letter, without_marks(plain_formula(option))) for letter, option in split_options(options))


def same_text(left: str, right: str) -> bool:
    """Whether two texts are the same but for case (not of symbols), spacing, quotes around them, closing punctuation
    and, of formulas, their spelling."""
    left, right = bare_text(left), bare_text(right)
    return same_but_for_case(left, right) or same_but_for_case(one_spelling(left), one_spelling(right))


def letters_of_text(text: str, choices: Choices) -> set[str]:
    """The letters of the options that a text is the text of: those that are closest to it, where several are.

    letters_of_text("CO", (("A", "Co"), ("B", "CO"))) -> {"B"}
    """
    for same in (_identical, same_text, _same_but_for_currency):
        if letters := {letter for letter, option in choices if option and same(text, option)}:
            return letters
    return set()


def bare_text(text: str) -> str:
    """What is compared of an option's text: bare_text("(Group  A).") -> "Group A"."""
    text = without_marks(without_marks(text).rstrip(_CLOSING))
    if bracketed := _BRACKETED.fullmatch(text):
        text = without_marks(bracketed[1])
    return " ".join(text.split()).rstrip(_CLOSING).strip()


def _identical(left: str, right: str) -> bool:
    """Whether two texts are the same, case, currency and the sign of a factorial considered."""
    return bare_text(left) == bare_text(right) and left.endswith("!") == right.endswith("!")


def _same_but_for_currency(left: str, right: str) -> bool:
    """Whether one text is a number of dollars, and the other the number alone."""
    without = [bare_text(text).removeprefix("$").strip() for text in (left, right)]
    return without[0] == without[1]


_BEFORE = r"(?<![A-Za-z0-9_'’-])"
# Small letters count only where a word says that they are one.
_NAMED = re.compile(
    r"(?:\b(?:options?|choices?|letter)(?:\s{1,3}is\b:?|\s{0,3}:)?\s{0,3}|选项\s{0,3}|选择?\s{0,3})\(?([A-Za-z])\)?(?![A-Za-z0-9_'’])"
    r"|(?<![A-Za-z])([A-Za-z])\s?(?:选项|项)",
    re.IGNORECASE,
)
_BRACKETED_LETTER = re.compile(r"\(([A-Za-z])\)|(?<![A-Za-z0-9_(])([A-Za-z])\)")
_STATED = re.compile(
    r"(?:\b(?:(?:answer|it)(?:\s{1,3}is\b:?|\s{0,3}:)|answer|choose|pick|select|go\s{1,3}with)\s{0,3}\b|答案(?:是|为|:)\s{0,3})([A-Za-z])"
    r"(?![A-Za-z0-9_'’])(?=\s{0,3}(?:[.,;:!/]|$|[^\x00-\x7f]|(?:because|since|and|or)\b))",
    re.IGNORECASE,
)
# "T-shirt", and "B-" as a grade, name no option, and neither do the variables of "X^{2}Y".
_CAPITAL = re.compile(_BEFORE + r"(?<!\})(?<!\}\s)([A-Z])(?!\s?\^|[A-Za-z0-9_'’]|-[a-z]|[-+]\s*$)")
# "vitamin B": a letter that is part of a name.
_NAMING = re.compile(rf"\b{phrases('vitamin, plan, hepatitis, grade')}\s{{1,3}}$", re.IGNORECASE)
# A capital A or I before one of these, or before no word on its line, is a letter; before any other word it is the
# article or the pronoun if a sentence begins with it, and may be either elsewhere.
_AFTER_LETTER = re.compile(
    r"[^\S\n]*(?:$|\n|[^\w\s]|[^\x00-\x7f]|[A-Z](?![A-Za-z])|"
    + phrases(
        "or, and, is, are, was, were, isn, aren, because, since, as, but, not, then, would, could, might, may, must, "
        "should, can, cannot, does, do, has, have, seem, seems, look, looks, fit, fits, matches, shows, "
        "describes, says, instead, rather, over, nor"
    )
    + r"\b)"
)
_EXPLICIT = re.compile(
    rf"\b{phrases('answer, option, choice')}(?:\s{{1,3}}is\b|\s{{0,3}}:)|"
    rf"\b{phrases('choose, pick, select, go with, i would say, i say')}\b|答案|选(?!项)|"
    rf"\b{phrases('it, that, this')}(?:\s{{1,3}}is|['’]s)\b|"
    rf"\bis\s{{1,3}}(?:the\s{{1,3}})?{phrases('correct, right, best, answer, true')}\b|对|正确|"
    rf"\b{phrases('is, fits, matches, works, suits')}\s{{1,3}}(?:better|best)\b",
    re.IGNORECASE,
)
# "B or so" says that B is not sure to be the answer.
_VAGUE = re.compile(
    rf"\bor\s{{1,3}}{phrases('so, something, thereabouts, another, others, other, else')}\b", re.IGNORECASE
)
# In an explanation these make another letter an answer, too.
_RIVAL = re.compile(
    rf"\b{phrases('also, too, or, either, maybe, perhaps, possible, possibly, could, might, may, would, both')}\b|"
    rf"\b{phrases('well, equally, wait, actually, correct, right, true, answer, choose, pick, select, better')}\b|"
    rf"\b{phrases('best, alternatively, otherwise, unless, no')}\b|也|或|可能|都|对|正确|选",
    re.IGNORECASE,
)
# "5 A", "20 °C": a letter that is a unit.
_NUMBER_BEFORE = re.compile(r"[0-9] ?(?:°|\^ ?\{? ?\\circ ?\}?)? ?$")
_LONGEST_NAMING = 16
_JOINING = re.compile(
    rf"\s*(?:{phrases('but, yet, so, therefore, thus, hence')}\s|"
    rf"(?:then\s{{1,3}})?{phrases('on reflection, on second thought, on second thoughts')},?\s)",
    re.IGNORECASE,
)
_FEWEST_WORDS = 3


@dataclass(frozen=True)
class Mention:
    """A letter in a clause. ``is_sure``: no article, pronoun or word."""

    letter: str
    clause: Clause
    is_sure: bool


def stated_letters(text: str, options: Collection[str]) -> set[str]:
    """The letters (upper case) that ``text`` states as its answer; none where that is not clear.

    Letters of clauses that reject do not count, and what is both affirmed and rejected is not clear. Of several letters
    the one counts that is stated first, if all others stand in reasons or in later sentences that only explain; or the
    one that is stated last, if the others were not stated.

        stated_letters("B is right, because A shows a cat.", "ABCD") -> {"B"}
        stated_letters("A looks tempting, but B is correct.", "ABCD") -> {"B"}
    """
    mentions = [mention for clause in clauses(text) for mention in _mentions(clause, options)]
    rejected = {mention.letter for mention in mentions if not mention.clause.is_affirmed}
    affirmed = [mention for mention in mentions if mention.clause.is_affirmed]
    if any(mention.clause.is_unclear for mention in mentions) or (mentions and _VAGUE.search(text)):
        return set()
    letters = {mention.letter for mention in affirmed}
    if len(letters) > 1:
        letters = _without_explanations(affirmed) or letters
    if len(letters) > 1:
        return letters
    if not any(mention.is_sure for mention in affirmed if mention.letter in letters):
        return set()
    return letters - rejected


def _mentions(clause: Clause, options: Collection[str]) -> Iterator[Mention]:
    text = clause.text
    sure = {
        group
        for pattern in (_NAMED, _STATED, _BRACKETED_LETTER)
        for match in pattern.finditer(text)
        for group in match.groups()
    }
    letters = {letter.upper(): True for letter in sure if letter}
    start = len(text) - len(text.lstrip(" \"'“("))
    for match in _CAPITAL.finditer(text):
        letter = match[1]
        before = text[max(0, match.start() - _LONGEST_NAMING) : match.start()]
        if _NAMING.search(before) or _NUMBER_BEFORE.search(before):
            continue
        if letter == "I" and options and "I" not in options:
            continue
        is_word = letter in "AI" and not _AFTER_LETTER.match(text, match.end())
        if is_word and (letter == "I" or match.start() <= start):
            continue
        letters[letter] = letters.get(letter, False) or not is_word
    yield from (Mention(letter, clause, is_sure) for letter, is_sure in letters.items())


def _without_explanations(affirmed: list[Mention]) -> set[str]:
    """The one letter that is stated, if the others are only explained or considered; else none."""
    num_in_clause = Counter(id(mention.clause) for mention in affirmed)
    stated = [
        mention
        for mention in affirmed
        if mention.is_sure and num_in_clause[id(mention.clause)] == 1 and _is_statement(mention.clause)
    ]
    if not stated or any(mention.letter != stated[0].letter for mention in stated):
        return set()
    first = affirmed.index(stated[0])
    # What follows the statement must explain; what comes before it is only considered.
    others = [mention for mention in affirmed[first + 1 :] if mention.letter != stated[0].letter]
    return {stated[0].letter} if all(_explains(mention.clause, stated[0].clause) for mention in others) else set()


def _is_statement(clause: Clause) -> bool:
    """Whether a clause gives an answer: a letter alone or after "but", or "the answer is", "B is correct" and so on."""
    is_alone = len(_JOINING.sub("", clause.text).strip("()[]. ")) == 1
    return not clause.is_reason and (is_alone or _EXPLICIT.search(clause.text) is not None)


def _explains(clause: Clause, statement: Clause) -> bool:
    if _RIVAL.search(clause.text):
        return False
    is_sentence = clause.sentence > statement.sentence and len(clause.text.split()) >= _FEWEST_WORDS
    return clause.is_reason or is_sentence
