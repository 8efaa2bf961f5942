"""What is to be counted: for each contestant at each point of each model a specification, or why there is none."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from vlm_pg.bench import rollout, step
from vlm_pg.bench.contestant import Contestant
from vlm_pg.bench.grid import RolloutPoint, StepPoint

WORKS = ("step", "rollout", "tower")
STEP_POINTS = tuple(StepPoint(*p) for p in ((4096, 8, 128), (4096, 8, 512), (16384, 8, 1024), (32768, 8, 512)))
ROLLOUT_POINTS = tuple(RolloutPoint(p, g, 512) for p in (4096, 16384, 65536) for g in (8, 32))
# Of the tower: a video of so many visual tokens, once for its group or once for each of so many rollouts.
TOWER_TOKENS, TOWER_RUNS = 1024, 8
TOWERS = {"tower, once a group": 1, f"tower, once a rollout (G={TOWER_RUNS})": TOWER_RUNS}
OURS = {"step": step.OURS, "rollout": rollout.OURS, "tower": next(iter(TOWERS))}
COUNTED_ROLLOUTS = ("ours", "transformers-generate", "transformers-continuous")
_CONTINUOUS = (
    "on a GPU it pads its steps and replays them from CUDA graphs of its own, which are not counted; measure it with "
    "`vlm-pg bench rollout`, which on a CPU counts it, too"
)
_PREFIX_GROUPER = (
    "prefix_grouper shares prefixes in softmax attention alone; this model's linear-attention layers would run through "
    "the responses one behind the other"
)
_NO_TOWER = "the model has no vision tower"


@dataclass(frozen=True)
class Model:
    """What decides about how a model is counted. ``layers``: of two shallower ones, from which it follows."""

    name: str
    linear: bool
    has_tower: bool
    period: int
    whole: int

    @classmethod
    def of(cls, name: str) -> Model:
        """Raises as ``config_of``."""
        from vlm_pg.bench.paper.models import config_of
        from vlm_pg.models.registry import family_of

        config = config_of(name)
        family = family_of(config)
        kinds = family.layer_kinds(config)
        linear = "linear_attention" in kinds
        period = kinds.index("full_attention") + 1 if linear and "full_attention" in kinds else 1
        return cls(name, linear, family.reads_media, period, len(kinds))

    def layers(self, work: str, few: bool) -> list[int] | None:
        """Depths of two shallower models, where counts are taken from them; None: of the whole one.

        Layers of linear attention run chunk by chunk in torch's reference, so always of few. In a decode step each
        layer does the same and nothing else grows with them.
        """
        if work == "tower" or not (few or self.linear or work == "rollout"):
            return None
        near = 2 if self.period == 1 else self.period
        far = near + self.period
        return [near, far] if far < self.whole else None


def specifications(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """In the order of the table; one that cannot be counted has ``not_counted``."""
    for name in arguments.models:
        model = Model.of(name)
        for work in arguments.works:
            for point, record in points_of(work, arguments):
                for contestant, place in contestants_of(work).items():
                    if arguments.contestants and work != "tower" and contestant not in arguments.contestants:
                        continue
                    spec = {
                        "model": name,
                        "work": work,
                        "point": record if work != "tower" else record | {"runs": TOWERS[contestant]},
                        "said": str(point),
                        "contestant": contestant,
                        "run": place,
                        "dtype": arguments.dtype,
                        "checkpointing": arguments.checkpointing,
                        "lora": arguments.lora,
                        "liger": arguments.liger,
                        "layers": model.layers(work, arguments.few_layers),
                    }
                    reason = reason_against(work, contestant, model)
                    yield spec | ({"not_counted": reason} if reason else {})


def points_of(work: str, arguments: argparse.Namespace) -> list[tuple[Any, dict[str, Any]]]:
    """Points of a kind of work, each with its numbers."""
    if work == "tower":
        return [(f"a video of about {TOWER_TOKENS:,} visual tokens", {"visual_tokens": TOWER_TOKENS})]
    points = arguments.points if work == "step" else arguments.rollout_points
    return [(point, point.record) for point in points]


def contestants_of(work: str) -> dict[str, str]:
    """Names, ours first, and where what they run is found."""
    if work == "tower":
        return dict.fromkeys(TOWERS, "")
    known = step.CONTESTANTS if work == "step" else {name: rollout.CONTESTANTS[name] for name in COUNTED_ROLLOUTS}
    return {name: contestant.run for name, contestant in known.items()}


@cache
def _known() -> dict[str, Contestant]:
    return {**step.CONTESTANTS, **rollout.CONTESTANTS}


def reason_against(work: str, contestant: str, model: Model) -> str | None:
    """Why a contestant cannot be counted with this model, or None."""
    if work == "tower":
        return None if model.has_tower else _NO_TOWER
    if contestant == "transformers-continuous":
        return _CONTINUOUS
    if contestant.startswith("prefix-grouper") and model.linear:
        return _PREFIX_GROUPER
    return _known()[contestant].unavailable_because()
