"""rollouts.jsonl: sample rollouts in full, one line each, with pictures of what the model saw."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_pg.errors import VlmPgError
from vlm_pg.files import LineFile, find_non_finite
from vlm_pg.observe.metrics import forget_later_steps
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.thumbnails import save_strip
from vlm_pg.types import RolloutGroup


class RolloutsLog(LineFile):
    """Appends sample rollouts of one run.

    Args:
        folder: the run's folder.
        groups_per_step: how many groups of each step are written.
        thumbnail_frames: frames in a question's picture strip; 0 saves none.
        resume_step: the step the run continues after; later lines are moved aside. None for a new run.
    """

    def __init__(
        self, folder: RunFolder, groups_per_step: int = 2, thumbnail_frames: int = 8, resume_step: int | None = None
    ):
        forget_later_steps(folder.rollouts, resume_step)
        self._folder = folder
        self._groups_per_step = groups_per_step
        self._thumbnail_frames = thumbnail_frames
        super().__init__(folder.rollouts)

    def write(self, step: int, groups: Sequence[RolloutGroup], phase: str = "train") -> None:
        """Write some of the step's groups, rewards and advantages included where they are present."""
        for group in pick_groups(groups, self._groups_per_step):
            strip = save_strip(self._folder, group.sample.sample_id, group.prompt, self._thumbnail_frames)
            for index in range(len(group.rollouts)):
                record = rollout_record(step, phase, group, index, strip)
                _refuse_non_finite(record)
                self.append(record)


def pick_groups(groups: Sequence[RolloutGroup], count: int) -> list[RolloutGroup]:
    """The ``count`` groups whose sample ids hash lowest.

    A choice by id, not by order or by reward, logs the same questions again in later epochs and is not biased
    towards good or bad answers.
    """
    return sorted(groups, key=lambda group: _id_hash(group.sample.sample_id))[:count]


def _refuse_non_finite(record: Mapping[str, Any]) -> None:
    key = find_non_finite(record)
    if key is not None:
        raise VlmPgError(
            f"rollout {record['rollout']} of sample '{record['sample_id']}' in step {record['step']}: '{key}' is not a "
            "finite number. Rewards and advantages are finite, or null where there is no value; a reward that cannot "
            "be computed must be None."
        )


def _id_hash(sample_id: str) -> str:
    return hashlib.sha256(sample_id.encode("utf-8", "surrogatepass")).hexdigest()


def rollout_record(step: int, phase: str, group: RolloutGroup, index: int, strip: str | None) -> dict[str, Any]:
    """One line of rollouts.jsonl; ``strip`` is the path of the picture strip relative to the run's folder."""
    sample, rollout = group.sample, group.rollouts[index]
    reward = group.rewards[index] if group.rewards else None
    return {
        "step": step,
        "phase": phase,
        "sample_id": sample.sample_id,
        "rollout": index,
        "rollouts": len(group.rollouts),
        "category": sample.category,
        "question": sample.question,
        "options": list(sample.options),
        "answer": sample.answer,
        "response": rollout.text,
        "parts": dict(reward.parts) if reward else {},
        "total": reward.total if reward else None,
        "notes": dict(reward.notes) if reward else {},
        "advantage": float(group.advantages[index]) if group.advantages else None,
        "kept": float(group.kept[index]) if group.kept else 1.0,
        "finish_reason": rollout.finish_reason,
        "response_tokens": int(rollout.token_ids.shape[0]),
        "prompt_tokens": group.prompt.num_tokens,
        "policy_version": group.policy_version,
        "thumbnails": strip,
    }
