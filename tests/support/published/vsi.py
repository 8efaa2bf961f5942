"""VSI-590K: JSON lines about videos and images; VSI-Bench: JSON lines and Parquet."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, image, media, video
from vlm_pg.types import AnswerKind, MediaRef, Sample

FRAMES, LETTER = (
    "<image>\nThese are frames of a video.\n",
    "\nAnswer with the option's letter from the given choices directly.",
)
PHRASE = "\nPlease answer the question using a single word or phrase."
CLOSEST = "Which is closest to the bed?\nOptions:\nA. lamp\nB. desk\nC. door\nD. chair"


def row(kind: str, question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, "question_type": kind, **more}


SCENE, ROOM = {"video": "scannet/scene0191_00.mp4"}, {"image": "s3dis/room_1.jpg"}
ROWS = [
    row("absolute_count", f"{FRAMES}How many chairs are in this room?{PHRASE}", "4", **SCENE, id=17),
    row("absolute_size_object", f"{FRAMES}How long is the bed, in centimeters?{PHRASE}", "210", **SCENE),
    row("absolute_size_room", f"{FRAMES}What is the size of this room, in square feet?{PHRASE}", "240.0", **SCENE),
    row("absolute_distance_object", f"{FRAMES}How far is the lamp from the desk, in meters?{PHRASE}", "1.5", **SCENE),
    row("absolute_direction_object", f"<image>\nHow far do I turn, in degrees?{PHRASE}", "35", **ROOM),
    row("relative_distance_object", f"{FRAMES}{CLOSEST}{LETTER}", "B", **SCENE),
    row("relative_size_object", f"<image>\nWhich is larger?\nOptions:\nA. bed\nB. lamp{LETTER}", "A", **ROOM, id=3),
    row(
        "appearance_order",
        f"{FRAMES}What comes first?\nOptions:\nA. bed, lamp\nB. lamp, bed{LETTER}",
        "lamp, bed",
        **SCENE,
    ),
    row("relative_direction_camera", f"{FRAMES}Is it left?\nOptions:\nA. left\nB. right{LETTER}", "B", **SCENE),
    row("relative_direction_object", f"{FRAMES}Is it left?\nOptions:\nA. left\nB. right{LETTER}", "A", **SCENE),
    row("relative_distance_camera", f"{FRAMES}Is it near?\nOptions:\nA. near\nB. far{LETTER}", "A", **SCENE),
    row("relative_count", f"{FRAMES}More of which?\nOptions:\nA. chairs\nB. lamps{LETTER}", "B", **SCENE),
    row("absolute_count", f"{FRAMES}How many lamps are in this room?{PHRASE}", "0", **SCENE),
    row("absolute_count", f"{FRAMES}How many lamps are in this room?{PHRASE}", "many", **SCENE),
    row("relative_count", f"{FRAMES}More of which?\nOptions:\nA. chairs\nB. lamps{LETTER}", "C", **SCENE),
    row("relative_count", f"{FRAMES}More of which?\nOptions:\nA. chairs\nC. lamps{LETTER}", "A", **SCENE),
    row("relative_count", f"{FRAMES}More of which?", "A", **SCENE),
    row("route_length", f"{FRAMES}How far is it?", "4", **SCENE),
    row("absolute_count", f"{FRAMES}How many?", "4", video="scannet/gone.mp4"),
    row("absolute_count", f"{FRAMES}How many?", "4", **SCENE, **ROOM),
    row("absolute_count", f"{FRAMES}How many?", "4", **SCENE) | {"conversations": []},
    # As a table of an older version of ``datasets`` holds a list of objects.
    row("relative_count", "", "", **SCENE)
    | {"conversations": {"from": ["human", "gpt"], "value": [f"{FRAMES}Which?\nA. bed\nB. lamp", "B"]}},
    row("absolute_count", "", "", **SCENE) | {"conversations": {"from": ["human", "gpt"], "value": ["Which?"]}},
]


def sample(
    number: int, question: str, ref: tuple[MediaRef, ...], answer: str, category: str, options: str = ""
) -> Sample:
    """``options``: with a "|" between them; without, a number."""
    kind: AnswerKind = "multiple_choice" if options else "mean_relative_accuracy"
    lettered = tuple(options.split("|")) if options else ()
    return Sample(f"vsi_590k-{number}", question, ref, lettered, answer, kind, "vsi_590k", category)


def kept(folder: str) -> list[Sample]:
    scene, room = video(f"{folder}scannet/scene0191_00.mp4"), image(f"{folder}s3dis/room_1.jpg")
    return [
        sample(1, "How many chairs are in this room?", scene, "4", "absolute_count"),
        sample(2, "How long is the bed, in centimeters?", scene, "210", "absolute_size_object"),
        sample(3, "What is the size of this room, in square feet?", scene, "240.0", "absolute_size_room"),
        sample(4, "How far is the lamp from the desk, in meters?", scene, "1.5", "absolute_distance_object"),
        sample(5, "How far do I turn, in degrees?", room, "35", "absolute_direction_object"),
        sample(
            6,
            "Which is closest to the bed?",
            scene,
            "B",
            "relative_distance_object",
            "A. lamp|B. desk|C. door|D. chair",
        ),
        sample(7, "Which is larger?", room, "A", "relative_size_object", "A. bed|B. lamp"),
        sample(8, "What comes first?", scene, "B", "appearance_order", "A. bed, lamp|B. lamp, bed"),
        sample(9, "Is it left?", scene, "B", "relative_direction_camera", "A. left|B. right"),
        sample(10, "Is it left?", scene, "A", "relative_direction_object", "A. left|B. right"),
        sample(11, "Is it near?", scene, "A", "relative_distance_camera", "A. near|B. far"),
        sample(12, "More of which?", scene, "B", "relative_count", "A. chairs|B. lamps"),
        sample(22, "Which?", scene, "B", "relative_count", "A. bed|B. lamp"),
    ]


REFUSED = [
    (f"vsi_590k.jsonl:{number}", f"vsi_590k-{number}", reason)
    for number, reason in [
        (13, "unscorable_gold_answer"),
        (14, "no_gold_answer"),
        (15, "answer_not_in_options"),
        (16, "bad_options"),
        (17, "too_few_options"),
        (18, "unknown_question_type"),
        (19, "missing_media"),
        (20, "bad_media"),
        (21, "bad_conversation"),
        (23, "uneven_lists"),
    ]
]
BENCH: dict[str, Any] = {
    "id": 0,
    "dataset": "arkitscenes",
    "scene_name": "41069025",
    "question_type": "object_counting",
    "question": "How many table(s) are in this room?",
    "ground_truth": "4",
    "options": None,
}
LEFT = BENCH | {"dataset": "scannet", "scene_name": "scene0011_00", "options": ["A. left", "B. right"]}
LEFT |= {"question_type": "object_rel_direction_easy", "question": "Is it to my left?", "ground_truth": "B"}
BENCH_ROWS = [
    BENCH,
    LEFT | {"id": 7},
    LEFT | {"id": 8, "question_type": "obj_appearance_order", "ground_truth": "A"},
    BENCH | {"id": 9, "question_type": "room_size_estimation", "ground_truth": "23.4"},
    LEFT | {"id": 10, "ground_truth": "C"},
    BENCH | {"id": 11, "ground_truth": None},
]
TABLES, STOVE = video("arkitscenes/41069025.mp4"), video("scannet/scene0011_00.mp4")
SAME = BENCH | {"id": 20, "dataset": "scannet", "scene_name": "scene0191_00"}


def bench(row: dict[str, Any], ref: tuple[MediaRef, ...]) -> Sample:
    """The record of a row; ``ref``: where its video lies."""
    kind: AnswerKind = "multiple_choice" if row["options"] else "mean_relative_accuracy"
    details = {name: row[name] for name in ("question_type", "dataset", "scene_name")}
    return Sample(
        str(row["id"]),
        row["question"],
        ref,
        tuple(row["options"] or ()),
        row["ground_truth"],
        kind,
        "vsi_bench",
        row["question_type"],
        details=details,
    )


BENCH_KEPT = [bench(row, ref) for row, ref in zip(BENCH_ROWS[:4], (TABLES, STOVE, STOVE, TABLES), strict=True)]
SAME_KEPT = bench(SAME, video("VSI-Bench/scannet/scene0191_00.mp4"))
OF_590K = media("scannet/scene0191_00.mp4", "s3dis/room_1.jpg")
OF_BENCH = media("arkitscenes/41069025.mp4", "scannet/scene0011_00.mp4")
SHARD = "test-00000-of-00001.parquet"


def bench_refused(location: str) -> list[tuple[str, str, str]]:
    return [(f"{location}:5", "10", "answer_not_in_options"), (f"{location}:6", "11", "no_gold_answer")]


CASES = {
    "VSI-590K": Published(
        {"vsi_590k.jsonl": ROWS, **OF_590K}, kept(""), refused=REFUSED, arguments=("{}", "--eval-share", "0")
    ),
    "VSI-Bench, lines": Published(
        {"test.jsonl": BENCH_ROWS, **OF_BENCH}, (), BENCH_KEPT, bench_refused("test.jsonl"), forms=(1,)
    ),
    "VSI-Bench, Parquet": Published(
        {SHARD: BENCH_ROWS, "test_debiased.parquet": BENCH_ROWS[:1], **OF_BENCH},
        (),
        BENCH_KEPT,
        bench_refused(SHARD),
        forms=(1,),
    ),
    "both in one folder, with videos of the same paths": Published(
        {
            "VSI-590K/vsi_590k.jsonl": ROWS[:1],
            "VSI-Bench/test.jsonl": [SAME, BENCH | {"id": 21, "dataset": "scannet", "scene_name": "scene0001_00"}],
            f"VSI-Bench/{SHARD}": [SAME],
            **media("VSI-590K/scannet/scene0191_00.mp4", "VSI-590K/scannet/scene0001_00.mp4"),
            **media("VSI-Bench/scannet/scene0191_00.mp4", "scannet/scene0001_00.mp4"),
        },
        kept("VSI-590K/")[:1],
        [SAME_KEPT],
        [("test.jsonl:2", "21", "missing_media")],
        forms=(0, 1),
        unread=[("eval", "VSI-Bench:test", 1)],
    ),
    "VSI-Bench beside the media of VSI-590K alone": Published(
        {
            "bench/test.jsonl": [SAME, BENCH],
            **media("VSI-590K/scannet/scene0191_00.mp4", "bench/arkitscenes/41069025.mp4"),
        },
        (),
        [bench(BENCH, video("bench/arkitscenes/41069025.mp4"))],
        [("test.jsonl:1", "20", "missing_media")],
        ("--eval", "{}/bench/test.jsonl", "--media-root", "{}"),
        forms=(1,),
    ),
}
