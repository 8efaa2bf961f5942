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
from vlm_pg.bench.paper.whole_step import WholeStepPoint

# A whole step is counted where it is asked for: it is made of the others.
USUAL_WORKS = ("step", "rollout", "tower")
WORKS = (*USUAL_WORKS, "grpo-step")
STEP_POINTS = tuple(StepPoint(*p) for p in ((4096, 8, 128), (4096, 8, 512), (16384, 8, 1024), (32768, 8, 512)))
ROLLOUT_POINTS = tuple(RolloutPoint(p, g, 512) for p in (4096, 16384, 65536) for g in (8, 32))
GRPO_POINTS = tuple(WholeStepPoint(frames, 8, 512) for frames in (64, 128, 256, 512, 1024))
# Of the tower: a video of so many visual tokens, once for its group or once for each of so many rollouts.
TOWER_TOKENS, TOWER_RUNS = 1024, 8
TOWERS = {"tower, once a group": 1, f"tower, once a rollout (G={TOWER_RUNS})": TOWER_RUNS}
OURS = {"step": step.OURS, "rollout": rollout.OURS, "tower": next(iter(TOWERS)), "grpo-step": rollout.OURS}
_REFERENCE = "vlm_pg.bench.training.grouped:scored"
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
    sequence_sizes: tuple[int, ...]

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
        return cls(name, linear, family.reads_media, period, len(kinds), tuple(family.sequence_sizes(config)))

    def layers(self, work: str, few: bool) -> list[int] | None:
        """Depths of two shallower models, where counts are taken from them; None: of the whole one.

        Layers of linear attention run chunk by chunk in torch's reference, so always of few. In a decode step each
        layer does the same and nothing else grows with them.
        """
        if work in ("tower", "grpo-step") or not (few or self.linear or work == "rollout"):
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
                for contestant, place, ranks in _rows_of(work, arguments):
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
                    if work == "grpo-step":
                        spec["phases"] = phases_of(record, model, arguments)
                    if ranks > 1:
                        # The first one has the most rows where they do not divide.
                        spec |= {"sequence_ranks": ranks, "sequence_rank": 0}
                    reason = reason_against(work, contestant, model, ranks)
                    yield spec | ({"not_counted": reason} if reason else {})


def _rows_of(work: str, arguments: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Contestants that are asked for, where what they run is found, and over how many sequence ranks."""
    for contestant, place in contestants_of(work).items():
        if not arguments.contestants or work == "tower" or contestant in arguments.contestants:
            yield from ((contestant, place, ranks) for ranks in arguments.sequence_ranks or [1])


def phases_of(point: dict[str, Any], model: Model, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the phases of a whole step behind the tower are, each as a piece of work of its own."""
    prefix, count, length = point["prefix"], point["generations"], point["new_tokens"]
    few = arguments.few_layers
    sampled: dict[str, Any] = {
        "work": "rollout",
        "contestant": rollout.OURS,
        "run": rollout.CONTESTANTS[rollout.OURS].run,
    }
    sampled |= {"point": RolloutPoint(prefix, count, length).record, "layers": model.layers("rollout", few)}
    trained: dict[str, Any] = {"work": "step", "contestant": step.OURS, "run": step.CONTESTANTS[step.OURS].run}
    trained |= {"point": StepPoint(prefix, count, length).record, "layers": model.layers("step", few)}
    reference = {"reference": trained | {"run": _REFERENCE}} if arguments.reference else {}
    return {"rollout": sampled, **reference, "update": trained}


def points_of(work: str, arguments: argparse.Namespace) -> list[tuple[Any, dict[str, Any]]]:
    """Points of a kind of work, each with its numbers."""
    if work == "tower":
        return [(f"a video of about {TOWER_TOKENS:,} visual tokens", {"visual_tokens": TOWER_TOKENS})]
    points = {"step": arguments.points, "rollout": arguments.rollout_points, "grpo-step": arguments.grpo_points}[work]
    return [(point, point.record) for point in points]


def contestants_of(work: str) -> dict[str, str]:
    """Names, ours first, and where what they run is found."""
    if work == "tower":
        return dict.fromkeys(TOWERS, "")
    if work == "grpo-step":
        return {rollout.OURS: ""}
    known = step.CONTESTANTS if work == "step" else {name: rollout.CONTESTANTS[name] for name in COUNTED_ROLLOUTS}
    return {name: contestant.run for name, contestant in known.items()}


@cache
def _known() -> dict[str, Contestant]:
    return {**step.CONTESTANTS, **rollout.CONTESTANTS}


def reason_against(work: str, contestant: str, model: Model, ranks: int = 1) -> str | None:
    """Why a contestant cannot be counted with this model, or None."""
    if work in ("tower", "grpo-step"):
        return None if model.has_tower else _NO_TOWER
    if contestant == "transformers-continuous":
        return _CONTINUOUS
    if contestant.startswith("prefix-grouper") and model.linear:
        return _PREFIX_GROUPER
    if ranks not in model.sequence_sizes:
        sizes = ", ".join(map(str, model.sequence_sizes))
        return f"the heads of {model.name} cannot be divided over {ranks} sequence ranks, but over {sizes}"
    return _known()[contestant].unavailable_because()
