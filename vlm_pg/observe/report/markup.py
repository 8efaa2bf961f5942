"""Templates of the page and what stands in them. Every piece of foreign text goes through ``shown``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, TypeVar

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vlm_pg.observe.text import visible

K = TypeVar("K")
T = TypeVar("T")

# Longer texts are cut: the page must open, and the run's files hold the whole.
MAX_FIELD_CHARACTERS = 2000
# Beyond any measurement; sums and scales of such numbers would overflow.
MAX_NUMBER = 1e100


def render(template: str, **values: Any) -> Markup:
    """A template of this package, filled in; all values but ``Markup`` are ``shown``."""
    return Markup(environment("vlm_pg.observe.report").get_template(template).render(values))


@cache
def environment(*packages: str) -> Environment:
    """What fills in the templates of these packages, the first that has one by the wanted name."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "number": number, "duration": duration}
    return environment


def shown(text: object, limit: int = MAX_FIELD_CHARACTERS) -> Markup:
    """``text`` as HTML text or attribute value: markup is escaped, control characters become visible symbols.

    What is longer than ``limit`` characters is cut, and says so. Lists and mappings stand where a damaged file has them
    in place of a text; what they hold is not shown.
    """
    if isinstance(text, Markup):
        return text
    if isinstance(text, list | dict | tuple | set):
        return Markup(f"({type(text).__name__} of {len(text):,})")
    try:
        words = str(text)
    except ValueError:  # a whole number of thousands of digits
        return Markup("(a number of too many digits)")
    more = len(words) - limit
    whole = escape(visible(words[:limit]))
    return whole + Markup(f" … {more:,} more characters in the run's files") if more > 0 else whole


def first(items: Sequence[T], count: int) -> tuple[list[T], int]:
    """The first ``count`` items, and how many more there are."""
    return list(items[:count]), max(0, len(items) - count)


def first_entries(mapping: Mapping[K, T], count: int) -> Iterable[tuple[K, T]]:
    """The first ``count`` entries of a mapping."""
    return islice(mapping.items(), count)


def percent(share: float | None, decimals: int = 1) -> str:
    """``0.523`` -> ``52.3 %``; a dash when there is no value."""
    return "–" if share is None else f"{100 * share:,.{decimals}f}\u202f%".replace("-", "−")


def number(value: float | None) -> str:
    """A number with as many digits as one reads at a glance: 12,345 / 14.6 / 0.612 / 0.0012 / 3.0e-06."""
    if value is None:
        return "–"
    size = abs(value)
    if value == int(value) and size < 1e9:
        return f"{int(value):,}".replace("-", "−")
    if size >= 1e9 or size < 1e-3:
        return f"{value:.1e}".replace("-", "−", 1) if value < 0 else f"{value:.1e}"
    decimals = 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.01 else 4
    return f"{value:,.{decimals}f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """``142.3`` -> ``2 min 22 s``."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number_or_none(value: object) -> float | None:
    """``value`` if it is a number one can draw, else None: a file written by halves must not stop the report."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if -MAX_NUMBER <= value <= MAX_NUMBER else None


def dict_at(value: object, *keys: str) -> dict:
    """The mapping found by following ``keys`` inside ``value``; empty where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
