"""Whole outputs: the answer is found, then the grader of its kind reads it.

Published evaluation prompts ask for no answer tags. What an output marks as its answer (the last tag or box, "The
answer is") is read as an answer block is. Any other statement is read only where it says no more than its question: an
answer beside words that the question does not have is unread, which a judge may decide.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction

from vlm_pg.answers.choices import letters_in, selected_letters, stated_sides
from vlm_pg.answers.clauses import affirmed, clauses, without_lead_in
from vlm_pg.answers.grading import CHECKERS, PREPARE, mathematics_call, mathematics_verdict
from vlm_pg.answers.latex import statement, unspaced, words
from vlm_pg.answers.numbers import ParsedNumber, in_unit_of, read_quantity, with_digits, without_quantities
from vlm_pg.answers.options import Choices, bare_text, choices_of, same_text
from vlm_pg.answers.outputs import ParsedOutput, field_of_object, parse_output, without_formatting
from vlm_pg.answers.overlap import parse_boxes, parse_spans
from vlm_pg.answers.plain_text import boxed, is_formula, plain, same_but_for_case, without_marks
from vlm_pg.answers.pool import CheckerPool
from vlm_pg.answers.statements import (
    MAX_STATEMENT_CHARACTERS,
    conclusion,
    correction,
    is_check,
    is_echo,
    is_statement,
    last_explicit,
    sentences,
    stems,
    without_reason,
)
from vlm_pg.answers.units import Unit, parse_unit
from vlm_pg.answers.verdict import GraderSettings, Reading, Verdict
from vlm_pg.types import NONE_RIGHT, AnswerKind, Sample

_FEW_WORDS = 4
_SUBSTANCE = re.compile(r"[\d$\\=+*/^∞∅ℝπα-ω]|^\W*[A-Za-z]{1,3}\W*$|infinity|empty|exp\(")
_COMPARISON = re.compile(r"[<>≤≥]|\\(?:le|ge|lt|gt|in)")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}(?![A-Za-z}])|[\u4e00-\u9fff]")
_NAME_OF_FUNCTION = re.compile(
    r"\b(?:sqrt|pi|sin|cos|tan|log|ln|or|and|empty\sset|radians?|square|units?|inf|infinity|exp)\b|\\[A-Za-z]+(?:\{[^{}]*\})?|或|和"
)
_SEVERAL = re.compile(r"\b(?:roots|solutions|values|zeros|all|both|numbers|pairs)\b", re.IGNORECASE)
_ROUNDED = re.compile(r"round|decimal|nearest|approximat|estimate|小数|近似|约", re.IGNORECASE)
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])|≈")
_RADICAL_FORM = re.compile(r"simpl\w{0,8}\s(?:radical\s)?form", re.IGNORECASE)
_ROOT = re.compile(r"\\sqrt\s?\{?\s?([0-9]{1,9})\s?\}?")
_NUMBER_ALONE = re.compile(r"(-?)([0-9]{1,3}(?:,[0-9]{3}){1,10}|[0-9]{1,100})(?:\.([0-9]{1,100}))?")
_FORMULA = re.compile(r"\$\$?[^$]{1,400}\$\$?|\\\(.{1,400}?\\\)|\\\[.{1,400}?\\\]", re.DOTALL)
_NAMED_UNIT = re.compile(r"\b(?:in|unit\s?[:=])\s((?:(?:square|cubic)\s)?[A-Za-z]{1,20})(?=[\s).,?]|$)", re.IGNORECASE)
_PERCENT = re.compile(r"percent|per cent|%|proportion|probability|share|fraction|百分", re.IGNORECASE)
_LENGTH = re.compile(
    r"(?:(?<![0-9.])([0-9]{1,6}(?:\.[0-9]{1,4})?)\s?(?:hours?|h|小时)\b(?:\s?,?\s?(?:and\s)?))?"
    r"(?:(?<![0-9.])([0-9]{1,6}(?:\.[0-9]{1,4})?)\s?(?:minutes?|mins?|m|分钟?)\b(?:\s?,?\s?(?:and\s)?))?"
    r"(?:(?<![0-9.])([0-9]{1,6}(?:\.[0-9]{1,4})?)\s?(?:seconds?|secs?|s|秒)\b)?"
)
_ASSIGNED = re.compile(r"^\s{0,3}[A-Za-z]\s?=|=")
_DECISION = re.compile(
    r"\b(?:answer|options?|choice|choose|pick|select|go(?:ing)?\s(?:with|for)|guess|leaves|corresponds?|conclude|hence|"
    r"therefore|thus|correct|right|richtig|correcta?|bonne)\b|答案|选|正确|正解|ответ|الإجابة|정답",
    re.IGNORECASE,
)
_DATA = re.compile(r"\s*(?:```\w{0,12})?\s*[\[{].{1,2000}[\]}]\s*(?:```)?\s*", re.DOTALL)
_REFUTED = re.compile(r"[\s$.,]{0,5}(?:is|was)\s(?:wrong|incorrect|false|not)\b", re.IGNORECASE)
_MATRIX = re.compile(r"\\begin\{[a-z]*matrix\}.{1,400}?\\end\{[a-z]*matrix\}|\\\[[^\[\]]{1,400}\\\]", re.DOTALL)
_ROW_GAP = re.compile(r"\\\\\s?\[[0-9a-z.]{1,8}\]")
_COUNT = re.compile(r"\bhow\smany\b|几|多少[个人只]", re.IGNORECASE)
_MAX_BARE = 20
_TAKEN_BACK = re.compile(r"\b(?:change|instead|mistake|wrong|incorrect)\b|错|改", re.IGNORECASE)
_SYMBOL = re.compile(r"[0-9=<>+*/^%$€£¢\\]|(?<=\S\s)[A-Z](?![\w'’])|(?<![\w'’])[b-z](?![\w'’])")
_UNITS = "[kcm]?m|k?g|m/s|km/h|°C|seconds?|minutes?|hours?|percent"
_LABEL = re.compile(r"[(\[]?[A-Z](?:[.:)\]]|\)[.:])(?=\s)")
_CERTAIN_LETTER = re.compile(r"(?:the\s)?(?:option\s\(?([A-Z])\)?|\(([A-Z])\))[\s.:]*(.*)", re.IGNORECASE | re.DOTALL)
_NAMED_OPTION = re.compile(
    r"^((?:option|caption|sentence|statement|description)\s[0-9])\s?[:.)]\s?(.+)$", re.IGNORECASE | re.M
)
_TENTATIVE = re.compile(r"\b(?:first|initial\w*|instinct|was|were|thought)\b|原本|以为", re.IGNORECASE)
_TICK, _CROSS = re.compile("[✓✔✅☑]\ufe0f?"), re.compile("[❌✗✘✖]")
_SUBORDINATE = re.compile(
    r"^\W{0,3}(?:after|before|when|once|while|as|if)\b[^,]{1,200},|\b(?:after|before|when|while|until|once)\b[^,.]{1,200}$",
    re.IGNORECASE,
)
_BUT = re.compile(r"\b(?:but|however|though|although|except)\b|但|不过|可是", re.IGNORECASE)
_SHORT_SIDE = re.compile(
    r"(?:he|she|it|they|there|i|we)\s(?:does|did|do|is|are|was|were|can|has|have|will)(\s?n['’]t|\snot)?(?:,?\sat\s[0-9:]{1,8})?\W*",
    re.IGNORECASE,
)
_OF_CLAUSE = re.compile(r"\b(?:false|true|wrong|incorrect|untrue)\sthat\b", re.IGNORECASE)
_LEADING_NO = re.compile(r"\W*(?:no|false|不|否|没)\b", re.IGNORECASE)
_NOT = re.compile(r"\b(?:(?:does|do|did|is|are|was|were|has|have)\s?n['’]t|not|never)\b", re.IGNORECASE)
_MAX_SHORT = 80
_ARTICLE = re.compile(r"^(?:an?|the)\s(?=\w)", re.IGNORECASE)
_OTHER_UNIT = re.compile(
    r"\bframes?\b|帧|(?:-|to)\s?[0-9.]{1,6}\s(?!(?:seconds?|secs?|minutes?|mins?|sec|min|in|of|and|until|till|for|when|where|"
    r"on|at|during|into|mark|the|as|is|was|while|s|m)\b)[a-z]{2,}",
    re.IGNORECASE,
)
_MILLISECONDS = re.compile(r"(:[0-5][0-9]),([0-9]{1,3})(?![0-9])")
_SPAN_WORDS = stems(
    "event moment action activity occurs happens starts start begins begin ends end ending starting query described "
    "segment time timestamp timestamps interval span period duration lasts takes place during between until through "
    "person happening occurring 开 始 结 束 时 间 秒 分 钟 发 生 事 件 第"
)
_WORKING = stems(
    "adding subtracting dividing multiplying both sides we have get obtain gives therefore simplify simplified"
)


@dataclass(frozen=True)
class Claim:
    """A text that may give the answer. ``is_final``: the output marks it as its answer, by a tag, a box or in words."""

    text: str
    is_final: bool


@dataclass(frozen=True)
class Found:
    """The answer of a claim, as people write it (None: unclear), and as the grader gets it."""

    answer: str | None
    text: str = ""


_UNCLEAR = Found(None)
# None: the claim gives no answer, and an earlier one may.
_Finder = Callable[[Claim, Sample], Found | None]


class WholeReader(AbstractContextManager["WholeReader"]):
    """Reader of whole outputs; a context manager, to be closed when no more come.

    Mathematics are compared in processes of their own, which start with the first of them.

    Args:
        settings: tolerances of graders, and the checking processes.
        warn: gets a message where checks had to be stopped.
    """

    def __init__(self, settings: GraderSettings, warn: Callable[[str], None] = warnings.warn):
        self._settings, self._warn = settings, warn
        self._pool: CheckerPool | None = None
        self._pool_owner = 0

    def read(self, sample: Sample, output: str, truncated: bool) -> Reading:
        """The answer of ``output`` to ``sample`` and its score; a ``Reader``.

        Args:
            sample: the question, with its gold answer.
            output: what a model wrote, without special tokens.
            truncated: whether the length limit cut it off.
        """
        if "mc_question" in sample.details:
            # TempCompass's captions: a judge is asked the set's question about the caption.
            return Reading(None, None, "captions are scored by a judge alone, from the set's question about them")
        unread = self._grade("", sample)
        if unread.value is None:
            return Reading(None, None, unread.note)
        parsed = parse_output(output, truncated)
        found = None if parsed is None else find(parsed, sample)
        if found is None or found.answer is None:
            return Reading(None, 0.0, "no answer" if found is None else "no clear answer")
        verdict = self._grade(found.text, sample)
        return Reading(found.answer, verdict.value, verdict.note)

    def close(self) -> None:
        """End the checking processes. May be called twice."""
        if self._pool is not None and self._pool_owner == os.getpid():
            self._pool.close()
        self._pool = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _grade(self, answer: str, sample: Sample) -> Verdict:
        if sample.answer_kind != "mathematics":
            return CHECKERS[sample.answer_kind](answer, sample, self._settings)
        if self._pool is None or self._pool_owner != os.getpid():
            self._pool = CheckerPool(self._settings.checker, [PREPARE], self._warn)
            self._pool_owner = os.getpid()
        [outcome] = self._pool.run([mathematics_call(sample.answer, answer)])
        return mathematics_verdict(outcome)


def find(parsed: ParsedOutput, sample: Sample) -> Found | None:
    """The answer of an output; None where it gives none.

    Of the last tag or box; else of what follows the last "The answer is"; else of its first statement, where that is an
    answer alone and the others explain it; else of the last statement that gives one. A change of mind is followed.
    """
    if sample.answer_kind in ("free_form", "ocr"):
        text = (parsed.text if parsed.final is None else parsed.final).strip()
        return Found(text, text) if text else None
    finder = _FINDERS[sample.answer_kind]
    if (field := field_of_object(parsed.text)) is not None and parsed.final is None:
        return finder(Claim(field, True), sample)
    if parsed.final is None and _DATA.fullmatch(parsed.text):
        return finder(Claim(parsed.text, True), sample)
    if parsed.final is None:
        text = _MATRIX.sub(lambda found: " ".join(_ROW_GAP.sub(r"\\\\", found[0]).split()), parsed.text)
        return _in_prose(text, parsed.is_cut, sample, finder)
    found = finder(Claim(parsed.final, True), sample)
    box = f"\\boxed{{{parsed.final}}}"
    sentence = next((one for one in reversed(sentences(parsed.text)) if box in one), "")
    before, _, behind = sentence.partition(box)
    if _REFUTED.match(behind) or any(not clause.is_affirmed for clause in clauses(before)[-1:]):
        return _UNCLEAR  # "\\boxed{7} is wrong"
    if sample.answer_kind == "mathematics" and len(boxes := boxed(sentence)) > 1 and _SEVERAL.search(sample.question):
        return finder(Claim(", ".join(boxes), True), sample)
    if not {finder(Claim(one, True), sample) for one in parsed.beside} <= {found}:
        return _UNCLEAR
    return _revised(found, parsed.after, parsed.is_cut, sample, finder)


def _in_prose(text: str, is_cut: bool, sample: Sample, finder: _Finder) -> Found | None:
    if (explicit := last_explicit(text, is_cut)) is not None:
        stated, behind = explicit
        if (found := finder(Claim(stated, True), sample)) is not None:
            return _revised(found, behind, is_cut, sample, finder)
    if sample.answer_kind == "yes_no" and len(text) <= _MAX_SHORT:
        return finder(Claim(text, False), sample)
    rest = correction(text, last=True)
    if rest is not None and (found := _last(rest, is_cut, sample, finder)) is not None:
        return found
    return _first(text, is_cut, sample, finder) or _last(text, is_cut, sample, finder)


def _revised(found: Found | None, rest: str, is_cut: bool, sample: Sample, finder: _Finder) -> Found | None:
    """``found``, or the answer of a change of mind behind it."""
    if (changed := correction(rest)) is None:
        return found
    later = _in_prose(changed, is_cut, sample, finder)
    if later is None:
        return _UNCLEAR if _TAKEN_BACK.search(changed) else found
    return found if later == _UNCLEAR and is_check(changed) else later


def _first(text: str, is_cut: bool, sample: Sample, finder: _Finder) -> Found | None:
    """The answer of the first statement, where it is one alone and no later statement gives another."""
    parts = sentences(text)
    if (
        len(parts) < 2
        or not is_statement(parts[0])
        or sample.answer_kind not in ("multiple_choice", "yes_no")
        or correction(text) is not None
    ):
        return None
    found = finder(Claim(parts[0], False), sample)
    if found is None or found.answer is None:
        return None
    later = {finder(Claim(one, False), sample) for one in parts[1:] if is_statement(one)}
    return found if later <= {found, None, _UNCLEAR} else None


def _last(text: str, is_cut: bool, sample: Sample, finder: _Finder) -> Found | None:
    """The answer of the last statement that gives one, where it concludes or no earlier one gives another."""
    parts = sentences(text)
    is_short = len(parts) == 1 and len(text) <= _MAX_BARE
    used = [one for one in (parts[:-1] if is_cut else parts) if is_short or is_statement(one)]
    claims = [Claim(one[:MAX_STATEMENT_CHARACTERS], False) for one in used]
    for index in reversed(range(len(claims))):
        if (found := finder(claims[index], sample)) is not None:
            break
    else:
        return None
    last = claims[index].text
    if found == _UNCLEAR or _DECISION.search(last) or conclusion(last):
        return found
    return found if {finder(one, sample) for one in claims[:index]} <= {found, None, _UNCLEAR} else _UNCLEAR


def _known(sample: Sample) -> list[str]:
    """The stems that a statement may have beside its answer."""
    return stems(" ".join((plain(sample.question), *sample.options)))


def _choice(claim: Claim, sample: Sample) -> Found | None:
    choices = tuple((letter, with_digits(option)) for letter, option in choices_of(sample))
    text = with_digits(without_formatting(_marked_right(claim.text)))
    if _CROSS.search(text):
        return _UNCLEAR if claim.is_final else None
    if any(bare_text(option).upper() in dict(choices).keys() - {letter} for letter, option in choices):
        return _certain_letter(claim.text, dict(choices))
    readings = (claim.text, text, conclusion(claim.text) or "")
    named = (letters_in(one, known) for one in readings if one for known in (choices_of(sample), choices))
    letters = _by_name(text, sample, choices) or next(filter(None, named), set())
    if not letters:
        return _by_text(text, choices, sample)
    if len(letters) > 1:
        return _UNCLEAR
    letter = min(letters)
    of_option = stems(f"{letter} {dict(choices).get(letter, '')}")
    is_decision = _DECISION.search(text) is not None and not _TENTATIVE.search(text)
    is_label = _LABEL.match(text) is not None and affirmed(text) == text
    others = stems(" ".join(option for _, option in choices)) + [one.lower() for one, _ in choices]
    if claim.is_final or is_decision or is_label or is_echo(text, [*stems(sample.question), *of_option], others):
        return Found(letter, letter)
    return _UNCLEAR


def _certain_letter(text: str, options: dict[str, str]) -> Found:
    """The answer where one option's text is another's letter: "(A)" and "option A" name the letter, "A" is unclear."""
    stated = _CERTAIN_LETTER.fullmatch(without_lead_in(without_formatting(text)).strip())
    letter = (stated[1] or stated[2]).upper() if stated else ""
    is_certain = stated and letter in options and (not stated[3] or same_text(stated[3], options[letter]))
    return Found(letter, letter) if is_certain else _UNCLEAR


def _by_name(text: str, sample: Sample, choices: Choices) -> set[str]:
    """The options of the names that a question gives them ("Option 1: ..."), where ``text`` has any of these."""
    names = {
        name.casefold(): letter
        for name, option in _NAMED_OPTION.findall(f"{sample.question}\n{sample.details.get('question', '')}")
        for letter, known in choices
        if same_text(option, known)
    }
    return {letter for name, letter in names.items() if re.search(rf"\b{name}\b", affirmed(text).casefold())}


def _marked_right(text: str) -> str:
    """Of a list in which one line alone is ticked that line."""
    ticked = [line for line in text.splitlines() if _TICK.search(line) and not _CROSS.search(line)]
    return _TICK.sub("", ticked[0]) if len(ticked) == 1 and _CROSS.search(text) else text


def _by_text(text: str, choices: Choices, sample: Sample) -> Found | None:
    """The one option whose words stand in a statement, in their order, beside those of the question alone."""
    main = affirmed(_SUBORDINATE.sub(" ", without_reason(text)))
    options = {letter: stems(option) for letter, option in choices if option}
    if any(_SYMBOL.search(option) for _, option in choices):
        # Digits, signs and single letters are read as they are written.
        found = {letter for letter, option in choices if option and _stands_in(option, main)}
    else:
        found = {letter for letter, own in options.items() if own and _in_order(own, stems(main))}
    found = {one for one in found if not any(set(options[one]) < set(options[other]) for other in found)}
    if not found:
        return None
    letter = min(found)
    if stems(main) == options[letter] and len(options[letter]) > 1 and not same_text(main, dict(choices)[letter]):
        return None  # a part of the option, which may be another thing
    known = [*stems(sample.question), *options[letter]]
    others = [word for one, own in options.items() if one != letter for word in own]
    numbers = re.findall("[0-9]+", f"{sample.question} {dict(choices)[letter]}")
    has_own_numbers = set(re.findall("[0-9]+", main)) <= set(numbers)
    if len(found) > 1 or not (has_own_numbers and is_echo(text, known, others)):
        return _UNCLEAR
    return Found(letter, letter)


def _stands_in(option: str, text: str) -> bool:
    before, behind = r"(?<![\w.,:$€£+\-/^=])", rf"(?![\w%¢°/^=+-]|[.,:]\d| ?(?:{_UNITS})\b)"
    return re.search(before + re.escape(option) + behind, text) is not None


def _in_order(words_of: list[str], text: list[str]) -> bool:
    rest = iter(text)
    return all(word in rest for word in words_of)


def _select(claim: Claim, sample: Sample) -> Found | None:
    selected = selected_letters(without_formatting(claim.text), choices_of(sample))
    if selected is None:
        return None
    answer = ", ".join(sorted(selected)) or NONE_RIGHT
    return Found(answer, answer)


def _yes_no(claim: Claim, sample: Sample) -> Found | None:
    text = without_formatting(claim.text)
    sides = stated_sides(text)
    if not sides:
        side = _echoed_side(text, sample)
        return Found(side, side) if side else None
    if len(sides) > 1:
        return _UNCLEAR
    if not claim.is_final and ("?" in text or _OF_CLAUSE.search(text)):
        return _UNCLEAR
    side = min(sides)
    is_plain = affirmed(text) == text if side == "yes" else _LEADING_NO.match(text) or text.count("not") < 2
    return Found(side, side) if claim.is_final or (is_plain and not _BUT.search(text)) else _UNCLEAR


def _echoed_side(text: str, sample: Sample) -> str | None:
    """Yes for a question's own words in their order, no for these with one "not"; None for other words."""
    if short := _SHORT_SIDE.fullmatch(text.strip()):
        return "no" if short[1] else "yes"
    question, stated = stems(sample.question), stems(without_reason(text))
    if not question:
        return None
    if question == stated and affirmed(text) == text:
        return "yes"
    is_denied = len(denials := _NOT.findall(text)) == 1 and denials != [""]
    return "no" if is_denied and question == stems(_NOT.sub(" ", without_reason(text))) else None


def _number(claim: Claim, sample: Sample) -> Found | None:
    text = _in_seconds(with_digits(without_formatting(claim.text)))
    if not claim.is_final:
        text = without_reason(text)
        concluded = conclusion(text) or _last_side(text, sample)
        if concluded and read_quantity(concluded)[0] is not None:
            text = concluded
    number, unit = read_quantity(text)
    if number is None:
        return _UNCLEAR if re.search(r"[0-9]", text) and not claim.is_final else None
    if not claim.is_final and not is_echo(
        _ASSIGNED.sub("", without_quantities(text)), _known(sample), any_language=True
    ):
        return _UNCLEAR
    gold, gold_unit = read_quantity(sample.answer)
    converted = in_unit_of(number, unit, _asked_unit(sample) or gold_unit)
    if converted is None:
        return Found(text[:80], "")  # of a unit that measures something else
    asks_percent = _PERCENT.search(f"{sample.question} {sample.details.get('unit', '')}") is not None
    is_percent = asks_percent or not _COUNT.search(sample.question) or (gold is not None and gold.is_percent)
    if converted.is_percent and not is_percent:
        return _UNCLEAR
    digits = rounded = _digits(converted)
    if (precision := sample.details.get("precision")) is not None:
        rounded = str(round(float(Fraction(digits)), int(precision)))  # as MathVista's rule: 1.25 -> 1.2
    percent = "%" if converted.is_percent and not asks_percent else ""
    return Found(digits + percent, rounded + percent + (f" {gold_unit.name}" if gold_unit else ""))


def _last_side(text: str, sample: Sample) -> str | None:
    """The last side of an equation of what a question asks for; None for other statements."""
    sides = re.split("[=≈]", text)
    left = sides[0].strip(" $*")
    is_asked = len(left) > 1 or _is_asked(left, sample.question)
    return sides[-1] if len(sides) > 1 and not _PROSE.search(re.sub("[A-Z]{2,3}", "", left)) and is_asked else None


def _in_seconds(text: str) -> str:
    """``text`` with lengths of time of several units in seconds: "1 hour and 30 minutes" -> "5400 seconds"."""

    def total(found: re.Match[str]) -> str:
        parts = [float(one or 0) for one in found.groups()]
        if sum(one is not None for one in found.groups()) < 2:
            return found[0]
        return f"{parts[0] * 3600 + parts[1] * 60 + parts[2]:g} seconds"

    return _LENGTH.sub(total, text)


def _asked_unit(sample: Sample) -> Unit | None:
    """The unit of the number that a question asks for, if it or its set names one."""
    given = str(sample.details.get("unit") or "").strip()
    if given:
        return parse_unit(given)
    named = (parse_unit(found[1]) for found in _NAMED_UNIT.finditer(sample.question))
    return next((unit for unit in named if unit is not None), None)


def _digits(number: ParsedNumber) -> str:
    """A number as digits: "1400", "0.375", "8/17"."""
    exact = number.exact if number.exact is not None else Fraction(repr(number.value))
    if exact.denominator == 1:
        return str(exact.numerator)
    decimals = next((n for n in range(1, 40) if (exact * 10**n).denominator == 1), None)
    if decimals is None:
        return f"{exact.numerator}/{exact.denominator}"
    text = f"{abs(exact.numerator) * 10**decimals // exact.denominator:0{decimals + 1}d}"
    return f"{'-' if exact < 0 else ''}{text[:-decimals]}.{text[-decimals:]}"


def _span(claim: Claim, sample: Sample) -> Found | None:
    text = with_digits(without_formatting(_MILLISECONDS.sub(r"\1.\2", claim.text)))
    spans = parse_spans(claim.text) or parse_spans(text)
    if not spans:
        return None
    if (
        _OTHER_UNIT.search(text)
        or len(spans) > 1
        or not (claim.is_final or is_echo(text, [*_known(sample), *_SPAN_WORDS], any_language=True))
    ):
        return _UNCLEAR
    start, end = min(spans)
    if end <= start:
        return _UNCLEAR
    answer = f"[{_seconds(start)}, {_seconds(end)}]"
    return Found(answer, answer)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def _box(claim: Claim, sample: Sample) -> Found | None:
    boxes = parse_boxes(claim.text)
    if not boxes:
        return None
    return Found(f"[{', '.join(f'{edge:g}' for edge in min(boxes))}]", claim.text) if len(boxes) == 1 else _UNCLEAR


def _exact(claim: Claim, sample: Sample) -> Found | None:
    text = without_lead_in(without_formatting(claim.text)).strip() or claim.text
    gold = _ARTICLE.sub("", without_formatting(sample.answer))
    is_prose = len(gold) > 2 and not is_formula(gold) and re.search("[^\\W\\d_]{2}", gold)
    inside = re.search(rf"(?<!\w){re.escape(gold)}(?![\w+#])", text, re.IGNORECASE) if is_prose else None
    around = f"{text[: inside.start()]} {text[inside.end() :]}" if inside else text
    if inside and is_echo(around, _known(sample)) and same_but_for_case(inside[0], gold):
        return Found(sample.answer, sample.answer)
    short = without_marks(text).rstrip(" .。!")
    is_spelled = short.isalpha() or short.replace(" ", "").isalpha()
    if is_spelled and short.replace(" ", "").casefold() == gold.replace(" ", "").casefold():
        return Found(sample.answer, sample.answer) if same_but_for_case(short, gold) or " " in short + gold else None
    (number, unit), (gold_number, gold_unit) = read_quantity(short), read_quantity(gold)
    if number and unit and gold_number and gold_unit and unit != gold_unit:
        converted = in_unit_of(number, unit, gold_unit)
        if converted is not None and converted.value == gold_number.value:
            return Found(short, sample.answer)
    return Found(short, short) if claim.is_final or len(short) <= _MAX_SHORT else None


def _mathematics(claim: Claim, sample: Sample) -> Found | None:
    text = claim.text
    asks_word = words(statement(sample.answer), gold=True) is not None
    if not _SUBSTANCE.search(text) and not claim.is_final and not asks_word:
        return None
    if not _ROUNDED.search(sample.question):
        text = _APPROXIMATELY.split(text)[0].strip() or text
    if not claim.is_final:
        text = conclusion(text) or text
    if not (stated := statement(text)):
        return None
    if not claim.is_final and not (asks_word and len(text.split()) <= _FEW_WORDS):
        prose = without_quantities(_NAME_OF_FUNCTION.sub(" ", _FORMULA.sub(" ", text)))
        if _PROSE.search(prose) and not is_echo(prose, [*_known(sample), *_WORKING], any_language=True):
            return _UNCLEAR
        if "=" in stated and "=" not in sample.answer and not _COMPARISON.search(stated):
            left = unspaced(stated.partition("=")[0])
            if not _is_asked(left, sample.question):
                return _UNCLEAR
            if "," not in stated and len(left) > 1 and left in _formulas(sample.question):
                text = stated = stated.rpartition("=")[2]
    if unspaced(stated) in _formulas(sample.question) - {unspaced(statement(sample.answer))}:
        return _UNCLEAR
    if _RADICAL_FORM.search(sample.question):
        for root in map(int, _ROOT.findall(stated.rpartition("=")[2])):
            if any(root % (factor * factor) == 0 for factor in range(2, min(1000, root))):
                return Found(stated, "")
    return Found(as_voted(stated), text)


def _is_asked(left: str, question: str) -> bool:
    """Whether a question asks for the left side of an equation: it has that as a formula, or no such variable."""
    letters = set(re.findall(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", " ".join(_FORMULA.findall(question))))
    name = left.partition("_")[0]
    is_new = len(name) == 1 and (name not in letters or letters == {name})
    return left in _formulas(question) or is_new or not re.search("[A-Za-z]", left)


def _formulas(question: str) -> set[str]:
    return {unspaced(statement(one.replace("?", ""))) for one in _FORMULA.findall(question)}


def as_voted(answer: str) -> str:
    """A number alone in the one spelling that votes count: "025" -> "25", "3,159" and "3159.0" -> "3159"."""
    number = _NUMBER_ALONE.fullmatch(answer.strip(" $"))
    if number is None:
        return answer
    sign, whole, decimals = number[1], number[2].replace(",", "").lstrip("0") or "0", (number[3] or "").rstrip("0")
    is_zero = whole == "0" and not decimals
    return f"{'' if is_zero else sign}{whole}{'.' if decimals else ''}{decimals}"


_FINDERS: dict[AnswerKind, _Finder] = {
    "multiple_choice": _choice,
    "multiple_select": _select,
    "yes_no": _yes_no,
    "exact": _exact,
    "numerical": _number,
    "regression": _number,
    "mean_relative_accuracy": _number,
    "mathematics": _mathematics,
    "time_span": _span,
    "box": _box,
}
