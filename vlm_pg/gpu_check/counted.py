"""Figures that ``vlm-pg bench paper`` counts, beside those that were measured at the same points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_pg.gpu_check.reading import Reading, read_json

# What a point is known by, in files of both.
_POINT = ("prefix", "generations", "response", "new_tokens", "groups")
# Names of the same dimensions.
_MODELS = {"7b": "Qwen2.5-VL-7B", "3b": "Qwen2.5-VL-3B", "8b": "Qwen3-VL-8B"}


def read_counted(path: Path, folder: Path) -> Reading:
    """Rows of measured figures with the counted ones of the same contestant, model and point.

    The counted file is searched for them and may be built in any way: an entry is a mapping with numbers that stands
    under, or beside, the name of its contestant and the numbers of its point.
    """
    counted = read_json(path)
    if counted is None:
        return Reading(problem="it wrote no result")
    entries = list(counted_entries(counted))
    rows = []
    for file in sorted(folder.glob("*.json")):
        measured = read_json(file)
        if isinstance(measured, dict) and measured.get("measurement") in ("step", "rollout"):
            rows += list(_beside(measured, entries))
    remarks = [] if rows else [f"no counted figure is of a point that was measured; what was counted is in {path.name}"]
    return Reading({"beside": rows}, "", remarks)


def _beside(
    measured: dict[str, Any], entries: list[tuple[dict[str, Any], dict[str, float]]]
) -> Iterator[dict[str, Any]]:
    model = (measured.get("settings") or {}).get("model")
    for point in measured.get("points") or []:
        place = {key: point[key] for key in _POINT if key in point}
        for name, entry in (point.get("contestants") or {}).items():
            for context, numbers in entries:
                if _same(context, name, model, measured["measurement"], place):
                    yield {
                        "measurement": measured["measurement"],
                        "model": model,
                        "contestant": name,
                        "point": place,
                        "measured": {"seconds": entry.get("median_seconds"), "peak_bytes": entry.get("peak_bytes")},
                        "counted": numbers,
                        "for": context.get("gpu") or context.get("card"),
                    }


def _same(context: dict[str, Any], name: str, model: Any, measurement: str, place: dict[str, int]) -> bool:
    """An entry that says nothing of a thing may be of any; but prefix and contestant it must name."""
    if context.get("contestant") != name or "prefix" not in context:
        return False
    if "model" in context and context["model"] not in (model, _MODELS.get(model)):
        return False
    if context.get("measurement", measurement) != measurement:
        return False
    return all(context.get(key, value) == value for key, value in place.items())


def counted_entries(
    data: Any, context: dict[str, Any] | None = None
) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """(what it is of, its numbers) of every mapping in ``data`` that says of which contestant it is.

    What it is of is gathered on the way down: texts, numbers of points, and the keys that it stands under
    ("contestants": {NAME: ...}, "models": {NAME: ...}).
    """
    context = context or {}
    if isinstance(data, list):
        for one in data:
            yield from counted_entries(one, context)
    if not isinstance(data, dict):
        return
    here = context | {key: value for key, value in data.items() if isinstance(value, str) or key in _POINT}
    numbers = {
        key: value
        for key, value in data.items()
        if key not in _POINT and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if numbers and "contestant" in here:
        yield here, numbers
    for key, value in data.items():
        if isinstance(value, dict) and key in ("contestants", "models", "gpus", "measurements"):
            for name, below in value.items():
                yield from counted_entries(below, here | {key.removesuffix("s"): name})
        elif isinstance(value, dict | list):
            yield from counted_entries(value, here)
