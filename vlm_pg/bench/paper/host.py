"""What of a count is the host's own: packing, and the waits that have a reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from types import FrameType

# Where whole numbers are worked on before they go to the device, whatever calls it: (end of the file's path, function,
# or "" for all of that file). No kernel runs there, and nothing waits.
HOST = (
    ("vlm_pg/models/packing.py", ""),
    ("vlm_pg/models/checks.py", ""),
    ("vlm_pg/types.py", ""),
    ("vlm_pg/attention/plan.py", "split_rows"),
    ("vlm_pg/bench/case.py", "text_prompt"),
    # Of prompts, which are on the host until a pass moves its rows.
    ("vlm_pg/models/prompt_tree.py", ""),
    ("vlm_pg/rollout/prefill.py", "_rows"),
    ("vlm_pg/rollout/prefill.py", "_has_media"),
    ("vlm_pg/models/tower_inputs.py", ""),
)
# Of these numbers too, which are made of whole ones.
HOST_NUMBERS = (("vlm_pg/models/tower_inputs.py", ""),)
# Waits for the device that are meant: (end of the file's path, function) and why.
NAMED_WAITS = {
    ("vlm_pg/bench/training/grouped.py", "_step"): "the loss is handed back as a number, once behind the last backward",
    ("vlm_pg/rollout/engine.py", "_sample"): "who has finished, once a token for all rollouts together",
}


def is_on_host(numbers: bool = False) -> bool:
    """Whether what runs now was called, however far up, by one of ``HOST``; ``numbers``: of ``HOST_NUMBERS``."""
    return any(_is_one(frame.f_code.co_filename, frame.f_code.co_name, numbers) for frame in _frames())


def caller() -> tuple[str, str]:
    """(line, as path:number; function) outside of torch and of this package that asked for something."""
    frames = [*_frames()]
    ours = (
        frame for frame in frames if not any(p in frame.f_code.co_filename for p in ("/torch/", "/vlm_pg/bench/paper/"))
    )
    frame = next(ours, frames[-1])
    path = frame.f_code.co_filename
    # Of ours without the folder that the package lies in, so that equal code is named alike everywhere.
    _, package, within = path.rpartition("/vlm_pg/")
    line = f"vlm_pg/{within}" if package else "/".join(path.split("/")[-4:])
    return f"{line}:{frame.f_lineno}", frame.f_code.co_name


def reason_for(line: str, function: str) -> str | None:
    """Why the host waits there, or None where nobody has said so."""
    path = line.rpartition(":")[0]
    found = (why for (end, name), why in NAMED_WAITS.items() if path.endswith(end) and name == function)
    return next(found, None)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _is_one(path: str, function: str, numbers: bool) -> bool:
    """Remembered: every operation of a pass asks for all its callers."""
    return any(path.endswith(end) and name in ("", function) for end, name in (HOST_NUMBERS if numbers else HOST))
