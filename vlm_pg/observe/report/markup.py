"""Small pieces of HTML and the numbers in them. Every piece of foreign text goes through ``esc``."""

from __future__ import annotations

import html

from vlm_pg.observe.text import visible


def esc(text: object) -> str:
    """``text`` as HTML text or attribute value: markup is escaped, control characters become visible symbols."""
    return html.escape(visible(str(text)), quote=True)


def section(anchor: str, title: str, body: str, lead: str = "") -> str:
    """One section of the page; ``title`` and ``lead`` are our own words, ``body`` is finished HTML."""
    lead_html = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section id="{anchor}"><h2>{title}</h2>{lead_html}{body}</section>'


def absent(sentence: str) -> str:
    """What stands where a section has nothing to show."""
    return f'<p class="absent">{esc(sentence)}</p>'


def table(head: list[str], rows: list[list[str]], css_class: str = "") -> str:
    """A table of finished HTML cells; every column but the first is right-aligned unless the class says otherwise."""
    head_html = "".join(f"<th>{cell}</th>" for cell in head)
    rows_html = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{css_class}"><thead><tr>{head_html}</tr></thead>'
        f"<tbody>{rows_html}</tbody></table></div>"
    )


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
    """``value`` if it is a number, else None: a summary written by hand or by halves must not stop the report."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def dict_at(value: object, *keys: str) -> dict:
    """The mapping found by following ``keys`` inside ``value``; empty where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
