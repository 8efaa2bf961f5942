"""The engine of every HTML report: one self-contained page in one style, for light and dark, narrow and wide screens.

A report is a template that extends ``base.html`` and fills its blocks; ``macros.html`` has sections, tables and bars.
Every value but ``Markup`` is escaped (``shown``).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from vlm_pg import __version__
from vlm_pg.files import write_bytes_atomic
from vlm_pg.observe.text import visible

_HERE = Path(__file__).parent
HOVER_SCRIPT = _HERE / "hover.js"
# Longer texts are cut: the page must open, and the run's files hold the whole.
MAX_FIELD_CHARACTERS = 2000
# Beyond any measurement; sums and scales of such numbers would overflow.
MAX_NUMBER = 1e100


def write_page(path: Path, template: Path, title: str, **values: Any) -> Path:
    """Write a page (see ``page``) in one piece and return its path."""
    write_bytes_atomic(path, page(template, title, **values).encode("utf-8", "replace"))
    return path


def page(
    template: Path,
    title: str,
    scripts: Sequence[Path] = (),
    styles: Sequence[Path] = (),
    tiles: Sequence[Mapping[str, Any]] = (),
    nav: Sequence[tuple[str, str]] = (),
    **values: Any,
) -> Markup:
    """A whole page. Its policy lets the browser load nothing and run only ``scripts``.

    Args:
        template: a file that extends ``base.html``, in a folder whose other files it may include.
        styles: CSS files after the common one.
        tiles: key numbers, see ``tile``.
        nav: (anchor, name) of sections.
        values: of the template.
    """
    sources = [Markup(script.read_text("utf-8")) for script in scripts]
    digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode("ascii") for source in sources]
    allowed = "; script-src " + " ".join(f"'sha256-{digest}'" for digest in digests) if digests else ""
    return render(
        template,
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'{allowed}",
        style=Markup("").join(Markup(style.read_text("utf-8")) for style in (_HERE / "style.css", *styles)),
        scripts=sources,
        title=title,
        tiles=tiles,
        nav=nav,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **values,
    )


def render(template: Path, **values: Any) -> Markup:
    """A template filled in; all values but ``Markup`` are ``shown``."""
    return Markup(_environment(template.parent).get_template(template.name).render(values))


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=FileSystemLoader([folder, _HERE / "templates"]),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "number": number, "duration": duration}
    return environment


def tile(title: str, value: str, note: str | Markup, start: str | None = None) -> dict[str, str | None]:
    """A key number; ``start``: its value at the beginning of the run."""
    return {"title": title, "start": start, "value": value, "note": note}


def accuracy_figure(entry: Mapping[str, Any]) -> dict[str, float | None] | None:
    """Accuracy and standard error of an evaluation, and the ends of its bar from 0 to 1; None without an accuracy."""
    accuracy, error = number_or_none(entry.get("accuracy")), number_or_none(entry.get("standard_error"))
    if accuracy is None:
        return None
    low, bar, high = (min(max(accuracy + sign * (error or 0.0), 0.0), 1.0) for sign in (-1, 0, 1))
    return {"accuracy": accuracy, "error": error, "low": low, "bar": bar, "high": high}


def rates_by_k(rates: object) -> dict[int, float | None]:
    """``{"1": 0.5, "8": 0.9}`` in order of k; k is 0 for a single rate in place of the mapping."""
    if not isinstance(rates, dict):
        rate = number_or_none(rates)
        return {} if rate is None else {0: rate}
    ks = sorted(int(k) for k in rates if len(k) < 10 and k.isdecimal() and k == str(int(k)))
    return {k: number_or_none(rates[str(k)]) for k in ks}


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
