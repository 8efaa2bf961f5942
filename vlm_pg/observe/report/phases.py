"""What a run calls the parts of its time, and the colour each of them has everywhere on the page."""

from __future__ import annotations

# Name for people and CSS class, in the order of a run.
PHASES = {
    "setup": ("set-up", "p0"),
    "eval_before": ("evaluation before", "p1"),
    "prompts": ("media and prompts", "p2"),
    "vision": ("vision tower", "p3"),
    "rollout": ("generating rollouts", "p4"),
    "rewards": ("rewards", "p5"),
    "reference": ("reference for the KL", "p6"),
    "train": ("policy update", "p7"),
    "logs": ("logs", "p8"),
    "checkpoint": ("checkpoints", "p9"),
    "eval": ("evaluation in between", "p10"),
    "eval_after": ("evaluation after", "p10"),
    "idle": ("waiting for other ranks", "idle"),
}
_OTHER = "p11"


def name_of(phase: str) -> str:
    """For people."""
    return PHASES[phase][0] if phase in PHASES else phase.replace("_", " ")


def color_of(phase: str) -> str:
    """Its CSS class."""
    return PHASES[phase][1] if phase in PHASES else _OTHER
