"""Video-R1: its questions on videos and images, plain or with reasoning, to checked records; records of your own too.

    vlm-pg prepare video_r1 Video-R1-data --media-root Video-R1-data --out data/video_r1
    vlm-pg prepare video_r1 --train Video-R1-data/Video-R1-COT-165k.json --media-root Video-R1-data
        --out data/video_r1_cot

Published: Video-R1/Video-R1-data, ``Video-R1-260k.json`` (for reinforcement learning) and ``Video-R1-COT-165k.json``
(a part of it for supervised training: ``process`` is reasoning between <think> tags, and is kept as it is), each a JSON
array. Their rows are records already, in the format named after them: ``problem_id``, ``problem``, ``data_type``,
``problem_type`` (multiple choice, numerical, OCR, free-form, regression), ``options``, ``solution``
("<answer>A</answer>"), ``path``, ``data_source``. Both files number the same questions, so the second is read when
``--train`` names it. ``path`` ("./Chart/...") starts from the folder that holds the files, where each source's archives
are unpacked; media share names, so each is taken from its path only. There is no evaluation split.

Any file of records in this format is read: JSON, JSON lines, Parquet, a folder of Parquet shards or one saved by
``datasets`` (FOLDER or FOLDER:split), with paths or with the media themselves in ``path``.

Licence: Apache-2.0 by its card. The media are those of its sources (LLaVA-Video-178K, NeXT-QA, PerceptionTest, CLEVRER,
STAR, and image sets of mathematics, charts, text, knowledge and space): see each.

Record: {"problem_id": 2, "problem": "What appears on the screen in Russian during the missile's ascent?",
"data_type": "video", "problem_type": "multiple choice",
"options": ["A. A YouTube subscription notification", "B. A military command", "C. A warning message",
"D. A weather update"], "process": "<think>Let me think about this ...</think>", "solution": "<answer>A</answer>",
"path": "./LLaVA-Video-178K/liwei_youtube_videos/videos/youtube_video_2024/ytb_7nRmsEw7nsE.mp4",
"data_source": "LLaVA-Video-178K/30_60_s_youtube_v0_1"}
"""

from __future__ import annotations

from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form
from data_pipelines.engine.fields import named

_FORM = Form(
    "Video-R1-260k.json, Video-R1-COT-165k.json",
    {"train": ("Video-R1-260k.json",), "eval": ()},
    ("problem_id", "problem", "data_type", "problem_type", "solution"),
    lambda row: {"data_source": None, **row},  # the row is a record
    questions=named("problem_id"),
)
VIDEO_R1 = DataSet("video_r1", (_FORM,), media=(), by_name=False)
main = pipeline(VIDEO_R1, __doc__, __name__)
