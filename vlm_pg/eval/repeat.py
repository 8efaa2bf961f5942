"""Whether an evaluation that was repeated gave the same, and what could not be made equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError
from vlm_pg.eval.answer_files import answers_path, read_answers
from vlm_pg.eval.record import differences, read_record

_MOST_LINES = 12


def compared(before: Path, now: Path) -> tuple[bool, list[str]]:
    """Two results (``result.json``) of the same sets, their answers beside them.

    Returns:
        Whether all figures and answers are equal, and lines that say so, set by set.

    Raises:
        ConfigError: one of them is no result, or both are the same file.
    """
    if before.resolve() == now.resolve():
        raise ConfigError(f"{before} would be compared with itself. Two results are expected. Give another one.")
    then, here = read_record(before), read_record(now)
    lines = []
    if served := [one for one, record in (("earlier", then), ("later", here)) if "server" in record["decides"]]:
        lines.append(
            f"not known to be equal: weights and program of the server that gave the {' and the '.join(served)} answers"
        )
    for what in ("decides", "machine"):
        found = differences(then[what], here[what])
        lines += [f"not made equal: {line}" for line in found[:_MOST_LINES]]
        if len(found) > _MOST_LINES:
            lines.append(f"not made equal: {len(found) - _MOST_LINES} more values")
    figures = [json.loads(path.read_text("utf-8"))["sets"] for path in (before, now)]
    is_equal = True
    for name in dict.fromkeys([*figures[0], *figures[1]]):
        ours, line = _of_set(name, before, now, figures)
        is_equal = is_equal and ours
        lines.append(line)
    return is_equal, lines


def _of_set(name: str, before: Path, now: Path, figures: list[dict[str, Any]]) -> tuple[bool, str]:
    if name not in figures[0] or name not in figures[1]:
        return False, f"{name}: only in the {'earlier' if name in figures[0] else 'later'} result"
    scores = [one[name]["accuracy"] for one in figures]
    shown = " and ".join("none" if score is None else f"{score:.4f}" for score in scores)
    paths = [answers_path(path.parent, name) for path in (before, now)]
    if not all(path.is_file() for path in paths):
        return scores[0] == scores[1], f"{name}: accuracy {shown}; the answers do not lie beside both results"
    answers = [{one.sample_id: one for one in read_answers(path)} for path in paths]
    same = sum(answers[1].get(key) == one for key, one in answers[0].items())
    total = len(answers[0].keys() | answers[1].keys())
    return same == total and scores[0] == scores[1], f"{name}: accuracy {shown}; {same} of {total} questions equal"
