"""The hand-graded outputs, read once and by libyaml where PyYAML has it: a tenth of the time, and several files want
them while tests are collected."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

OUTPUTS = Path(__file__).parents[1] / "outputs"
TABLES = sorted(OUTPUTS.glob("*.yaml"))
LATER_TABLES = sorted(path for name in ("second", "third", "fourth") for path in (OUTPUTS / name).glob("*.yaml"))


@cache
def questions(path: Path) -> tuple[dict[str, Any], ...]:
    """Questions of a table with the outputs that were graded; they are not to be changed."""
    return tuple(yaml.load(path.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
