r"""VSI-590K and VSI-Bench: spatial questions about videos and images of rooms to checked records with partial credit.

    vlm-pg prepare vsi VSI-590K --media-root VSI-590K --out data/vsi
    vlm-pg prepare vsi --train VSI-590K/vsi_590k.jsonl --eval VSI-Bench/test.jsonl --media-root media --out data/vsi

Published: nyu-visionx/VSI-590K ``vsi_590k.jsonl``: one question and its answer as ``conversations``, ``question_type``
(12 of them), and ``video`` or ``image`` (the other is absent), a path below the folder that ``<source>.tar.gz`` unpack
to ("scannet/scene0191_00.mp4"). The question begins with ``<image>``, for videos too, and with "These are frames of a
video."; options are its last lines. Answers are a letter, an option's full text (appearance_order) or a number; its
unit (cm, m, feet, degrees) stands in the question. ``id`` is there in some rows only and is not used.
nyu-visionx/VSI-Bench ``test.jsonl``, ``test-00000-of-00001.parquet``, ``test_debiased.parquet`` and
``test_pruned.parquet``: ``id``, ``dataset``, ``scene_name``, ``question_type``, ``question``, ``ground_truth``,
``options`` (with letters; null for numbers); the video is ``<dataset>/<scene_name>.mp4``. Both have videos of the same
path, so each takes its own only: the media root holds folders of these names, ``VSI-590K`` and ``VSI-Bench`` (or
``vsi590k``, ``vsi_bench_videos`` and so on), or is that folder, or the one with the annotations. Where one folder holds
both, VSI-590K is trained and VSI-Bench evaluated on. Records of VSI-Bench have ``question_type``, ``dataset`` and
``scene_name`` in their ``details``.

Numbers (absolute_... of VSI-590K; counts, distances and sizes of VSI-Bench) are scored by mean relative accuracy, as
VSI-Bench does; a 0, to which it is undefined, is refused where golds are checked. For directions in degrees, which
VSI-Bench does not ask for, that is relative to the angle too: it is not aware that 359 degrees lie beside 1.

Licence: VSI-Bench Apache-2.0. For VSI-590K see its project. The videos come from ScanNet, ScanNet++, ARKitScenes and
others, each under its own terms.

Record: {"problem_id": "vsi_590k-1", "problem": "How many chairs are in this room?", "data_type": "video",
"problem_type": "mean relative accuracy", "options": [], "process": "", "solution": "<answer>4</answer>",
"path": "scannet/scene0191_00.mp4", "data_source": "vsi_590k", "category": "absolute_count"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from data_pipelines.engine.answers import answered, check_removed_marks, split_options, without_sentences
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row
from data_pipelines.engine.fields import answer_text, listed, named, published, text_of, unusable

_INSTRUCTIONS = (
    "<image>",
    "<video>",
    "These are frames of a video.",
    "Please answer the question using a single word or phrase.",
    "Answer with the option's letter from the given choices directly.",
)
_OF_CHOICE = (
    "appearance_order", "relative_count", "relative_direction_camera", "relative_direction_object",
    "relative_distance_camera", "relative_distance_object", "relative_size_object",
)  # fmt: skip
_OF_NUMBER = (
    "absolute_count", "absolute_direction_object", "absolute_distance_object", "absolute_size_object",
    "absolute_size_room",
)  # fmt: skip
_BENCH_OF_CHOICE = (
    "obj_appearance_order", "object_rel_direction_easy", "object_rel_direction_hard", "object_rel_direction_medium",
    "object_rel_distance", "route_planning",
)  # fmt: skip
_BENCH_OF_NUMBER = ("object_abs_distance", "object_counting", "object_size_estimation", "room_size_estimation")
_TRAINED, _EVALUATED = "VSI-590K", "VSI-Bench"
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")


def of_590k(row: Row) -> dict[str, Any]:
    turns = listed(row["conversations"], "'conversations'")
    if not isinstance(turns, list):
        raise unusable("bad_conversation", f"'conversations' is {str(turns)[:80]}", "A list of turns")
    speakers = [turn.get("from") if isinstance(turn, Mapping) else None for turn in turns]
    if speakers != ["human", "gpt"]:
        raise unusable("bad_conversation", f"'conversations' is {speakers}", "One turn of 'human' and one of 'gpt'")
    text = text_of(turns[0], "value")
    stripped = without_sentences(text, _INSTRUCTIONS)
    question, options = split_options(stripped, gap=True)
    media = {kind: row[kind] for kind in ("video", "image") if row.get(kind)}
    if len(media) != 1:
        raise unusable("bad_media", f"the row names {len(media)} of 'video' and 'image'", "One of them")
    check_removed_marks(text, stripped, len(media))
    kind, path = media.popitem()
    category = text_of(row, "question_type")
    return {
        "problem": question,
        "data_type": kind,
        **_answer(category, options, answer_text(turns[1], "value"), _OF_CHOICE, _OF_NUMBER),
        "path": path,
        "data_source": "vsi_590k",
        "category": category,
    }


def of_bench(row: Row) -> dict[str, Any]:
    """One row of VSI-Bench as a record."""
    category = text_of(row, "question_type")
    scene = answer_text(row, "scene_name")  # of ARKitScenes they are numbers
    return {
        "problem": text_of(row, "question"),
        **_answer(
            category, row.get("options") or [], answer_text(row, "ground_truth"), _BENCH_OF_CHOICE, _BENCH_OF_NUMBER
        ),
        "path": f"{text_of(row, 'dataset')}/{scene}.mp4",
        "data_source": "vsi_bench",
        "category": category,
        "details": published(row, "question_type", "dataset", "scene_name"),
    }


def _answer(
    category: str, options: Any, gold: str, of_choice: Sequence[str], of_number: Sequence[str]
) -> dict[str, Any]:
    """The fields of a record that say how its answer is checked."""
    if category in of_choice:
        return answered("multiple choice", gold) | {"options": options}
    if category not in of_number:
        raise unusable(
            "unknown_question_type", f"'question_type' is '{category}'", f"One of {[*of_choice, *of_number]}"
        )
    if options:
        raise unusable("bad_options", f"a question of a number has the options {str(options)[:80]}", "None")
    if not _NUMBER.fullmatch(gold):
        raise unusable("no_gold_answer", f"the answer to a question of a number is '{gold[:80]}'", "A number in digits")
    return answered("mean relative accuracy", gold)


_590K = Form(
    "vsi_590k.jsonl",
    {"train": ("vsi_590k.jsonl", "VSI-590K/vsi_590k.jsonl")},
    ("conversations", "question_type", ("video", "image")),
    of_590k,
    suffixes=(".json", ".jsonl", ".parquet"),
    folder=lambda row, annotations: _TRAINED,
)
_BENCH = Form(
    "VSI-Bench's test.jsonl or Parquet",
    {"eval": ("test.jsonl", ".:test", "VSI-Bench/test.jsonl", "VSI-Bench:test")},
    ("dataset", "scene_name", "question_type", "question", "ground_truth"),
    of_bench,
    questions=named("id"),
    suffixes=(".json", ".jsonl", ".parquet"),
    folder=lambda row, annotations: _EVALUATED,
)
VSI = DataSet(
    "vsi",
    (_590K, _BENCH),
    media=(),
    spelt={_TRAINED: re.compile("(?i)vsi[-_]?590k.*"), _EVALUATED: re.compile("(?i)vsi[-_]?bench.*")},
    by_name=False,
)
main = pipeline(VSI, __doc__, __name__)
