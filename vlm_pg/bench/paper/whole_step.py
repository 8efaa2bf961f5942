"""A whole GRPO step, counted phase by phase: the vision tower once, the rollouts of one question, one update.

F frames, G rollouts, N tokens of each. Behind the tower a visual token is a token like any other, so rollouts and
update are those that ``bench rollout`` and ``bench step`` would run on a prompt of so many tokens. The update's own
forward gives the old log-probabilities; a reference, where there is one, is one more forward of the same stream. Not
counted: the optimizer, exchange between ranks, decoding of videos, answers' texts and rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vlm_pg.bench.paper.trees import Tree, extrapolated, weighted
from vlm_pg.errors import ConfigError

# Of two frames: visual tokens along the sides of a picture, Video-R1's most; and the words around a video.
TOKEN_ROWS, TOKEN_COLUMNS, WORDS = 8, 16, 12
PAIR_TOKENS = TOKEN_ROWS * TOKEN_COLUMNS
# A tower sees each pair of frames by itself, so what it costs is affine in their number: it is counted at these two.
_PAIRS = (2, 4)
PHASES = ("vision", "rollout", "reference", "update")
# What an entry says of how its model was counted.
_OF_MODEL = ("layers_counted", "linear_attention")

Counted = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class WholeStepPoint:
    """One question on a video of F frames, G rollouts of exactly N tokens.

    Raises:
        ConfigError: an odd number of frames or less than 2, no rollout, or fewer than 2 tokens.
    """

    frames: int
    generations: int
    new_tokens: int

    def __post_init__(self) -> None:
        if self.frames < 2 or self.frames % 2 or self.generations < 1 or self.new_tokens < 2:
            raise ConfigError(
                f"A step got {self.frames} frames and {self.generations} rollouts of {self.new_tokens} tokens; it "
                "needs an even number of frames of 2 or more (two make one patch), and at least 1 rollout of at least "
                "2 tokens. Choose other numbers."
            )

    @property
    def prefix(self) -> int:
        """Tokens of the prompt."""
        return self.frames // 2 * PAIR_TOKENS + WORDS

    @property
    def record(self) -> dict[str, int]:
        """What a file says of this point."""
        return {
            "frames": self.frames,
            "prefix": self.prefix,
            "generations": self.generations,
            "new_tokens": self.new_tokens,
        }

    def __str__(self) -> str:
        return f"{self.frames:,} frames, {self.generations} rollouts of {self.new_tokens:,} tok"


def whole_step(spec: dict[str, Any], counted: Counted) -> dict[str, Any]:
    """The entry of a whole step.

    Args:
        spec: with ``phases``: of each phase behind the tower what its own specification has beyond this one.
        counted: counts one piece of work.

    Returns:
        As of any entry; ``phases`` has counts and peak memory of each in the order of ``PHASES``, the peak with what
        stands beside it: visual features, and a reference's own weights where all weights train.
    """
    point = spec["point"]
    near, far = (counted(spec | {"work": "tower", "point": {"pairs": pairs}}) for pairs in _PAIRS)
    found = {"vision": extrapolated(near, far, _PAIRS, point["frames"] // 2)}
    found |= {name: counted(spec | of_phase) for name, of_phase in spec["phases"].items()}
    weights = found["update"]["weights_bytes"]
    features = found["vision"]["end_bytes"]
    # An adapter's reference is the model without it.
    copy = weights if "reference" in found and spec["lora"] is None else 0
    phases = {name: _phase(found[name], features if name != "vision" else 0, copy) for name in PHASES if name in found}
    parts = {"tower": found["vision"]["counts"], **found["rollout"]["parts"]}
    parts |= {name: found[name]["counts"] for name in ("reference", "update") if name in found}
    entry = {
        "weights_bytes": weights,
        "peak_bytes": max(phase["peak_bytes"] for phase in phases.values()),
        "end_bytes": found["update"]["end_bytes"],
        "parts": parts,
        "counts": weighted((1, part) for part in parts.values()),
        "phases": phases,
        "middle": found["rollout"]["middle"],
        **{key: found["rollout"][key] for key in ("captured_launches", "replays", "eager_steps")},
    }
    return entry | {key: found["update"][key] for key in _OF_MODEL if key in found["update"]}


def _phase(found: Tree, *beside: float) -> Tree:
    graphs: Tree = {key: found[key] for key in ("captured_launches", "replays") if key in found}
    return {"counts": found["counts"], "peak_bytes": found["peak_bytes"] + sum(beside), **graphs}
