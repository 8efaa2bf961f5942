"""Boxes in an image: the one that an output states last."""

from __future__ import annotations

from vlm_pg.answers.box import check_box, parse_boxes
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.said import with_lists_on_one_line
from vlm_pg.eval.reading.thinking import Said
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample


def read_box(sample: Sample, said: Said, settings: RewardSettings) -> Reading:
    """The one box in the last tag, else in the last line that states any; several there are none.

    Returns:
        "[x1, y1, x2, y2]"; the score is the intersection with the gold box over their union (``rewards/box``).
    """
    whole = with_lists_on_one_line(said.text)
    lines = [said.final] if said.final is not None else [line for line in whole.splitlines() if parse_boxes(line)]
    text = lines[-1] if lines else ""
    found = parse_boxes(text)
    answer = f"[{', '.join(f'{edge:g}' for edge in next(iter(found)))}]" if len(found) == 1 else None
    verdict = check_box(text, sample, settings)
    return Reading(answer, verdict.value, verdict.note)
