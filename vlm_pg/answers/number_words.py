"""Numbers in words become digits, in English and Chinese."""

from __future__ import annotations

import re

from vlm_pg.answers.numbers import ONES, TENS

_VALUES = {word: value for value, word in enumerate(ONES)} | {word: 10 * place for place, word in enumerate(TENS, 2)}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_ONE, _SCALE = "|".join(_VALUES), "|".join(_SCALES)
_ENGLISH = re.compile(
    rf"(?<![\w-])(?!one\sof\b|(?<=\b[Tt]he\s)one\b|(?<=\bno\s)one\b)(?:(?:{_ONE})|a\s(?={_SCALE})(?:{_SCALE}))"
    rf"(?:(?:\s|-|\sand\s)(?:{_ONE}|{_SCALE}))*(?![\w-])",
    re.IGNORECASE,
)
_DIGITS = {sign: value for value, sign in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
_PLACES = {"十": 10, "百": 100, "千": 1000}
_COUNTED = "个人名只张把次件条台辆本座位层岁秒分米厘块种双"
_CHINESE = re.compile(
    rf"(?<!第)(?<![{''.join(_DIGITS)}十百千万])[{''.join(_DIGITS)}十百千]{{1,9}}(?=[{_COUNTED}]|[\s。，,.)）]|$)"
)


def with_digits(text: str) -> str:
    """``text`` with digits for number words: "twenty-five chairs" -> "25 chairs"; "三十五个" -> "35个"."""
    return _CHINESE.sub(_chinese, _ENGLISH.sub(_english, text))


def _english(found: re.Match[str]) -> str:
    total = current = 0
    last = 10**9
    for word in re.findall(r"[a-z]+", found[0].lower()):
        if word in ("and", "a"):
            continue
        if word in _SCALES:
            current = max(current, 1) * _SCALES[word]
            if word != "hundred":
                total, current = total + current, 0
            last = 100
            continue
        value = _VALUES[word]
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
    if len(text) > 1 and not any(sign in _PLACES for sign in text):
        return "".join(str(_DIGITS[sign]) for sign in text)
    for sign in text:
        if sign in _PLACES:
            total += (digit or 1) * _PLACES[sign]
            digit = 0
        else:
            digit = _DIGITS[sign]
    return str(total + digit)
