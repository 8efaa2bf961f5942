"""The chart of what was counted: of each point the roofline of every contestant, by kind of operation."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from vlm_pg.bench.drawing import COLORS, STYLE
from vlm_pg.bench.paper.counts import KINDS
from vlm_pg.bench.paper.roofline import WIRE
from vlm_pg.bench.paper.table import point_words, row_name, seconds_words
from vlm_pg.errors import ConfigError

DEVICE = "H100 SXM"
_ROW_HEIGHT, _PANEL_HEAD, _WIDTH, _HEAD = 0.24, 0.75, 7.2, 0.9  # inches


def write_chart(record: dict[str, Any], path: Path, device: str = DEVICE) -> Path:
    """Draw seconds of ``device`` by kind and write the SVG; matplotlib must be there (``require_matplotlib``).

    Raises:
        ConfigError: nothing was counted.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    panels: dict[str, list[dict[str, Any]]] = {}
    for entry in record["entries"]:
        if "counts" in entry:
            panels.setdefault(f"{entry['model']}, {entry['work']}: {point_words(entry)}", []).append(entry)
    if not panels:
        raise ConfigError("Nothing was counted, so there is nothing to draw. The reasons stand in the table.")
    heights = [_PANEL_HEAD + _ROW_HEIGHT * len(entries) for entries in panels.values()]
    height = sum(heights) + _HEAD
    title = f"Roofline of {device}: counted, not measured; lower bounds"
    drawn = io.BytesIO()
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - _HEAD / height))
        figure = Figure(figsize=(_WIDTH, height), layout=layout, facecolor="white")
        axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axis, (words, entries) in zip(axes, panels.items(), strict=True):
            _draw(axis, words, entries, device)
        figure.text(0.1 / _WIDTH, 1 - 0.25 / height, title, weight="bold")
        kinds = (*KINDS, WIRE) if "links" in record else KINDS
        keys = [Patch(color=color, label=kind) for kind, color in zip(kinds, COLORS, strict=False)]
        keys.append(Patch(fill=False, edgecolor=COLORS[-1], linestyle="--", label="launches"))
        figure.legend(handles=keys, loc="upper left", bbox_to_anchor=(0, 1 - 0.35 / height), ncols=len(keys))
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Title": title})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(drawn.getvalue())
    return path


def _draw(axes: Any, words: str, entries: list[dict[str, Any]], device: str) -> None:
    for row, entry in enumerate(entries):
        roof, left = entry["roofline"][device], 0.0
        for kind, color in zip((*KINDS, WIRE), COLORS, strict=False):
            if kind not in roof["kinds"]:  # nothing was sent
                continue
            seconds = roof["kinds"][kind]["seconds"]
            axes.barh(row, seconds, left=left, color=color, height=0.7)
            left += seconds
        axes.barh(row, roof["launch_seconds"], fill=False, edgecolor=COLORS[-1], linestyle="--", height=0.7)
        fits = "" if roof["fits"] else ", does not fit"
        axes.text(roof["seconds"], row, f" {seconds_words(roof['seconds'])}{fits}", va="center")
    longest = max(entry["roofline"][device]["seconds"] for entry in entries)
    axes.set(title=words, xlim=(0, 1.3 * longest), xlabel="seconds, at the least")
    axes.set_yticks(range(len(entries)), [row_name(entry) for entry in entries])
    axes.invert_yaxis()
