"""LLaVA-Video-178K: its dialogues about videos (multiple choice, open questions, captions) to checked records.

    vlm-pg prepare llava_video_178k LLaVA-Video-178K --media-root LLaVA-Video-178K --out data/llava_video
    vlm-pg prepare llava_video_178k --train 0_30_s_youtube_v0_1/0_30_s_youtube_mc_v0_1_qa_processed.json
        --media-root 0_30_s_youtube_v0_1 --out data/llava_video

Published: lmms-lab/LLaVA-Video-178K, a folder for each subset: ``0_30_s_academic_v0_1`` holds
``0_30_s_academic_mc_v0_1_qa_processed.json``, ``0_30_s_academic_oe_v0_1_qa_processed.json``,
``0_30_s_academic_v0_1_cap_processed.json`` and ``0_30_s_academic_v0_1_videos_1.tar.gz`` and so on; ``0_30_s_nextqa``
holds ``0_30_s_nextqa_mc_qa_processed.json``. Rows ``id``, ``conversations``, ``data_source``, ``video``, as a JSON
array (Parquet of the same rows is read too); ``video`` is relative to the subset's folder, in which its archives are
unpacked. The media root is the folder of all subsets, or that of one. Subsets may have videos of the same path, so one
is taken from the folder of its own subset only: that of the annotation file, or, where that is not called as subsets
are ("30_60_s_nextqa"), the one that ``data_source`` names. Where all rows are of one subset, the media root may be its
folder under another name. The first turn begins with ``<image>``, although it is a
video.

Each turn is a question of its own. Later turns are kept as published training sets keep them, though some may make
sense after the earlier ones only. Options stand in the question as lines "A. ..."; the sentences that ask for a letter,
or for a word or phrase, are removed. Gold answers are "A." or "A. Black."; where letter and text disagree the question
is refused. Open questions and captions are free-form, and yes/no or numerical where the whole answer is "Yes" or a
number in digits. ``id`` repeats, so records are named after file, position and turn. ``llava_hound`` is read when it is
named with ``--train``; its media are folders of frames, which are refused until they are made videos. There is no
evaluation split. ``data_source`` says which subset a row is of; dialogues without it are of another set.

Licence: Apache-2.0 by its card, which allows academic research and education only, and points to OpenAI's terms for
what GPT-4 wrote. The videos are those of their sources (Charades, ActivityNet, YouCook2, NExT-QA, YouTube and others):
see each.

Record: {"problem_id": "0_30_s_academic_mc_v0_1_qa_processed-1-2",
"problem": "What is the color of the skillet in the video?", "data_type": "video", "problem_type": "multiple choice",
"options": ["A. Black", "B. Silver", "C. Red", "D. Blue"], "solution": "<answer>A</answer>",
"path": "academic_source/youcook2/101/zukEQgbWdsY/split_2.mp4", "data_source": "0_30_s_academic_v0_1"}
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_pipelines.engine.answers import open_or_choice, without_mark, without_sentences
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row
from data_pipelines.engine.fields import listed, text_of, unusable

_ASKS_FOR_LETTER = (
    "Please respond with only the letter of the correct answer.",
    "Please provide your answer by stating the letter followed by the full option.",
)
_SUBSET = re.compile(r"[0-9]+_[0-9]+_[sm]_\w+")
_INSTRUCTIONS = (*_ASKS_FOR_LETTER, "Answer the question using a single word or phrase.")


def questions(row: Row, name: str) -> Iterator[tuple[str, Row]]:
    """Each turn of a dialogue with the answer to it."""
    turns = listed(row["conversations"], "'conversations'")
    if not isinstance(turns, list) or not turns:
        raise unusable("wrong_type", f"'conversations' is {repr(turns)[:80]}", "A list of turns")
    for number, start in enumerate(range(0, len(turns), 2), start=1):
        pair = {"turns": turns[start : start + 2], "video": row["video"], "data_source": row["data_source"]}
        yield name if len(turns) <= 2 else f"{name}-{number}", pair


def to_record(question: Row) -> dict[str, Any]:
    """One turn as a record."""
    turns = question["turns"]
    speakers = [turn.get("from") if isinstance(turn, Mapping) else type(turn).__name__ for turn in turns]
    if speakers != ["human", "gpt"]:
        raise unusable("bad_dialogue", f"the turns are of {speakers}", "A turn of 'human', then one of 'gpt',")
    text, gold = (text_of(turn, "value") for turn in turns)
    text = without_mark(text)
    fields = open_or_choice(without_sentences(text, _INSTRUCTIONS), gold)
    if text.endswith(_ASKS_FOR_LETTER) and not fields["options"]:
        raise unusable("too_few_options", "the question asks for a letter and has no options", "Options as lines")
    return {**fields, "path": text_of(question, "video"), "data_source": text_of(question, "data_source")}


def subset(question: Row, annotations: Path) -> str:
    """The folder that the videos of a row's subset unpack to."""
    folder, source = os.path.basename(os.path.abspath(annotations)), question["data_source"]
    is_subset = isinstance(source, str) and _SUBSET.fullmatch(source) is not None
    return source if is_subset and not _SUBSET.fullmatch(folder) else folder


_FORM = Form(
    "SUBSET/*_processed.json",
    {"train": ("[0-9]*/[0-9]*_processed.json", "[0-9]*_processed.json"), "eval": ()},
    ("conversations", "video", "data_source"),
    to_record,
    questions=questions,
    foreign={"question_type": "VSI-590K ('vlm-pg prepare vsi')"},
    folder=subset,
)
LLAVA_VIDEO_178K = DataSet("llava_video_178k", (_FORM,), media=(), called=_SUBSET, by_name=False)
main = pipeline(LLAVA_VIDEO_178K, __doc__, __name__)
