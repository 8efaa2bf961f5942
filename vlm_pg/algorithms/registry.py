"""Losses, advantage estimators and presets by name. It loads no torch: an entry holds the path of its function.

Users name functions of their own by path instead: ``path/to/file.py:function`` or ``package.module:function``. Presets
have the values their papers give; docs/algorithms.md holds the same table for readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Entry:
    """A function, where it is, and what may not be set beside it.

    ``only``: setting of the section -> the one allowed value, and the message for another.
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
    """``name``, if it is an entry or has the form of a function's path. Raises ValueError: it is neither."""
    if name in known or ":" in name:
        return name
    raise ValueError(
        f"{name!r} is no {what}. Allowed are {', '.join(known)}, or a function of your own. Name one of them, or "
        "path/to/file.py:function or package.module:function."
    )


PresetName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo", "cppo", "t_grpo"]


@dataclass(frozen=True)
class Preset:
    """``fixed``: what makes it this algorithm. ``usual``: further values of the paper, which may be set otherwise.

    ``source``: where the values are from. ``unstated``: which of them the source does not give.
    """

    fixed: Mapping[str, Any]
    usual: Mapping[str, Any]
    source: str
    unstated: str = ""

    @property
    def values(self) -> dict[str, Any]:
        return {**self.fixed, **self.usual}


_GROUP_STD = {"baseline": "group_mean", "scale_advantages": "std"}
_TOKEN_CLIP = {"loss": "clip", "ratio_level": "token"}
_NO_PRUNING = {"prune_rate": 0.0}

PRESETS: dict[PresetName, Preset] = {
    "grpo": Preset(
        fixed=_GROUP_STD | _TOKEN_CLIP | _NO_PRUNING | {"kl_in": "loss", "loss_average": "sequence_mean"},
        usual={"kl_coef": 0.04, "kl_estimator": "k3", "clip_low": 0.2, "clip_high": 0.2},
        source="DeepSeekMath, arXiv 2402.03300, equations 3 and 4, section 4.2",
        unstated="clip: PPO's 0.2",
    ),
    "dr_grpo": Preset(
        fixed=_TOKEN_CLIP
        | _NO_PRUNING
        | {"baseline": "group_mean", "scale_advantages": "none", "loss_average": "constant_length"},
        usual={"kl_coef": 0.0, "clip_low": 0.2, "clip_high": 0.2},
        source="Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3, table 6",
    ),
    "rloo": Preset(
        fixed=_TOKEN_CLIP
        | _NO_PRUNING
        | {"baseline": "leave_one_out", "scale_advantages": "none", "loss_average": "sequence_sum"},
        usual={"kl_coef": 0.03, "kl_estimator": "k1", "kl_in": "reward", "clip_low": 0.2, "clip_high": 0.2},
        source="Back to Basics, arXiv 2402.14740, sections 2.2 and 2.3, appendix C (KL weight 0.03 is for TL;DR; 0.10 "
        "for HH)",
        unstated="clip: the paper has no ratio; with one update per batch it is 1 and the gradient equals the paper's",
    ),
    "reinforce_pp": Preset(
        fixed=_TOKEN_CLIP | _NO_PRUNING | {"baseline": "none", "scale_advantages": "whiten", "kl_in": "token_reward"},
        usual={
            "kl_coef": 0.01,
            "kl_estimator": "k1",
            "loss_average": "sequence_mean",
            "clip_low": 0.2,
            "clip_high": 0.2,
        },
        source="REINFORCE++, arXiv 2501.03262, version 9, equations 1, 4 and 5; KL weight (0.001 for mathematics) and "
        "clip: version 1, table 1",
    ),
    "dapo": Preset(
        fixed=_GROUP_STD | _TOKEN_CLIP | _NO_PRUNING | {"loss_average": "token_mean"},
        usual={
            "clip_low": 0.2,
            "clip_high": 0.28,
            "kl_coef": 0.0,
            "resample_rounds": 3,
            "overlong_share": 0.2,
            "overlong_penalty": 1.0,
        },
        source="DAPO, arXiv 2503.14476, sections 2.3, 3 and 4.1 (the penalized share is 4,096 of 20,480 tokens)",
        unstated="number of resampling rounds; its 16 updates per batch of 512 questions are not set",
    ),
    "gspo": Preset(
        fixed=_GROUP_STD | _NO_PRUNING | {"loss": "clip", "ratio_level": "sequence", "loss_average": "sequence_mean"},
        usual={"clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0, "minibatches": 4},
        source="GSPO, arXiv 2507.18071, equations 5 to 7, section 5.1",
        unstated="KL weight: its formulas leave the term out for brevity",
    ),
    "cispo": Preset(
        fixed=_GROUP_STD | _NO_PRUNING | {"loss": "cispo", "ratio_level": "token", "loss_average": "token_mean"},
        usual={"clip_low": 1.0, "clip_high": 4.0, "kl_coef": 0.0},
        source="MiniMax-M1, arXiv 2506.13585, section 3.1, equations 4 and 5 (no lower bound, no KL)",
        unstated="upper bound of the ratio: 5 as in ScaleRL, arXiv 2510.13786; its 16 updates per batch, and the "
        "dynamic sampling and length penalty that it takes from DAPO, are not set",
    ),
    "cppo": Preset(
        fixed=_GROUP_STD
        | _TOKEN_CLIP
        | {"prune_metric": "smallest", "prune_correction": False, "loss_average": "sequence_mean", "kl_in": "loss"},
        usual={
            "prune_rate": 0.5,
            "prune_scope": "question",
            "prune_fill": True,
            "kl_coef": 0.04,
            "kl_estimator": "k3",
            "num_iterations": 2,
            "clip_low": 0.2,
            "clip_high": 0.2,
        },
        source="CPPO, arXiv 2503.22342, section 3; KL, updates, clip and the initial pruning rate: its published "
        "recipes",
    ),
    "t_grpo": Preset(
        fixed=_GROUP_STD | _TOKEN_CLIP | _NO_PRUNING | {"kl_in": "loss", "loss_average": "sequence_mean"},
        usual={
            "temporal_bonus": 0.3,
            "temporal_ratio": 0.8,
            "length_bonus": 0.2,
            "length_bonus_tokens": (320, 512),
            "right_above": 0.1,
            "kl_coef": 0.04,
            "kl_estimator": "k3",
            "clip_low": 0.2,
            "clip_high": 0.2,
        },
        source="Video-R1, arXiv 2503.21776, section 3; temporal_ratio, right_above and the KL: its published code",
        unstated="clip: PPO's 0.2; with its one update per batch clipping is never active",
    ),
}


def with_preset(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` of the section with those of its preset beneath them.

    Raises:
        ValueError: a value contradicts what makes the preset the algorithm it is named after.
    """
    name = values.get("preset")
    if not isinstance(name, str) or name not in PRESETS:
        return values  # none, or one that the type of the field refuses
    preset = PRESETS[name]
    conflicts = [
        f"{key}={values[key]!r} (the preset: {fixed!r})"
        for key, fixed in preset.fixed.items()
        if key in values and values[key] != fixed
    ]
    if conflicts:
        raise ValueError(
            f"preset is {name}, which contradicts {', '.join(conflicts)}: these make the algorithm what its name says. "
            "Leave the values out, choose another preset, or set preset=null and every value you want."
        )
    return {**preset.values, **values}
