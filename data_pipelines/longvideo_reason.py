r"""LongVideo-Reason: its questions on long videos, with reasoning, to checked records (multiple choice, and open ones).

    vlm-pg prepare longvideo_reason longvideo-reason --media-root videos --out data/longvideo_reason
    vlm-pg prepare longvideo_reason --train train.jsonl openended.jsonl --eval test.jsonl --media-root videos
        --out data/longvideo_reason

Published: LongVideo-Reason/longvideo-reason, ``train.jsonl``, ``val.jsonl``, ``test.jsonl`` (LongVideo-Reason-eval)
and ``openended.jsonl``; the same rows as Parquet in ``data`` (named as ``data:train``). Rows ``problem_id``,
``problem``, ``data_type``, ``problem_type``, ``reasoning``, ``videos``, ``answer`` ("<answer>B</answer>").
``problem_type`` (goal, plot, temporal, spatial) is no kind of answer; evaluation reports by it, and ``details`` have
it. ``problem_id`` begins anew in each file, so records are named after file and line. The four options stand in
``problem`` as lines, not always in the order of their letters. A few rows are damaged: of the 1,000 in ``test.jsonl``
two have a letter for an answer and no options (379, 857), three have other lines than four options (147, 743, 825). All
such are refused. Rows of ``openended.jsonl`` have none, and an answer in words; they are free-form (yes/no or numerical
where the whole answer is "Yes" or a number in digits). ``reasoning`` becomes ``process``. In the folder ``train.jsonl``
and ``test.jsonl`` are read; name the others with ``--train`` or ``--eval``.

``videos`` is a path below ``longvila_videos``, one for a row. The test's ten archives
(LongVideo-Reason/longvideo_eval_videos) unpack to ``longvideo_eval_subset0`` to ``9`` instead; both are found, and so
is a file directly in ``videos``; the media root may be any of these. 133 of the test's are .webm and .mkv.

Licence: the annotations' card names none; the project's code (NVlabs/Long-RL) is Apache-2.0. The videos are those of
people on YouTube. See the project.

Record: {"problem_id": "train-1",
"problem": "What is the man's primary goal in the workshop, as inferred from the video?",
"data_type": "video", "problem_type": "multiple choice",
"options": ["A. Creating a prop replica of Ash's chainsaw hand from \"Evil Dead\"",
"B. Building a custom storage container for mixed nuts", "C. Installing a ventilation system using pipes and fans",
"D. Crafting a DIY household appliance"], "process": "Checking the video ...", "solution": "<answer>A</answer>",
"path": "longvila_videos/5nKz1hzvSqs.mp4", "data_source": "longvideo_reason", "category": "goal",
"details": {"problem_type": "goal"}}
"""

from __future__ import annotations

from typing import Any

from data_pipelines.engine.answers import open_or_choice, untagged_once, without_mark
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row
from data_pipelines.engine.fields import published, text_of, unusable

_OPTIONS = 4
_FOLDERS = ("longvila_videos", "longvideo_eval_subset*")
_VIDEOS = (*_FOLDERS, *(f"*/{folder}" for folder in _FOLDERS))


def to_record(row: Row) -> dict[str, Any]:
    fields = open_or_choice(without_mark(text_of(row, "problem")), untagged_once(text_of(row, "answer")))
    if len(fields["options"]) not in (0, _OPTIONS):
        came = f"the question has {len(fields['options'])} options"
        raise unusable("bad_options", came, f"{_OPTIONS} options, or none,")
    videos = row["videos"]  # text, or a list of one
    if isinstance(videos, list) and len(videos) != 1:
        raise unusable("wrong_type", f"'videos' lists {len(videos)}", "One video")
    video = text_of({"videos": videos[0] if isinstance(videos, list) else videos}, "videos")
    return {
        **fields,
        "process": row.get("reasoning"),
        "path": video,
        "category": row.get("problem_type"),
        "details": published(row, "problem_type"),
    }


_FORM = Form(
    "{train,val,test,openended}.jsonl",
    {"train": ("train.jsonl",), "eval": ("test.jsonl",)},
    ("problem", "videos", "answer"),
    to_record,
)
LONGVIDEO_REASON = DataSet("longvideo_reason", (_FORM,), media=_VIDEOS, shared={"videos": ""})
main = pipeline(LONGVIDEO_REASON, __doc__, __name__)
