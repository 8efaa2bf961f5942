"""STAR: its questions about situations in clips of everyday videos to checked multiple choice records with clips.

    vlm-pg prepare star STAR --media-root charades --out data/star
    vlm-pg prepare star --train STAR_train.json --eval STAR_val.json --media-root charades --out data/star

Published: csbobby/STAR_Benchmark ``STAR_{train,val,test}.json``, each an array of ``question_id`` (of which the first
part is the type of question), ``question``, ``video_id``, ``start`` and ``end`` of the clip in seconds, ``choices`` (a
``choice`` each), and ``answer``, the text of one of them. ``question_program`` and ``situations`` are not used. The
test file has no answers, which are kept for the project's leaderboard: its rows are refused. The videos are those of
Charades, ``Charades_v1_480/<video_id>.mp4`` (or ``Charades_v1``), or directly in ``Charades`` or ``videos``. Evaluation
reports by type: Interaction, Sequence, Prediction, Feasibility.

Licence: of the annotations see the project; of the videos see Charades (prior.allenai.org/projects/charades).

Record: {"problem_id": "Interaction_T1_13", "problem": "Which object was tidied up by the person?",
"data_type": "video", "problem_type": "multiple choice", "options": ["A. The closet/cabinet.", "B. The blanket.",
"C. The clothes.", "D. The table."], "solution": "<answer>C</answer>", "path": "6H78U.mp4", "start": 11.1, "end": 19.6,
"data_source": "star", "category": "Interaction"}
"""

from __future__ import annotations

from typing import Any

from data_pipelines.charades_sta import CHARADES, CHARADES_SHARED
from data_pipelines.engine.answers import answered, letter_of_text, lettered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, in_folders
from data_pipelines.engine.fields import called, list_of, named, number_of, object_of, text_of, texts_of, video_file


def to_record(row: Row) -> dict[str, Any]:
    choices = [object_of(choice, "a choice").get("choice") for choice in list_of(row, "choices")]
    texts = texts_of(choices, "'choices'")
    return {
        "problem": text_of(row, "question"),
        **answered("multiple choice", letter_of_text(text_of(row, "answer"), texts), lettered(texts)),
        "path": video_file(called(row, "video_id")),
        "start": number_of(row, "start"),
        "end": number_of(row, "end"),
        "category": called(row, "question_id").partition("_")[0],
    }


_FORM = Form(
    "STAR_{train,val,test}.json",
    in_folders(("", "*/"), "STAR_train.json", "STAR_val.json"),
    ("question_id", "question", "video_id", "start", "end", "choices"),
    to_record,
    questions=named("question_id"),
    suffixes=(".json",),
)
STAR = DataSet("star", (_FORM,), media=CHARADES, shared=CHARADES_SHARED)
main = pipeline(STAR, __doc__, __name__)
