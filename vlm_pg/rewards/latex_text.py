"""Mathematics as people and models write it: which part of a text is the answer.

Everything here works on strings in time linear in their length (texts are capped before), and evaluates nothing.
"""

from __future__ import annotations

import re

from vlm_pg.rewards.clauses import affirmed
from vlm_pg.rewards.latex_parts import CURRENCY_CODES
from vlm_pg.rewards.latex_spelling import ROOT_OF_DIGITS, SIGNS, TEXT_MACRO, as_latex
from vlm_pg.rewards.lead_ins import explicit_statement, without_lead_in
from vlm_pg.rewards.plain_text import boxed, plain, split_at_boxes, whole_font, without_layout
from vlm_pg.rewards.units import parse_unit

# Of a whole answer.
MAX_TEXT_CHARACTERS = 2000

_IDLE_SPACE = re.compile(r"(?<![0-9])\s|\s(?![0-9])")
_DECORATION = ' \t\r\n*_`"“”'
_CLOSING = ".,;。，；"
_DELIMITED = re.compile(
    r"(?<!\\)\$\$([^$]+)\$\$|(?<!\\)\$(?=[^\s$])((?:[^$\\]|\\.)*)(?<!\s)\$(?!\d)|"
    r"\\\(((?:[^\\]|\\(?!\)))*)\\\)|\\\[((?:[^\\]|\\(?!\]))*)\\\]",
    re.DOTALL,
)
# Not of a formula.
_PRICE = re.compile(rf"(?P<formula>{_DELIMITED.pattern})|(?<!\\)\$(?=\s?-?\.?[0-9])", re.DOTALL)
_DELIMITERS = re.compile(r"(?<!\\)\$|\\[()]|(?<!\\)\\[\[\]]")
# Outside of delimiters these belong to the answer, too: "-$5$", "5 or $7$".
_SUBSTANCE = re.compile(r"[0-9=<>^/+\-(\[{]")
_SYMBOL = re.compile(r"\\?[A-Za-z]{1,8}(?:_\{?[A-Za-z0-9]{1,4}\}?)?(?:\([a-z]\))?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,'’-]+[^\W\d_]+)*")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}(?![A-Za-z}])|[\u4e00-\u9fff]")
# After the last of these a sentence says its number: "The largest n is 34", "There are 7 ways", "共42人".
_COPULA = re.compile(
    r"\b(?:is|are|was|were|be|equals?|equal\s{1,3}to|gets?|got|obtain|obtained|gives?|yields?|have|has|find|needs?|total)\b\s{0,3}:?"
    r"|等于|得到|共有|一共|共|得|为|是|有|:",
    re.IGNORECASE,
)
_BOUND = re.compile(
    r"\b(?:at\s{1,3}(?:least|most)|than|between|half|twice|up\s{1,3}to|over|under|above|below)\b|"
    r"至少|至多|超过|大于|小于|不到|以上|以下",
    re.IGNORECASE,
)


# "The year 2024": words that leave the number at their end as it is.
_LAST_NUMBER = re.compile(
    rf"[A-Za-z ,'’:]{{0,200}}?(?<![^\s])(?P<number>(?:(?:{CURRENCY_CODES}|\\\$|[€£¥₹])\s?)?-?[0-9][0-9.,]{{0,20}})"
)
_OPERATION = re.compile(
    r"\b(?:of|root|square|squared|cube|cubed|times|plus|minus|negative|over|by|divided|factorial|sum|product|difference|log|sin|cos|tan|"
    r"percent|base|mod|to|or|and|from|sqrt|pi|no|never)\b",
    re.IGNORECASE,
)
# "Area = 12": a word for what is asked.
_WORD_EQUALS = re.compile(
    r"^\s{0,3}(?:(?=[a-z]{0,20}[aeiou])[A-Za-z][a-z]{3,20}\s{1,3}){0,3}(?:(?=[A-Za-z]{0,20}[aeiou])[A-Za-z][a-z]{3,20}\s{0,3})?=(?=[^=])\s{0,3}"
)
_REASON = re.compile(r"\b(?:because|since)\b|因为", re.IGNORECASE)
_BEHIND_BOX = re.compile(r"[\s$]{0,4}([^\s$.,;:!?。，、][^$.,;:!?。，、\n]{0,39}?)[\s$]{0,4}(?:[.,;:!?。，、\n]|$)")
_SENTENCE_BREAK = re.compile(r"[.!?][\"')]?\s{1,9}(?=[\"'(]?[A-Z])|[。！？\n]")
_FEWEST_WORDS_OF_A_SENTENCE = 3


def statement(text: str) -> str:
    """The mathematics that an answer states, as LaTeX without delimiters; several statements are joined by commas.

    What is in ``\\boxed{}`` counts, else the one formula of a sentence, else what follows "The answer is" or the
    sentence's verb, else all of it. What a clause rejects does not count. Signs such as "√2", "²" and "≤", and
    "sqrt(2)", "2**3", "3e5", "1 1/2", "10 000" become LaTeX.

        statement("The largest $n$ is $\\frac12$.") -> "\\frac{1}{2}"
    """
    whole = plain(ROOT_OF_DIGITS.sub(r"\\sqrt{\1}", text[: MAX_TEXT_CHARACTERS + 1]).translate(SIGNS)).strip(
        _DECORATION
    )
    whole = _PRICE.sub(lambda found: found["formula"] or "\\$", whole)
    contents, outside = split_at_boxes(whole)
    found = ", ".join(dict.fromkeys(contents)) if contents else _in_sentence(whole)
    if len(contents) == 1:
        found = _with_sign_and_unit(found, *outside)
    if boxed(found):  # a box in a box
        return statement(found)
    if (inner := whole_font(found)) and not _WORDS.fullmatch(inner.strip(" (){}[].")):
        found = inner
    found = _WORD_EQUALS.sub("", found)
    found = " ".join(without_lead_in(_bare(found)).strip(_DECORATION).split())
    return as_latex(_bare(_DELIMITERS.sub("", found)))


def is_explanation(text: str) -> bool:
    """Whether a text is several sentences of which none says that it is the answer, as a box or "The answer is" does.

    is_explanation("They are parallel. They have no common points.") -> True; is_explanation("Mr. Brown") -> False
    """
    if boxed(text) or explicit_statement(text):
        return False
    sentences = _SENTENCE_BREAK.split(without_layout(_DELIMITED.sub("X", plain(text))))
    words_of_each = [count for sentence in sentences if (count := len(_PROSE.findall(sentence)))]
    return len(words_of_each) > 1 and max(words_of_each) >= _FEWEST_WORDS_OF_A_SENTENCE


def unspaced(latex: str) -> str:
    """A statement without the white space that says nothing: that between two digits would.

    unspaced("5 \\sqrt { 2 }") -> "5\\sqrt{2}"
    """
    return _IDLE_SPACE.sub("", latex)


def words(latex: str, *, gold: bool) -> str | None:
    """A statement that is words rather than mathematics, folded for comparison; None for mathematics.

    Args:
        latex: what ``statement`` returned.
        gold: a gold answer is words only if it says so: ``\\text{}`` around it, a space, or four letters in a row.
            Without it, letters in any number are.
    """
    bare = TEXT_MACRO.sub(r"\1", latex)
    is_marked = bare != latex
    bare = bare.strip(" (){}[].")
    if not _WORDS.fullmatch(bare) or (gold and not (is_marked or len(bare) >= 4 or " " in bare)):
        return None
    return " ".join(bare.casefold().split())


def _bare(text: str) -> str:
    return text.strip(_DECORATION).rstrip(_CLOSING).strip(_DECORATION)


def _with_sign_and_unit(content: str, before: str, behind: str) -> str:
    """The content of a box with the minus that touches it, and the unit or percent sign behind it."""
    sign = "-" if re.search(r"(?:^|[^\w)}\]])-\$?$", before) else ""
    unit = _BEHIND_BOX.match(without_layout(behind))
    is_unit = unit is not None and (unit[1] in ("%", "\\%") or parse_unit(unit[1]) is not None)
    return f"{sign}{content} {unit[1]}" if unit and is_unit else sign + content


def _in_sentence(text: str) -> str:
    """What a sentence states: its formulas if all that matters is in them, else what follows its verb."""
    text = without_lead_in(explicit_statement(text) or text).strip(_DECORATION)
    if reason := _REASON.search(text):
        text = text[: reason.start()].rstrip(_CLOSING + _DECORATION + "(") or text
    formulas = [next(filter(None, groups), "").strip() for groups in _DELIMITED.findall(text)]
    outside = _DELIMITED.sub(" ", text)
    prose = _DELIMITERS.sub("", text) if not _PROSE.search(outside) else affirmed(text)
    if prose != text and _PROSE.search(outside):
        return _after_verb(_DELIMITERS.sub("", prose))  # something is rejected
    if formulas and not _SUBSTANCE.search(outside) and not _BOUND.search(outside):
        substantial = [formula for formula in formulas if not _SYMBOL.fullmatch(formula)]
        return (
            ", ".join(dict.fromkeys(substantial or formulas)) if _PROSE.search(outside) else _DELIMITERS.sub("", text)
        )
    return _after_verb(_DELIMITERS.sub("", text)) if _PROSE.search(text) else text


def _after_verb(text: str) -> str:
    """What follows the last verb before any number; all of ``text`` if no verb does."""
    first = _SUBSTANCE.search(text)
    verbs = [verb for verb in _COPULA.finditer(text) if first is None or verb.end() <= first.start()]
    if verbs:
        return text[verbs[-1].end() :]
    number = _LAST_NUMBER.fullmatch(_bare(text))
    is_plain = number and not _BOUND.search(text) and not _OPERATION.search(text)
    return number["number"] if number and is_plain else text
