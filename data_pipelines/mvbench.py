"""MVBench: twenty tasks about time in short videos to checked multiple choice records, for evaluation only.

    vlm-pg prepare mvbench MVBench --out data/mvbench
    vlm-pg prepare mvbench --eval json/action_sequence.json --media-root MVBench --out data/action_sequence

Published: OpenGVLab/MVBench ``json/<task>.json``, 20 arrays of 200 rows each (copies with 198 or 199 are about):
``video``, ``question``, ``candidates`` without letters, and ``answer``, the text of one of them. The rows of five tasks
have ``start`` and ``end`` of a clip in seconds: action_sequence, action_prediction, object_interaction,
action_localization, episodic_reasoning. Those of others are about the whole video, as in MVBench's own code. The videos
lie in ``video``, each task's in a folder of one of the sets that they come from (``video/star/Charades_v1_480``), under
names that other such folders have too: only that folder counts. The copy with clips that are cut already
(``star/Charades_segment`` and the like) is not read.

The videos of episodic_reasoning are folders of pictures, three a second (``tvqa/frames_fps3_hq/<video>/00001.jpg``), of
which number 1 is shown from 0 s on. MVBench's code takes number round(3 t) for a time t, about a third of a second
earlier. The videos of fine_grained_pose (NTU RGB+D, .avi) must be requested from the authors and belong in ``nturgbd``.

Evaluation reports by task, as ``details`` call it, too; a record is named after its task and its position in the file.

Licence: annotations MIT; the videos come from eleven other data sets under their own terms, see the project.

Record: {"problem_id": "action_sequence-1", "problem": "What happened after the person took the food?",
"data_type": "video", "problem_type": "multiple choice", "options": ["A. Ate the medicine.",
"B. Tidied up the blanket.", "C. Put down the cup.", "D. Took the box."], "solution": "<answer>A</answer>",
"path": "star/Charades_v1_480/ZS9XR.mp4", "start": 10.2, "end": 24.8, "data_source": "mvbench",
"category": "action_sequence", "details": {"task": "action_sequence"}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_pipelines.engine.answers import answered, letter_of_text, lettered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, read_rows
from data_pipelines.engine.fields import called, list_of, number_of, text_of, texts_of, unusable
from vlm_pg.data.files import RecordLocation

# Where each task's videos lie below ``video``: OpenGVLab/Ask-Anything, video_chat2/mvbench.ipynb.
FOLDERS = {
    "action_sequence": "star/Charades_v1_480",
    "action_prediction": "star/Charades_v1_480",
    "action_antonym": "ssv2_video",
    "fine_grained_action": "Moments_in_Time_Raw/videos",
    "unexpected_action": "FunQA_test/test",
    "object_existence": "clevrer/video_validation",
    "object_interaction": "star/Charades_v1_480",
    "object_shuffle": "perception/videos",
    "moving_direction": "clevrer/video_validation",
    "action_localization": "sta/sta_video",
    "scene_transition": "scene_qa/video",
    "action_count": "perception/videos",
    "moving_count": "clevrer/video_validation",
    "moving_attribute": "clevrer/video_validation",
    "state_change": "perception/videos",
    "fine_grained_pose": "nturgbd",
    "character_order": "perception/videos",
    "egocentric_navigation": "vlnqa",
    "episodic_reasoning": "tvqa/frames_fps3_hq",
    "counterfactual_inference": "clevrer/video_validation",
}
_OF_FRAMES, _FRAMES_PER_SECOND = "episodic_reasoning", 3
_OF_CLIPS = ("action_sequence", "action_prediction", "object_interaction", "action_localization", _OF_FRAMES)


def to_record(row: Row) -> dict[str, Any]:
    task = text_of(row, "task")
    if task not in FOLDERS:
        raise unusable("unknown_task", f"the file is called '{task[:80]}'", f"One of {', '.join(FOLDERS)}")
    texts = texts_of(list_of(row, "candidates"), "'candidates'")
    clip = {part: number_of(row, part) for part in ("start", "end")} if task in _OF_CLIPS else {}
    return {
        "problem": text_of(row, "question"),
        **answered("multiple choice", letter_of_text(text_of(row, "answer"), texts), lettered(texts)),
        "path": f"{FOLDERS[task]}/{called(row, 'video')}",
        **clip,
        **({"folder_fps": _FRAMES_PER_SECOND} if task == _OF_FRAMES else {}),
        "category": task,
        "details": {"task": task},
    }


def _of_task(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """Rows with their task, which the name of their file tells, and their number from 1 on."""
    for number, (location, row) in enumerate(read_rows(path), start=1):
        yield location, {**row, "task": path.stem, "number": number} if isinstance(row, Mapping) else row


_FORM = Form(
    "json/<task>.json",
    {"eval": ("json/*.json", "*/json/*.json")},
    ("video", "question", "candidates", "answer"),
    to_record,
    rows=_of_task,
    # However its file is broken into lines: "action_sequence-17".
    questions=lambda row, name: [(f"{row['task']}-{row['number']}", row)],
    suffixes=(".json",),
)
MVBENCH = DataSet("mvbench", (_FORM,), media=("video", "[Mm][Vv][Bb]ench/video"), by_name=False)
main = pipeline(MVBENCH, __doc__, __name__)
