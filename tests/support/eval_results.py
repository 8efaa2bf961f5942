"""Small results folders of evaluations, as the report reads them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_pg.eval.contracts import Answered, Output, Reading
from vlm_pg.types import AnswerKind


def picture(shade: int, size: tuple[int, int] = (64, 36), form: str = "JPEG") -> bytes:
    """A picture of one colour."""
    target = io.BytesIO()
    Image.new("RGB", size, (shade % 256, 90, 160)).save(target, form)
    return target.getvalue()


def output(
    text: str = "<think>first red</think><answer>B</answer>",
    answer: str | None = "B",
    score: float | None = 1.0,
    note: str = "",
    cut_off: bool = False,
    counts: bool = True,
) -> Output:
    return Output(text, Reading(answer, score, note, counts), "length" if cut_off else "stop", 12)


def question(
    sample_id: str,
    outputs: Sequence[Output] = (),
    *,
    text: str = "Which colour is shown first?",
    options: Sequence[str] = ("A. red", "B. blue"),
    gold: str = "B",
    kind: AnswerKind = "multiple_choice",
    category: str = "order",
    cluster: str = "1.mp4",
    details: dict[str, Any] | None = None,
    fault: tuple[str, str] | None = None,
) -> Answered:
    return Answered(
        sample_id, text, tuple(options), gold, kind, category, cluster, details or {}, tuple(outputs), fault
    )


def strip(folder: Path, name: str, data: bytes) -> dict[str, Any]:
    """What was shown of a question whose strip of frames is this picture, written into a results folder."""
    (folder / "thumbnails").mkdir(parents=True, exist_ok=True)
    (folder / "thumbnails" / name).write_bytes(data)
    return {"frames": [f"thumbnails/{name}"], "seconds": [0.5, 12.25]}


def write_results(
    folder: Path,
    sets: dict[str, Sequence[tuple[Answered, dict[str, Any] | None]]],
    figures: dict[str, Any] | None = None,
    protocol: dict[str, Any] | None = None,
) -> Path:
    """A results folder with a file of answers a set; ``figures``: of each set, else accuracy 0.5."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        with (folder / f"answers_{name}.jsonl").open("w") as file:
            for answered, shown in rows:
                row = answered.to_row() | ({} if shown is None else {"shown": shown})
                file.write(json.dumps(row) + "\n")
    default = {name: {"accuracy": 0.5, "standard_error": 0.02, "n": len(rows)} for name, rows in sets.items()}
    result = {"sets": figures or default, "protocol": protocol or {"checkpoint": "runs/a/checkpoints/step-000100"}}
    (folder / "result.json").write_text(json.dumps(result))
    return folder
