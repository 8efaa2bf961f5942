"""Figures as lines for the console."""

from __future__ import annotations

from typing import Any


def table(results: dict[str, Any]) -> list[str]:
    """Lines for the console: one a set, categories and what is to be known of its figures indented."""
    lines = []
    for name, figures in results["sets"].items():
        lines.append(_line(name, figures))
        others = {key: one for key, one in figures.get("figures", {}).items() if key != figures.get("main")}
        lines += [f"    {key}: {_value(one)}" for key, one in others.items()]
        if "judged" in figures:
            lines.append(f"    {_judged(figures['judged'])}")
        if len(figures["by_category"]) > 1:
            lines += [f"    {_line(category, part)}" for category, part in figures["by_category"].items()]
        lines += [f"    note: {note}" for note in figures.get("notes", ())]
    return lines


def _line(name: str, figures: dict[str, Any]) -> str:
    if figures["accuracy"] is None:
        return f"{name}: no question could be scored"
    text = f"{name}: accuracy {figures['accuracy']:.3f}"
    if figures.get("standard_error") is not None:
        text += f" ± {figures['standard_error']:.3f}"
    text += f" (n {figures['n']}"
    if figures.get("chance") is not None:
        text += f", chance {figures['chance']:.2f}"
    if figures.get("format_rate") is not None:
        text += f", format {figures['format_rate']:.2f}"
    if figures.get("n_no_value"):
        text += f", {figures['n_no_value']} without a value"
    for key, words in (
        ("n_bad_media", "with bad media"),
        ("n_no_output", "without an output"),
        ("n_unparsed", "outputs unparsed"),
        ("n_truncated", "outputs truncated"),
        ("n_left_out", "outputs left out by the rule"),
    ):
        if figures.get(key):
            text += f", {figures[key]} {words}"
    for name_at, label in (("pass_at_k", "pass"), ("majority_at_k", "majority")):
        values = figures.get(name_at, {})
        text += "".join(f", {label}@{k} {value:.3f}" for k, value in values.items() if k != "1" and value is not None)
    return text + ")"


def _judged(figures: dict[str, Any]) -> str:
    error = "" if figures["standard_error"] is None else f" ± {figures['standard_error']:.3f}"
    accuracy = "no accuracy" if figures["accuracy"] is None else f"accuracy {figures['accuracy']:.3f}{error}"
    text = f"with the judge {figures['model'] or '(not reached)'}: {accuracy} (n {figures['n']}, asked about "
    text += f"{figures['n_asked']} outputs, {figures['n_raised']} raised, {figures['n_lowered']} lowered"
    for key, words in (
        ("n_valued", "scored that had no value"),
        ("n_undecided", "undecided"),
        ("n_unreached", "of them without a reply"),
    ):
        if figures[key]:
            text += f", {figures[key]} {words}"
    return text + ")"


def _value(figure: dict[str, Any]) -> str:
    if figure["value"] is None:
        return "none"
    error = "" if figure["standard_error"] is None else f" ± {figure['standard_error']:.3f}"
    return f"{figure['value']:.3f}{error}{' %' if figure['unit'] == 'percent' else ''} (n {figure['n']})"
