"""Lengths of time written as a clock shows them: "1:30" where hours or seconds are asked for.

Where minutes are, "1:30" alone is read as nothing: a trip of 1:35 takes 95 minutes, an egg of 6:30 boils for 6.5, and
only who knows of trips and eggs tells them apart.
"""

from __future__ import annotations

import re
from fractions import Fraction

from vlm_pg.answers.units import Unit, parse_unit

_ASKS_LENGTH = re.compile(
    r"\bhow\s(?:long|much\s(?:longer|time)|many\s(?:more\s)?(?:hours|minutes|seconds))\b|\bduration\b|多长时间|多久",
    re.IGNORECASE,
)
_OF_VIDEO = re.compile(
    r"\bhow\s(?:long|many\s(?:minutes|seconds))\s(?:is|are|does|do)\s(?:this|the|a)\s(?:whole\s|entire\s)?"
    r"(?:video|clip|footage|recording|scene|shot|segment|trailer)\b",
    re.IGNORECASE,
)
_CLOCK = re.compile(r"[0-9]:[0-9]{2}|\bo['’]clock\b|\b[ap]\.?m\b", re.IGNORECASE)
# Nothing else may stand beside it: "at 6:30" is a moment, and "6:30 to 7:00" are two.
_LENGTH = re.compile(
    r"(?P<lead>(?:.{0,80}\b(?:for|takes?|took|lasts?|lasted)\s)?(?:about|around|approximately|roughly|exactly|约|大约)?\s?)"
    r"(?:(?P<hours>[0-9]{1,2}):)?(?P<first>[0-9]{1,3}):(?P<second>[0-5][0-9])"
    r"(?:\s?(?P<named>hours|minutes|mins?)|\s?\(?(?P<form>mm?:ss|m:s)\)?)?[\s.!。]{0,3}",
    re.IGNORECASE,
)
_OF_ANOTHER = re.compile(r"\b(?:video|clip|footage|recording|scene|timer|clock|timestamp)\b", re.IGNORECASE)
_SECOND, _MINUTE, _HOUR = (parse_unit(name) for name in ("s", "min", "h"))


def asks_length_of_time(question: str) -> bool:
    """Whether ``question`` asks how long something takes, and has no time of day from which that is worked out.

    Between 18:50 and 20:20 a film lasts "1:30", hours and minutes whatever unit is asked for.
    """
    return _ASKS_LENGTH.search(question) is not None and _CLOCK.search(question) is None


def is_of_video(question: str) -> bool:
    """Whether ``question`` asks how long a video or a part of it is: minutes and seconds, as players show them."""
    return _OF_VIDEO.search(question) is not None


def with_length_in_units(statement: str, unit: Unit | None, *, is_video: bool = False) -> str:
    """``statement`` with its one length as a clock shows it written in the unit asked for; as it was if it has none.

    Two numbers are hours and minutes where hours are asked for, and minutes and seconds where seconds are, where they
    say so ("6:30 minutes") or for a video; three are hours, minutes and seconds.

    with_length_in_units("1:30", seconds) -> "90 seconds"
    """
    found = _LENGTH.fullmatch(statement)
    if found is None or unit is None or not any(_is_same(unit, one) for one in (_SECOND, _MINUTE, _HOUR)):
        return statement
    if not is_video and _OF_ANOTHER.search(found["lead"]):
        return statement
    first, second = int(found["first"]), int(found["second"])
    named = (found["named"] or "").lower()
    if found["hours"]:
        seconds = 3600 * int(found["hours"]) + 60 * first + second
    elif named.startswith("h") or (_is_same(unit, _HOUR) and not named):
        seconds = 3600 * first + 60 * second
    elif named or found["form"] or is_video or _is_same(unit, _SECOND):
        seconds = 60 * first + second
    else:
        return statement
    divisor, name = (
        (3600, "hours") if _is_same(unit, _HOUR) else (60, "minutes") if _is_same(unit, _MINUTE) else (1, "seconds")
    )
    value = Fraction(seconds, divisor)
    written = str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
    return f"{found['lead']}{written} {name}"


def _is_same(unit: Unit, other: Unit | None) -> bool:
    return other is not None and unit.factor_to(other) == 1
