"""Who is measured, as a measurement knows it without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any


class CannotRun(Exception):
    """This way does not work with this model on this machine; the message says why. The others go on."""


@dataclass(frozen=True)
class Contestant:
    """One way to do the work of a point.

    ``run``: where the process that measures finds it, "package.module:name". ``work``: how much there is to do for it.
    ``package``: what must be installed. ``done``: what it computes to the row, where that is known (`bench step` and
    `rollout`).
    """

    description: str
    work: Callable[..., Any]
    run: str
    package: str | None = None
    done: Callable[..., Any] | None = None

    def unavailable_because(self) -> str | None:
        """Why it cannot run here at all, or None."""
        if self.package is None or find_spec(self.package) is not None:
            return None
        return f"the package {self.package} is not installed (pip install {self.package.replace('_', '-')})"
