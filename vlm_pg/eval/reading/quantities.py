"""The numbers of a sentence with their units, and which of them stand for something else than one value."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from vlm_pg.answers.numbers import ParsedNumber, parse_number
from vlm_pg.answers.plain_text import NO_GAPS, WORD_LETTER
from vlm_pg.answers.units import Unit, parse_unit

MAX_QUANTITIES = 60

_VALUE = r"(?:[0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})"
_QUANTITY = re.compile(
    r"(?P<sign>(?<![\w)\]%.°])(?<![0-9)\]%°] )[-+](?=[0-9.$€£¥])|(?:(?<==)|(?<== )|(?<=^))[-+]\s)?"
    rf"(?<!{WORD_LETTER})(?<![0-9_^.])(?<!\^-)(?<!{WORD_LETTER}-)"
    r"(?P<currency>(?:USD|EUR|GBP|RM|US\$|[$€£¥₹])\s?)?"
    rf"(?:[0-9]{{1,9}} (?=[0-9]{{1,6}}\s?/\s?[0-9]))?"
    rf"(?P<value>{_VALUE})(?:e[+-]?[0-9]{{1,3}}(?![\w.])|\s?\^\s?-?[0-9]{{1,2}}(?![0-9.]))?"
    rf"(?P<divisor>(?P<slash>\s?/\s?){_VALUE})?"
    r"(?P<power>\s?[×x*·]\s?10\s?\^\s?\(?[+-]?[0-9]{1,3}\)?)?"
    r"(?P<percent>\s?(?:%|per\s?cents?\b|procent\w?|Prozent\b|pour\s?cent|por\s?cient[oa]|"
    r"por\s?cento|per\s?cento|процент\w{0,3}))?"
    r"(?:\s?(?:hundred|thousand|million|billion|dozen)s?\b|\s?(?:百万|[千万亿萬億](?!克|米|瓦))|k(?![\w]))?",
    re.IGNORECASE,
)
_AFTER = re.compile(
    r"\s?((?:(?:square|sq|cubic|cu|degrees?)\s)?[^\s\d,;:!?()^/=|<>≈\"]{1,24}[23]?"
    r"(?:\s?(?:\^\s?-?[0-9]|/|\bper\b|·)\s?[^\s\d,;:!?()^/=|<>≈]{0,12}){0,3})"
)
_FOREIGN_UNITS = {
    "h": "Stunde Stunden heure heures hora horas ora ore uur час часа часов часах 時間 시간 小时 小時",
    "min": "Minute Minuten minuto minutos minuti minuut minuten минута минуты минут 分間 분 分钟 分鐘",
    "s": "Sekunde Sekunden seconde secondes segundo segundos secondo secondi seconden секунда секунды секунд 초 秒間",
    "day": "days Tag Tage Tagen jour jours día días dia dias giorno giorni день дня дней 日",
    "year": "Jahr Jahre Jahren an ans année années año años ano anos anno anni год года лет 歳 岁 년",
    "m": "Meter Metern mètre mètres metro metros metri метр метра метров 미터 メートル",
    "cm": "Zentimeter Zentimetern centimètre centimètres centímetro centímetros сантиметр сантиметра сантиметров см "
    "센티미터 センチメートル センチ",
    "km": "kilomètre kilomètres kilómetro kilómetros quilômetros километр километра километров км",
    "g": "Gramm gramme grammes gramo gramos грамм грамма граммов г 그램 グラム",
    "kg": "Kilogramm kilogrammes kilogramo kilogramos килограмм килограмма килограммов кг",
    "m^2": "Quadratmeter qm м2 平米 平方メートル 제곱미터 sqm",
    "ft^2": "sqft",
    "inch": 'in. "',
    "°": "grad Grad degrés grados graus градусов градуса градус",
}
_UNITS_BY_NAME = {
    name: unit for symbol, names in _FOREIGN_UNITS.items() if (unit := parse_unit(symbol)) for name in names.split()
}
# What ends a unit of letters without a gap: "50 kg。".
_OTHER_SCRIPT = re.compile(rf"[{NO_GAPS}\u3000-\u303f\uff00-\uffef]")
_LONGEST_CJK_UNIT = 5
_BELOW_ZERO = re.compile(r"[^.,;]{0,24}\bbelow\s{1,3}(?:zero|0\b|freezing)", re.IGNORECASE)
_MINUS_WORD = re.compile(
    r"(?:(?<=^)|(?<=[:=(])|\b(?:is|was|be|at|of|to|ist|war|auf|est|es|"
    r"is about)\b)\s{0,3}\b(?:minus|negative)\s{1,3}(?=[0-9.])|"
    r"(?:负|零下|マイナス)\s{0,2}(?=[0-9.])",
    re.IGNORECASE,
)
_HUNDREDTHS = re.compile(r"百分之\s{0,2}([0-9]{1,9}(?:\.[0-9]{1,9})?)")
_HOUR_MINUTES = re.compile(r"(?<=[0-9])\s?(h|hr|hrs|hours?)\s?([0-9]{1,2})\s?m(?:in)?(?![\w])")
_FEET_INCHES = re.compile(r"(?<=[0-9])\s?(?:ft|feet|foot|['’′])\s?([0-9]{1,2})\s?(?:in(?:ches)?\b|\"|″)")
_MINUTES_SECONDS = re.compile(r"(?<=[0-9])\s?m\s?(?=[0-9]{1,2}\s?s(?:ec)?\b)")
_GLUED = re.compile(r"(?<=[0-9])(h|hr|min|m|ft)(?=[0-9])")

_BOUND_BEFORE = re.compile(
    r"(?:\b(?:more|less|[a-z]{2,12}er)\s{1,3}than|"
    r"\bat\s{1,3}(?:least|most)|\bup\s{1,3}to|\b(?:over|under|above|below|beyond|exceed(?:s|"
    r"ing)?|half|twice|double|triple|"
    r"minimum|maximum|sqrt|log|ln|sin|cos|tan|mod|modulo|multiple|multiples|error|"
    r"mehr\s{1,3}als|weniger\s{1,3}als|mindestens|"
    r"höchstens|über|unter|plus\s{1,3}de|moins\s{1,3}de|más\s{1,3}de|menos\s{1,3}de|"
    r"mais\s{1,3}de|più\s{1,3}di|более|менее|больше|меньше)"
    r"(?:\s{1,3}of)?\(?|[√∛∠]\(?|大于|小于|超过|至少|至多|多于|少于|不到|最多|最少|高于|低于|以上|"
    r"[<>≤≥≠±]=?)\s{0,3}"
    r"(?:about|around|the)?\s{0,3}$",
    re.IGNORECASE,
)
_BOUND_AFTER = re.compile(
    r"\s{0,3}(?:\+(?![\w\s])|\+$|(?:\w{1,12}\s{1,3})?or\s{1,3}(?:more|less|fewer|above|below|"
    r"so\s{1,3}more)\b|and\s{1,3}(?:above|below|up)\b|squared\b|cubed\b|"
    r"factorial\b|!|oder\s{1,3}(?:mehr|weniger)\b|ou\s{1,3}plus\b|o\s{1,3}más\b|"
    r"[\u4e00-\u9fff]{0,3}(?:以上|以下)|多(?!少)|以上|以下|이상|이하)",
    re.IGNORECASE,
)
# A number that names a thing, or tells where something is in a list: "frame 3", "step 2".
_LABEL_BEFORE = re.compile(
    r"(?:\b(?:frames?|steps?|images?|figures?|fig|options?|choices?|objects?|points?|questions?|"
    r"segments?|parts?|cases?|scenes?|"
    r"clips?|rows?|columns?|equations?|number|no|nr|page|line|chapter|section|option|room|"
    r"schritt|bild|étape|paso|шаг|base|version|"
    r"january|february|march|april|may|june|july|august|september|october|november|december)"
    r"\s{0,2}(?:#|№)?|#|№|第)\s{0,2}$",
    re.IGNORECASE,
)
_PART_AFTER = re.compile(
    r"\s{0,3}(?:\w{1,12}\s{1,3})?(?:out\s{1,3}of|of\s{1,3}(?:them|these|those|the|which|whom|"
    r"its|her|his|their|my|our|all)|von\s{1,3}(?:ihnen|den|diesen|[0-9])|"
    r"d['’]entre|de\s{1,3}(?:ellos|ellas|los|las|eles|elas))\b|\s{0,3}(?:more|additional|"
    r"others?|extra|further|another|weitere|"
    r"autres?|más|outros|outras)\b|\s{1,3}for\s{1,3}each\b",
    re.IGNORECASE,
)
_PART_BEFORE = re.compile(
    r"\b(?:out\s{1,3}of|of(?:\s{1,3}(?:the|these|those|all|her|his|its|my))?|another|other|"
    r"additional|first|last|next|plus|add|the\s{1,3}other|von(?:\s{1,3}den)?)\s{0,3}$",
    re.IGNORECASE,
)
_COMMA_OF_TOTAL = re.compile(
    r"\b(?:total|sum|length|width|area|distance|size|height|value|number|answer|count)\s{1,3}of\s{0,3}$", re.I
)
_RANGE = re.compile(
    r"\s{0,3}(?:-|~|→|(?:to|till|until|through|bis|à|a|até|do|tot|до)\b|至|到|から|에서|"
    r"～)\s{0,3}(?:about\s{1,3})?",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"\b(?:between|zwischen|entre|tra|fra|tussen|между)\s{1,3}(?:about\s{1,3})?$", re.IGNORECASE)
_AND = re.compile(r"\s{0,3}(?:and|und|et|y|e|en|и)\s{1,3}(?:about\s{1,3})?|和|与", re.IGNORECASE)
_CHANGE = re.compile(
    r"\b(?:fell|fall|falls|fallen|dropped|drops?|rose|rises?|risen|increased?s?|decreased?s?|"
    r"went|goes|gone|changed?s?|cools?|cooled|"
    r"warmed|reduced|sank|grew|grown|climbed)\b[^.]{0,24}?\bfrom\s{0,3}$",
    re.IGNORECASE,
)
_OPERATOR_BEFORE = re.compile(
    r"(?:(?:[+×÷*·^]|[0-9)\]]\s?/|[0-9)\]%°]\s?-|\b[a-z]\s?-)\s?|\b(?:times|plus|minus|over|"
    r"divided\s{1,3}by|multiplied\s{1,3}by|mal|geteilt\s{1,3}durch|menos|"
    r"mais|más|por|fois|moins|multiplié\s{1,3}par|by|per|x)\s{1,3}|[乘加减除以])$",
    re.IGNORECASE,
)
_OPERATOR_AFTER = re.compile(
    r"\s?(?:[+×÷*·^/](?!\s?$)|-\s?(?:[0-9(√]|[a-z]\b)|x\s?[0-9(]|\(\s?[0-9]|[a-z]\s?[+=^-]|sqrt|"
    r"[√π])|\s{1,3}(?:times|plus|minus|divided|multiplied|mal|menos|fois|moins|by|"
    r"x)\s{1,3}(?:USD\s)?[$€£]?[0-9(]|[乘加减除]",
    re.IGNORECASE,
)
_IDENTIFIER_AFTER = re.compile(
    rf":[0-9]|(?:st|nd|rd|th|er|ème|º|ª)(?!{WORD_LETTER})|-(?:[a-z]{{2,}})|\s?月|-й|-го", re.IGNORECASE
)
_COMPOUND_GAP = re.compile(r"\s{0,3}(?:,\s?)?(?:(?:and|und|et|y|e|и)\s{1,3})?", re.IGNORECASE)
_WINDOW = 48


@dataclass(frozen=True)
class Quantity:
    """A number of a text. ``start`` and ``end``: where it stands, its unit included.

    ``aside``: why it is not the value of anything by itself ("bound", "range", "operand", "part"), "" if it may be.
    """

    number: ParsedNumber
    unit: Unit | None
    start: int
    end: int
    aside: str = ""


def plain_quantities(text: str) -> str:
    """``text`` with one spelling for signs in words and for units that several numbers make up."""
    text = _HUNDREDTHS.sub(
        r" \1% ",
        _MINUS_WORD.sub(
            lambda match: re.sub(r"(?i)minus|negative|负|零下|マイナス", " -", match[0]).replace("- ", "-"), text
        ),
    )
    text = _HOUR_MINUTES.sub(r" \1 \2 min", text)
    text = _FEET_INCHES.sub(r" ft \1 inches", text)
    text = _MINUTES_SECONDS.sub(" min ", text)
    return _GLUED.sub(r"\1 ", text)


def quantities_in(text: str) -> list[Quantity]:
    """The first numbers of ``text``; ordinals, times of day and numbers within names are none.

    Args:
        text: in one spelling (``spelling.py``), number words as digits.
    """
    found: list[Quantity] = []
    for match in _QUANTITY.finditer(text):
        if len(found) >= MAX_QUANTITIES:
            break
        quantity = _quantity(text, match)
        if quantity is not None:
            found.append(quantity)
    return _asides(text, _compounds(text, found))


def unit_named(text: str) -> Unit | None:
    """The unit that ``text`` begins with, in any language known here; None if with none."""
    unit, _ = _unit_after(text, 0)
    return unit


def _quantity(text: str, match: re.Match[str]) -> Quantity | None:
    start, end = match.span()
    before, after = text[max(0, start - _WINDOW) : start], text[end : end + _WINDOW]
    if re.search(r"[0-9]:$", before) or _IDENTIFIER_AFTER.match(after):
        return None
    number = parse_number(match[0].replace("USD", "$").strip())
    if number is None:
        return None
    unit, unit_end = _unit_after(text, end)
    if unit is None and re.match(rf"{WORD_LETTER}|_[0-9A-Za-z]", after):
        return None  # "3D", "2x"
    if unit is None and match["currency"]:
        unit = parse_unit(match["currency"].strip())
    aside = ""
    if match["divisor"] and match["slash"].strip() != match["slash"] and _side_by_side(match):
        aside = "range"
    if _LABEL_BEFORE.search(before):
        aside = "part"
    if below := _BELOW_ZERO.match(text, unit_end):
        number, unit_end = (
            replace(number, value=-abs(number.value), exact=number.exact and -abs(number.exact)),
            below.end(),
        )
    return Quantity(number, unit, start, unit_end, aside)


def _side_by_side(match: re.Match[str]) -> bool:
    """Whether "1400 / 1250" is two values rather than a fraction, which has few digits."""
    return len(match["value"]) >= 3 and len(match["divisor"].strip(" /")) >= 3


def _unit_after(text: str, place: int) -> tuple[Unit | None, int]:
    """The unit at ``place`` and where it ends."""
    match = _AFTER.match(text, place)
    if match is None:
        return None, place
    written = match[1]
    if re.match(r"[\u3040-\u9fff\uac00-\ud7a3]", written):
        for length in range(min(_LONGEST_CJK_UNIT, len(written)), 0, -1):
            if unit := _unit(written[:length]):
                return unit, match.start(1) + length
        return None, place
    written = _OTHER_SCRIPT.split(written, maxsplit=1)[0]
    while written:
        bare = written.rstrip(".-'’")
        if bare and (unit := _unit(bare)):
            return unit, match.start(1) + len(bare)
        shorter = re.match(r"(.*)[\s/·^-]", written, re.DOTALL)
        written = shorter[1].rstrip() if shorter else ""
    return None, place


def _unit(name: str) -> Unit | None:
    return parse_unit(name) or _UNITS_BY_NAME.get(name) or _UNITS_BY_NAME.get(name.lower() if len(name) > 3 else name)


def _compounds(text: str, found: list[Quantity]) -> list[Quantity]:
    """Neighbours of one kind, the second in a smaller unit, are one: "1 hour and 30 minutes" is 90 minutes."""
    merged: list[Quantity] = []
    for quantity in found:
        last = merged[-1] if merged else None
        if last and last.unit and quantity.unit and _COMPOUND_GAP.fullmatch(text[last.end : quantity.start]):
            factor = last.unit.factor_to(quantity.unit)
            if factor is not None and factor > 1 and 0 <= quantity.number.value < factor:
                exact = Fraction(repr(last.number.value)) * factor + Fraction(repr(quantity.number.value))
                merged[-1] = Quantity(ParsedNumber(float(exact)), quantity.unit, last.start, quantity.end, last.aside)
                continue
        merged.append(quantity)
    return merged


def _asides(text: str, found: list[Quantity]) -> list[Quantity]:
    """The same, those that are bounds, ranges, operands or parts marked as that."""
    marked = [_marked(text, quantity) for quantity in found]
    for place in range(1, len(marked)):
        first, second = marked[place - 1], marked[place]
        gap, before = text[first.end : second.start], text[max(0, first.start - _WINDOW) : first.start]
        is_between = _AND.fullmatch(gap) and _BETWEEN.search(before)
        if not is_between and not _RANGE.fullmatch(gap):
            continue
        if re.search(r"\bto\b|→", gap) and _CHANGE.search(before):
            marked[place - 1] = replace(first, aside="range")
        else:
            marked[place - 1], marked[place] = replace(first, aside="range"), replace(second, aside="range")
    return marked


def _marked(text: str, quantity: Quantity) -> Quantity:
    if quantity.aside:
        return quantity
    before, after = text[max(0, quantity.start - _WINDOW) : quantity.start], text[quantity.end : quantity.end + _WINDOW]
    if _BOUND_BEFORE.search(before) or _BOUND_AFTER.match(after):
        return replace(quantity, aside="bound")
    if _OPERATOR_BEFORE.search(before) or _OPERATOR_AFTER.match(after):
        return replace(quantity, aside="operand")
    if (_PART_BEFORE.search(before) and not _COMMA_OF_TOTAL.search(before)) or _PART_AFTER.match(after):
        return replace(quantity, aside="part")
    return quantity
