"""MVBench's rows become evaluation records about the clip and the folder that their task says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_pipelines import mvbench
from data_pipelines.mvbench import FOLDERS, MVBENCH
from tests.support.pipeline_rows import check_example, check_odd_rows, one_row, outcomes, reasons_of, write_json
from vlm_pg.types import BadSample, Sample

PUBLISHED: dict[str, Any] = {
    "task": "action_sequence",
    "number": 1,
    "video": "ZS9XR.mp4",
    "question": "What happened after the person took the food?",
    "candidates": ["Ate the medicine.", "Tidied up the blanket.", "Put down the cup.", "Took the box."],
    "answer": "Ate the medicine.",
    "start": 10.2,
    "end": 24.8,
}
CLIPS = {"action_sequence", "action_prediction", "object_interaction", "action_localization", "episodic_reasoning"}


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    check_example(mvbench, PUBLISHED)


def test_there_are_twenty_tasks() -> None:
    assert len(FOLDERS) == 20


@pytest.mark.parametrize("task", sorted(FOLDERS))
def test_a_task_has_its_folder_and_five_have_clips(task: str) -> None:
    (sample,) = one_row(MVBENCH, PUBLISHED | {"task": task})
    assert isinstance(sample, Sample)
    (ref,) = sample.media
    assert (ref.path, sample.category, sample.details) == (f"{FOLDERS[task]}/ZS9XR.mp4", task, {"task": task})
    assert ref.folder_fps == (3.0 if task == "episodic_reasoning" else None)
    assert (ref.start, ref.end) == ((10.2, 24.8) if task in CLIPS else (None, None))


@pytest.mark.parametrize("part", ["start", "end"])
@pytest.mark.parametrize("task", sorted(CLIPS))
def test_a_clip_whose_bounds_are_lost_is_not_shown_as_the_whole_video(task: str, part: str) -> None:
    (bad,) = one_row(MVBENCH, PUBLISHED | {"task": task, part: None})
    assert isinstance(bad, BadSample) and bad.reason == "missing_field"


def test_a_file_that_is_called_like_no_task_has_no_videos(tmp_path: Path) -> None:
    row = {name: value for name, value in PUBLISHED.items() if name not in ("task", "number")}
    path = write_json(tmp_path / "json" / "object_count.json", [row])
    assert reasons_of(outcomes(MVBENCH, path)) == {"object_count-1": "unknown_task"}


def test_odd_rows_are_refused_and_never_a_surprise() -> None:
    refused = dict(check_odd_rows(MVBENCH, PUBLISHED, added=("task", "number")))
    assert refused["answer='odd'"].reason == "answer_not_in_options"
    assert len(refused) > 80
