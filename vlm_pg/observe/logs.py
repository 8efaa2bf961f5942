"""metrics.jsonl and rollouts.jsonl: one line of numbers per step, and sample rollouts with pictures of their frames."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from vlm_pg.errors import VlmPgError
from vlm_pg.files import LineFile, find_non_finite, keep_json_lines, write_bytes_atomic, write_json_atomic
from vlm_pg.metrics import RESERVED_KEYS, Chart, Metric
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

_FRAME_HEIGHT, _MAX_FRAME_WIDTH, _FOOTER_HEIGHT, _GAP = 112, 224, 18, 3
_INK, _PAPER = (235, 235, 235), (28, 30, 34)


@dataclass(frozen=True)
class Drawn:
    """How a metric is drawn: its unit, and its chart; None for one of its own."""

    unit: str
    chart: Chart | None


def read_drawn(path: Path) -> dict[str, Drawn]:
    """Read curves.json: how a run's metrics are drawn. Raises OSError or ValueError if it is missing or damaged."""
    return TypeAdapter(dict[str, Drawn]).validate_python(json.loads(path.read_bytes()))


class MetricsLog(LineFile):
    """Appends metrics of one run.

    A line is flat: ``{"step": 12, "phase": "train", "time": 1760000000.1, "reward": 0.61, "kl": null}``.

    Args:
        resume_step: the step after which the run resumes; later lines are moved to ``metrics.jsonl.abandoned``, so that
            no step appears twice. None for a new run.
    """

    def __init__(self, folder: RunFolder, resume_step: int | None = None):
        move_later_steps(folder.metrics, resume_step)
        super().__init__(folder.metrics)
        self._curves = folder.curves
        self._drawn: dict[str, Drawn] = {}
        with suppress(OSError, ValueError, RecursionError):
            self._drawn = read_drawn(folder.curves)

    def write(self, step: int, values: Mapping[str, float | None], phase: str = "train") -> None:
        """Write one line and flush it. None is kept as null; NaN or infinity raises VlmPgError naming the key.

        How the ``Metric`` keys are drawn is added to ``curves.json``.
        """
        line: dict[str, Any] = {"step": step, "phase": phase, "time": round(time.time(), 3)}
        for key, value in values.items():
            if key in RESERVED_KEYS:
                raise KeyError(f"metric '{key}' would hide the line's own '{key}'; call it something else")
            line[key] = number = value if value is None or isinstance(value, int) else float(value)
            if number is not None and not math.isfinite(number):
                raise VlmPgError(
                    f"metric '{key}' of step {step} is {number}. Metrics must be finite numbers, or null where there "
                    "is no value. If training diverged, lower training.learning_rate or raise algorithm.kl_coef and "
                    "resume from the last checkpoint."
                )
        drawn: dict[str, Drawn] = {key: Drawn(key.unit, key.chart) for key in values if isinstance(key, Metric)}
        if not drawn.items() <= self._drawn.items():
            self._drawn |= drawn
            write_json_atomic(self._curves, {key: asdict(how) for key, how in self._drawn.items()})
        self.append(line)


def move_later_steps(path: Path, resume_step: int | None) -> None:
    """Move lines of ``path`` after ``resume_step`` to ``<name>.abandoned``, damaged ones to ``<name>.damaged``.

    A line without a step is kept.
    """
    if resume_step is None:
        return

    def is_later(record: Mapping[str, Any]) -> bool:
        step = record.get("step")
        return isinstance(step, int | float) and not isinstance(step, bool) and step > resume_step

    _, damaged = keep_json_lines(path, lambda record: not is_later(record))
    if damaged:
        logger.warning(
            "%s had %d line(s) that were not JSON (a killed run leaves one); moved to %s.damaged",
            path, damaged, path.name,
        )  # fmt: skip


class RolloutsLog(LineFile):
    """Appends sample rollouts of one run.

    Args:
        groups_per_step: how many groups of each step are written.
        thumbnail_frames: frames in a question's picture strip; 0 saves none.
        resume_step: the step after which the run resumes; later lines are moved aside. None for a new run.
    """

    def __init__(
        self, folder: RunFolder, groups_per_step: int = 2, thumbnail_frames: int = 8, resume_step: int | None = None
    ):
        move_later_steps(folder.rollouts, resume_step)
        self._folder = folder
        self._groups_per_step = groups_per_step
        self._thumbnail_frames = thumbnail_frames
        super().__init__(folder.rollouts)

    def write(self, step: int, groups: Sequence[RolloutGroup], phase: str = "train") -> None:
        """Write some of the step's groups, with rewards and advantages where they have them."""
        for group in pick_groups(groups, self._groups_per_step):
            strip = save_strip(self._folder, group.sample.sample_id, group.prompt, self._thumbnail_frames)
            for index in range(len(group.rollouts)):
                record = rollout_record(step, phase, group, index, strip)
                key = find_non_finite(record)
                if key is not None:
                    raise VlmPgError(
                        f"rollout {index} of sample '{group.sample.sample_id}' in step {step}: '{key}' is not a finite "
                        "number. Rewards and advantages are finite, or null where there is no value; a reward that "
                        "cannot be computed must be None."
                    )
                self.append(record)


def pick_groups(groups: Sequence[RolloutGroup], count: int) -> list[RolloutGroup]:
    """The ``count`` groups whose sample ids hash lowest.

    A choice by id, not by order or by reward, logs the same questions again in later epochs and is not biased
    towards good or bad answers.
    """
    return sorted(groups, key=lambda group: _hash(group.sample.sample_id))[:count]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


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
        "policy_version": group.policy_version if rollout.weights_version is None else rollout.weights_version,
        **({"token_versions": list(rollout.token_versions)} if rollout.token_versions else {}),
        "thumbnails": strip,
    }


def save_strip(folder: RunFolder, sample_id: str, prompt: Prompt, max_frames: int) -> str | None:
    """Save a prompt's picture strip (frames side by side, each with its time) once; returns its path in the folder.

    The file is named by the sample and its pixels, so a repeated sample reuses its file. None without a preview (a
    text-only question) or with ``max_frames`` 0.
    """
    if not prompt.preview or max_frames == 0:
        return None
    name = _hash(f"{sample_id}\n{prompt.content_key}")[:20]
    path = folder.thumbnails / f"{name}.jpg"
    if not path.exists():
        folder.thumbnails.mkdir(parents=True, exist_ok=True)
        picture = io.BytesIO()
        draw_strip(prompt, max_frames).save(picture, "JPEG", quality=82)
        write_bytes_atomic(path, picture.getvalue())
    return path.relative_to(folder.path).as_posix()


def draw_strip(prompt: Prompt, max_frames: int) -> Image.Image:
    """The strip of at most ``max_frames`` frames, evenly chosen from the preview, first and last included."""
    from PIL import Image, ImageDraw, ImageFont

    chosen = shown_frames(prompt, max_frames)
    seconds = [prompt.preview_seconds[index] for index in chosen]
    frames = []
    for frame in (Image.fromarray(prompt.preview[index]) for index in chosen):
        scale = min(_FRAME_HEIGHT / frame.height, _MAX_FRAME_WIDTH / frame.width)
        # Small synthetic clips are enlarged without blur, so that their pixels stay visible.
        method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        size = (max(1, round(frame.width * scale)), max(1, round(frame.height * scale)))
        frames.append(frame.resize(size, method))
    width = sum(frame.width for frame in frames) + _GAP * (len(frames) - 1)
    strip = Image.new("RGB", (width, _FRAME_HEIGHT + _FOOTER_HEIGHT), _PAPER)
    pen = ImageDraw.Draw(strip)
    font = ImageFont.load_default(size=11)
    left = 0
    for frame, second in zip(frames, seconds, strict=True):
        strip.paste(frame, (left, (_FRAME_HEIGHT - frame.height) // 2))
        if any(seconds):  # a single image has the time 0.0, which is meaningless
            middle = (left + frame.width / 2, _FRAME_HEIGHT + _FOOTER_HEIGHT / 2)
            pen.text(middle, f"{second:.2f} s", fill=_INK, font=font, anchor="mm")
        left += frame.width + _GAP
    return strip


def shown_frames(prompt: Prompt, max_frames: int) -> list[int]:
    """Indices of the preview's frames in a strip: ``[0, 4, 7]`` for 3 of 8."""
    count = min(len(prompt.preview), max_frames)
    return [round(index * (len(prompt.preview) - 1) / max(1, count - 1)) for index in range(count)]
