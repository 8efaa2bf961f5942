"""The number that an answer states, and its grades: numerical, regression, mean relative accuracy.

Nothing is ever evaluated; the text is only matched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from vlm_pg.answers.clauses import affirmed, boxed_statement, clauses, explicit_statement, phrases
from vlm_pg.answers.plain_text import DECORATION, NO_GAPS, WORD_LETTER, plain_formula, without_layout, without_marks
from vlm_pg.answers.units import Unit, parse_unit
from vlm_pg.answers.verdict import GraderSettings, Verdict, shorten
from vlm_pg.types import Sample

# From zero to nineteen, and from twenty to ninety by tens.
ONES: tuple[str, ...] = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS: tuple[str, ...] = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

# Longer texts are not short answers that hold a number; the cap also bounds the time of the matching.
MAX_NUMBER_CHARACTERS = 400

MAX_POWER = 99
_LARGEST = 10**308

_DECORATION = DECORATION.replace("$", "")  # a dollar sign is a unit here
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s?\{\s?([+-]?[0-9.]{1,30})\s?\}\s?\{\s?([+-]?[0-9.]{1,30})\s?\}")
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\,)(?=[0-9]{3})")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s?([0-9])\s?([0-9])(?![0-9.])")
_FORMULA = re.compile(r"(?<!\\)\$(\$?)(?=[^$])([^$]{1,200})\$\1(?![0-9])")
_POWER_OF_TEN = re.compile(r"\s?(?:\\times|\\cdot|[×xX*·])\s?10\s?(?:\^|\*\*)\s?\{?\s?([+-]?[0-9]{1,4})\s?\}?")
_MINUS_WORD = re.compile(
    rf"(?<!{WORD_LETTER})(?<![0-9])(?:minus|negative)\s{{0,3}}(?=[$€£]?\.?[0-9])|(?:负|零下|マイナス)\s{{0,3}}(?=\.?[0-9])",
    re.IGNORECASE,
)
# Words and codes of currencies that are often written without a gap before the number: "RM12.8", "approx2.5".
_GLUED_WORD = re.compile(
    rf"(?<!{WORD_LETTER})(RM|Rs|USD|EUR|GBP|CNY|RMB|JPY|INR|HK|NT|US|approx|about|around|circa|ca|is|answer|total)\.?(?=[$€£]?\.?[0-9])",
    re.IGNORECASE,
)
_HUNDREDTHS = re.compile(r"百分之\s{0,2}([0-9]{1,9}(?:\.[0-9]{1,9})?)")
_SCALES = {
    "one": 1,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SCALES |= {"百": 10**2, "千": 10**3, "万": 10**4, "百万": 10**6, "亿": 10**8, "萬": 10**4, "億": 10**8, "k": 10**3}
# Bounds and changes: "more than 5", "5 or more", "5 squared" and "half of 5" are not 5.
_BOUND_BEFORE = re.compile(
    r"(?:\b(?:more|less|fewer|greater|larger|bigger|smaller|higher|lower|longer|shorter|older|younger|other|rather)\s{1,3}than|"
    r"\bat\s{1,3}(?:least|most)|\bup\s{1,3}to|\b(?:over|under|above|below|beyond|exceed(?:s|ing)?|half|twice|double|square|root|"
    r"between|from|no|minimum|maximum|log|ln|sin|cos|tan|or\s{1,3}equal\s{1,3}to)(?:\s{1,3}of)?\(?|"
    # Inside of roots and of fractions that are no numbers.
    r"(?:[√∛]|sqrt|frac)\s?[({\[]?|[\]}]\s?\{|大于|小于|超过|至少|至多|多于|少于|不到|最多|最少|高于|低于|[<>≤≥≠])\s{0,3}$",
    re.IGNORECASE,
)
_BOUND_AFTER = re.compile(
    r"\s{0,3}(?:\+(?!\w)|or\s{1,3}(?:more|less|fewer|above|below)\b|and\s{1,3}(?:above|below|up)\b|squared\b|cubed\b|factorial\b|"
    r"[\u4e00-\u9fff]{0,3}(?:以上|以下)|多(?!少)|[KMB](?![^\W_])|"
    r"(?:[*×·]|times|cdot)?\s{0,3}(?:pi(?![A-Za-z])|π|sqrt|√|frac))"
)
_CONCLUSION = re.compile(
    rf"(?:{phrases('so, therefore, thus, hence, but, altogether, in total')}\b|所以|因此|但是?|一共|总共|共)"
    r"\s{0,3},?\s{0,3}(?=.*[0-9])(.+)",
    re.IGNORECASE | re.DOTALL,
)
_CHARACTERS_BEFORE = 24

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    # Not inside a word, an exponent or another number: the 2 of "H2O", "m^2" or "m^{2}" is not the answer, and neither
    # is what follows the point in "v2.5".
    rf"(?<![0-9^])(?<!{WORD_LETTER})(?<!_)(?<!{WORD_LETTER}-)(?<![0-9]\.)(?<!\^\{{)(?<!\^-)"
    # After a digit or a bracket a minus is a range or a difference ("10-15"), not a sign.
    r"(?P<sign>(?<![0-9)\]%A-Za-z])(?<![0-9)\]%] )[+-] ?)?(?P<currency>[$€£¥₹])? ?(?P<late_sign>-)?"
    r"(?:(?P<whole>[0-9]{1,9}) (?=[0-9]{1,6} ?/ ?[0-9]))?"
    rf"(?P<value>{_DIGITS})(?!\.?[0-9])(?P<exponent>[eE][+-]?[0-9]{{1,4}})?"
    r"(?: ?/ ?(?P<divisor>[0-9]+(?:\.[0-9]+)?))?"
    r"(?: ?(?:\^|\*\*) ?\{? ?(?P<power>[+-]?[0-9]{1,9})\}?)?(?P<percent> ?(?:%|per ?cent\b))?"
    r"(?: ?(?P<scale>hundred|thousand|million|billion|trillion|dozen)\b|(?P<short>百万|[百千万亿萬億]|k(?![^\W_])))?"
)
_UNIT = re.compile(
    r"\s?((?:(?:square|sq\.?|cubic|cu\.?|degrees?)\s)?"
    # Of one script: the unit in "5 kg的水" is kg.
    rf"(?:[^\s\d,;:!?()^/、。{NO_GAPS}]{{1,20}}[23]?|[{NO_GAPS}]{{1,20}})"
    r"(?:\s?(?:\^\s?\{?-?[0-9]\}?|/|\bper\b)\s?[^\s\d,;:!?()^/、。]{0,12}){0,4})"
)
WORD_VALUES = {word: value for value, word in enumerate(ONES)}
WORD_VALUES |= {word: 10 * value for value, word in enumerate(TENS, start=2)}
_WORD_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_WORD, _WORD_SCALE = "|".join(WORD_VALUES), "|".join(_WORD_SCALES)
_ENGLISH = re.compile(
    rf"(?<![\w-])(?!one\sof\b|(?<=\b[Tt]he\s)one\b|(?<=\bno\s)one\b)(?:(?:{_WORD})|a\s(?={_WORD_SCALE})(?:{_WORD_SCALE}))"
    rf"(?:(?:\s|-|\sand\s)(?:{_WORD}|{_WORD_SCALE}))*(?![\w-])",
    re.IGNORECASE,
)
_HAN_DIGITS = {sign: value for value, sign in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
_HAN_PLACES = {"十": 10, "百": 100, "千": 1000}
_COUNTED = "个人名只张把次件条台辆本座位层岁秒分米厘块种双"
_CHINESE = re.compile(
    rf"(?<!第)(?<![{''.join(_HAN_DIGITS)}十百千万])[{''.join(_HAN_DIGITS)}十百千]{{1,9}}(?=[{_COUNTED}]|[\s。，,.)）]|$)"
)


@dataclass(frozen=True)
class ParsedNumber:
    """A finite number and whether it was written as a percentage ("50 %" is value 50.0, is_percent True).

    ``exact``: the number as it was written, which ``value`` holds to 16 digits; None where units were converted.
    """

    value: float
    is_percent: bool = False
    exact: Fraction | None = field(default=None, repr=False)


def read_quantity(text: str) -> tuple[ParsedNumber | None, Unit | None]:
    """The number that ``text`` states (None: none, or several different ones), and its unit, if that is known.

    Understood: signs ("-3", "minus 3", "负3"), decimals ("5.", ".5"), thousands separators ("1,234" or "1 234"),
    fractions ("3/4", "1 1/2", "\\frac{3}{4}"), scientific notation ("3e5", "3 x 10^5"), percent, "million" and "万",
    currency signs, units and words around the number, digits of any script. After an equals sign only what follows the
    last one counts ("2 + 3 = 5"). What a clause rejects does not count ("5, not 6"). A bound ("more than 5") is no
    number; of several numbers that counts to which the text comes at last ("2 men and 3 women, so 5").
    """
    boxed = boxed_statement(text)
    if len(text) > MAX_NUMBER_CHARACTERS:
        return read_quantity(boxed) if boxed else (None, None)
    plain = _plain_spelling(text)
    matches = list(_NUMBER.finditer(plain))
    for match in matches:
        before = plain[max(0, match.start() - _CHARACTERS_BEFORE) : match.start()]
        if _BOUND_BEFORE.search(before) or _BOUND_AFTER.match(plain, match.end()):
            return None, None
    found = set(map(_to_number, matches))
    if len(found) > 1 and (conclusion := boxed or _conclusion(plain)):
        return read_quantity(conclusion)
    written = (_written_unit(plain, match.end()) or match["currency"] or "" for match in matches)
    units = {unit for one in written if (unit := parse_unit(one)) is not None}
    return (found.pop() if len(found) == 1 else None), (units.pop() if len(units) == 1 else None)


def without_quantities(text: str) -> str:
    """``text`` with 0 for each number and the unit that it is written with: "about 5 km/h" -> "about 0"."""
    plain = _LATEX_FRACTION.sub(r" \1/\2 ", _SHORT_FRACTION.sub(r" \1/\2 ", _LATEX_THOUSANDS.sub(",", text)))
    plain = _POWER_OF_TEN.sub(r"e\1 ", _GLUED_WORD.sub(r"\1 ", _MINUS_WORD.sub(" -", plain)))
    plain = " ".join(_HUNDREDTHS.sub(r" \1% ", plain).split())
    pieces, end = [], 0
    for match in _NUMBER.finditer(plain):
        pieces += [plain[end : match.start()], "0"]
        end = match.end()
        if written := _written_unit(plain, end):
            end = plain.index(written, end) + len(written)
    return " ".join([*pieces, plain[end:]])


def read_answer_to(gold_text: str, text: str) -> tuple[ParsedNumber | None, ParsedNumber | None]:
    """The numbers of a gold answer and of an answer to it, the latter in the gold one's unit.

    None for one that states no number; for the answer also where its unit measures something else than the gold one's.
    """
    gold, gold_unit = read_quantity(gold_text)
    answer, unit = read_quantity(text)
    return gold, None if answer is None else in_unit_of(answer, unit, gold_unit)


def in_unit_of(number: ParsedNumber, unit: Unit | None, wanted: Unit | None) -> ParsedNumber | None:
    """``number`` in the ``wanted`` unit; unchanged where either has none, None where they measure different things.

    in_unit_of(ParsedNumber(1.5), parse_unit("m"), parse_unit("cm")) -> ParsedNumber(150.0)
    """
    if unit is None or wanted is None or unit == wanted:
        return number
    factor = unit.factor_to(wanted)
    if factor is None:
        return None
    return number if factor == 1 else ParsedNumber(float(Fraction(repr(number.value)) * factor), number.is_percent)


def _plain_spelling(text: str) -> str:
    """``text`` with one spelling for minus signs, spaces, fractions and powers of ten, without what it rejects."""
    plain = _FORMULA.sub(r" \2 ", without_layout(_LATEX_THOUSANDS.sub(",", plain_formula(text)))).replace(
        "\\approx", "≈"
    )
    plain = _LATEX_FRACTION.sub(r" \1/\2 ", _SHORT_FRACTION.sub(r" \1/\2 ", plain))
    plain = affirmed(without_marks(plain, _DECORATION))
    plain = _HUNDREDTHS.sub(r" \1% ", _GLUED_WORD.sub(r"\1 ", _MINUS_WORD.sub(" -", plain)))
    plain = _POWER_OF_TEN.sub(r"e\1 ", plain).replace("\\", "")
    return " ".join(re.split("[=≈]", plain)[-1].split())


def _conclusion(text: str) -> str | None:
    """What a text with several numbers comes to: "2 men and 3 women, so 5" -> "5"; None if it does not say."""
    if stated := explicit_statement(text):
        return stated
    last = _CONCLUSION.match(parts[-1].text) if len(parts := clauses(text)) > 1 else None
    return last[1] if last else None


def _written_unit(text: str, start: int) -> str:
    """The longest text at ``start`` that is a unit; "" for none."""
    after = _UNIT.match(text, start)
    written = after[1].rstrip(".") if after else ""
    while written and parse_unit(written) is None:
        written = written.rpartition(" ")[0]
    return written


def _to_number(match: re.Match[str]) -> ParsedNumber | None:
    """The value of one match; None if it is none that we can hold (1/0, 1e999)."""
    text = match["value"].replace(",", "").replace(" ", "") + (match["exponent"] or "")
    divisor, power = float(match["divisor"] or 1), int(match["power"] or 1)
    if not math.isfinite(float(text)) or divisor == 0.0 or abs(power) > MAX_POWER or (power < 0 and float(text) == 0.0):
        return None
    exact = Fraction(text) ** power / Fraction(match["divisor"] or 1) + int(match["whole"] or 0)
    exact *= _SCALES[(match["scale"] or match["short"] or "one").lower()]
    if (match["sign"] or match["late_sign"] or "").startswith("-"):
        exact = -exact
    # A float of more than 308 digits does not exist.
    value = float(exact) if abs(exact) < _LARGEST else math.inf
    return ParsedNumber(value, bool(match["percent"]), exact) if math.isfinite(value) else None


# A gold number of fewer units of the last place than this must be met within this share of it.
_FIRST_INEXACT = 2.0**53
_SMALL_UNITS, _SMALL_TOLERANCE = 5, 0.1


def check_numerical(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """1.0 if ``answer`` states the gold number, else 0.0.

    Two numbers are equal if they are after rounding to ``numerical_decimal_places``, or if they differ by at most
    ``numerical_tolerance`` times the gold one. Rounding must not erase a small gold number: below five units of the
    last place the two must also be within a tenth of it. Words around a number do not count, and units only where both
    have one: "1.5 m" is "150 cm", and no "1.5 kg". An answer that states no number, or several,
    is wrong; a gold answer that does is "no value".
    """
    return _graded(answer, sample, lambda predicted, gold: float(_equal(predicted, gold, settings)))


def _graded(
    answer: str, sample: Sample, grade: Callable[[ParsedNumber, ParsedNumber], float], *, relative: bool = False
) -> Verdict:
    """``grade`` of the predicted and the gold number; ``relative``: by a relative error, undefined to a gold 0."""
    gold, predicted = read_answer_to(sample.answer, answer)
    if gold is None:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not state one number")
    if relative and gold.value == 0.0:
        return Verdict(None, "gold answer is 0, to which a relative error is undefined")
    return Verdict(0.0, "answer does not state one number") if predicted is None else Verdict(grade(predicted, gold))


def _equal(predicted: ParsedNumber, gold: ParsedNumber, settings: GraderSettings) -> bool:
    """Whether two numbers agree; "50 %" agrees with both 50 (the unit was left out) and 0.5 (the same share)."""
    if min(abs(predicted.value), abs(gold.value)) >= _FIRST_INEXACT and predicted.exact and gold.exact:
        # Two different numbers may be one float.
        limit = abs(gold.exact) * Fraction(settings.numerical_tolerance)
        return abs(predicted.exact - gold.exact) <= limit
    decimal_places = settings.numerical_decimal_places
    # Whether rounding leaves enough of the gold number: all small ones would be 0, and equal to it.
    is_small = 0.0 < abs(gold.value) < _SMALL_UNITS * 10.0**-decimal_places
    is_left = not is_small or _close(predicted.value, gold.value, _SMALL_TOLERANCE)
    if round(predicted.value, decimal_places) == round(gold.value, decimal_places) and is_left:
        return True
    # Rounding errors of a product must not decide at the edge of the tolerance.
    tolerance = max(settings.numerical_tolerance * (1.0 + 1e-9), 1e-9)
    if settings.numerical_tolerance and _close(predicted.value, gold.value, tolerance):
        return True
    if predicted.is_percent == gold.is_percent:
        return False
    # Not rounded, since rounding a share to two places would make 0.4 % equal to 0.
    share, gold_share = (number.value / 100.0 if number.is_percent else number.value for number in (predicted, gold))
    return _close(share, gold_share, tolerance)


def _close(predicted: float, gold: float, tolerance: float) -> bool:
    return abs(predicted - gold) <= tolerance * abs(gold)


def check_regression(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """1 - min(1, |p - g| / |g|) for prediction p and gold g.

    An answer that states no number, or several, is wrong. The relative error to a gold answer of 0 is undefined: such a
    sample has no value whatever was predicted, so that the statistics of a group never mix the two.
    """

    def grade(predicted: ParsedNumber, gold: ParsedNumber) -> float:
        return 1.0 - min(1.0, abs(predicted.value - gold.value) / abs(gold.value))

    return _graded(answer, sample, grade, relative=True)


_THRESHOLDS = tuple(Fraction(percent, 100) for percent in range(50, 100, 5))


def check_mean_relative_accuracy(
    answer: str, sample: Sample, settings: GraderSettings, *, ties_pass: bool = False
) -> Verdict:
    """Share of the thresholds t = 0.50, 0.55, ..., 0.95 at which |p - g| / |g| < 1 - t, for prediction p and gold g.

    "Thinking in Space" (VSI-Bench), equation of MRA, with its strict inequality: 3 for a gold 4 earns 0.5, 5 for 10
    earns 0. Graders that write <= (the set's own code among them) give one threshold more where the error equals it:
    ``ties_pass``. Compared as decimal fractions, so that such a tie is one. A gold answer of 0, to which a relative
    error is undefined, has no value.
    """

    def grade(predicted: ParsedNumber, gold: ParsedNumber) -> float:
        # The decimals that were read: Fraction(1, 10) for 0.1, which in binary is slightly more.
        exact_gold = Fraction(repr(gold.value))
        error = abs(Fraction(repr(predicted.value)) - exact_gold) / abs(exact_gold)
        return sum(error < 1 - t or (ties_pass and error == 1 - t) for t in _THRESHOLDS) / len(_THRESHOLDS)

    return _graded(answer, sample, grade, relative=True)


def with_digits(text: str) -> str:
    """``text`` with digits for number words: "twenty-five chairs" -> "25 chairs"; "三十五个" -> "35个"."""
    return _CHINESE.sub(_chinese, _ENGLISH.sub(_english, text))


def _english(found: re.Match[str]) -> str:
    total = current = 0
    last = 10**9
    for word in re.findall(r"[a-z]+", found[0].lower()):
        if word in ("and", "a"):
            continue
        if word in _WORD_SCALES:
            current = max(current, 1) * _WORD_SCALES[word]
            if word != "hundred":
                total, current = total + current, 0
            last = 100
            continue
        value = WORD_VALUES[word]
        # "one two three" is no number, nor is "twenty twenty".
        if value >= last or (last < 20 and last != 0):
            return found[0]
        if current % 100 and not (current % 10 == 0 and value < 10):
            return found[0]
        current, last = current + value, value
    return str(total + current)


def _chinese(found: re.Match[str]) -> str:
    total = digit = 0
    text = found[0]
    if len(text) > 1 and not any(sign in _HAN_PLACES for sign in text):
        return "".join(str(_HAN_DIGITS[sign]) for sign in text)
    for sign in text:
        if sign in _HAN_PLACES:
            total += (digit or 1) * _HAN_PLACES[sign]
            digit = 0
        else:
            digit = _HAN_DIGITS[sign]
    return str(total + digit)
