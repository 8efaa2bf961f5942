"""Losses and advantage estimators by name. Reading it loads no torch: an entry says where its function is.

What stands beside the entries here is a function of the user's own, by path: ``path/to/file.py:function`` or
``package.module:function``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A function, where it is, and what may not be set beside it.

    ``only``: setting of the section -> the one value that the function goes with, and what is said of another.
    """

    function: str
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


LOSSES: Mapping[str, Entry] = {
    "clip": Entry("vlm_pg.algorithms.losses:clip"),
    "cispo": Entry(
        "vlm_pg.algorithms.losses:cispo",
        {
            "ratio_level": (
                "token",
                "algorithm.loss is cispo and algorithm.ratio_level is sequence; CISPO weighs single tokens. Set "
                "algorithm.ratio_level=token or algorithm.loss=clip.",
            ),
            "dual_clip": (
                None,
                "algorithm.dual_clip bounds the clipped loss, and algorithm.loss is cispo. Set "
                "algorithm.dual_clip=null.",
            ),
        },
    ),
}
BASELINE_AND_SCALE = "baseline_and_scale"
ESTIMATORS: Mapping[str, Entry] = {BASELINE_AND_SCALE: Entry("vlm_pg.algorithms.advantages:baseline_and_scale")}


def known_or_own(name: str, known: Mapping[str, Entry], what: str) -> str:
    """``name``, if it is an entry or has the form of a function's path.

    Raises:
        ValueError: it is neither.
    """
    if name in known or ":" in name:
        return name
    raise ValueError(
        f"{name!r} is no {what}. Allowed are {', '.join(known)}, or a function of your own. Name one of them, or "
        "path/to/file.py:function or package.module:function."
    )
