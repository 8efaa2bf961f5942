"""LongVideo-Reason: JSON lines of four files, the evaluation's videos in folders of their shards; Parquet."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, video
from vlm_pg.types import AnswerKind, Sample

OPTIONS = ("A. to play", 'B. to build "Ash"', "C. to cook", "D. to rest")
ASKED = "What is his goal?  \n" + "  \n".join(OPTIONS) + "  \n"
TURNED = "What is his goal?\nOptions:\nD. to rest\nA. to play\nB. to build\nC. to cook"
# As rows 379 and 857 of the test, and as 147, 743 and 825.
BARE = "Why does the elephant come first?"
DAMAGED = "Why?\nA. But this requires the test-taker to weigh both.\nA. to play\nB. to eat\nC. to rest\nD. to train"


def row(number: int, problem: str, answer: str, name: str = "5nKz1hzvSqs.mp4", kind: str = "goal") -> dict[str, Any]:
    row = {"problem_id": number, "problem": problem, "data_type": "video", "problem_type": kind}
    row |= {"reasoning": f"Checking {name} ...", "videos": f"longvila_videos/{name}"}
    return row | {"answer": f"<answer>{answer}</answer>"}


def sample(
    name: str,
    path: str,
    answer: str,
    category: str = "goal",
    options: tuple[str, ...] = OPTIONS,
    question: str = "What is his goal?",
    kind: AnswerKind = "multiple_choice",
) -> Sample:
    process = f"Checking {path.rpartition('/')[2]} ..."
    details = {"problem_type": category}
    return Sample(
        name, question, video(path), options, answer, kind, "longvideo_reason", category, process, details=details
    )


TRAIN = [
    row(0, ASKED, "B"),
    row(1, TURNED, "D", kind="temporal"),
    row(2, ASKED, "A. to play", kind="spatial"),
    row(3, ASKED, "A. to rest"),
    row(4, DAMAGED, "B", kind="plot"),
    row(5, ASKED, "E"),
]
VAL = [row(0, ASKED, "C", "val.mp4", "plot")]
TEST = [
    row(0, ASKED, "A", "I_Q3ajyOrcI.webm", "plot"),
    row(1, ASKED, "D", "-a_b.mkv"),
    row(2, BARE, "B", "-a_b.mkv"),
    row(3, DAMAGED, "B", "-a_b.mkv"),
    row(4, ASKED, "C", "gone.mp4"),
]
OPENENDED = [
    row(0, "What is it for?", "To show how rice is grown.", "rice.mp4", "plot"),
    row(1, "Is it rice?", "Yes", "rice.mp4", "plot"),
    row(2, "How many fields are there?", "4", "rice.mp4", "spatial"),
    row(3, "Where is it?", " ", "rice.mp4"),
]
OWN, SHARDS = "longvila_videos", ("longvideo_eval_subset0", "longvideo_eval_subset7")
VIDEOS = media(
    *(f"{OWN}/{name}" for name in ("5nKz1hzvSqs.mp4", "val.mp4", "rice.mp4")),
    f"{SHARDS[0]}/I_Q3ajyOrcI.webm",
    f"{SHARDS[1]}/-a_b.mkv",
)
TURNED_OPTIONS = ("D. to rest", "A. to play", "B. to build", "C. to cook")
FILES = {"train.jsonl": TRAIN, "val.jsonl": VAL, "test.jsonl": TEST, "openended.jsonl": OPENENDED}


def trained(name: str) -> list[Sample]:
    path = f"{OWN}/5nKz1hzvSqs.mp4"
    return [
        sample(f"{name}-1", path, "B"),
        sample(f"{name}-2", path, "D", "temporal", TURNED_OPTIONS),
        sample(f"{name}-3", path, "A", "spatial"),
    ]


def tested(name: str) -> list[Sample]:
    return [
        sample(f"{name}-1", f"{SHARDS[0]}/I_Q3ajyOrcI.webm", "A", "plot"),
        sample(f"{name}-2", f"{SHARDS[1]}/-a_b.mkv", "D"),
    ]


def refused(suffix: str, train: str, test: str) -> list[tuple[str, str, str]]:
    return [
        (f"train{suffix}:4", f"{train}-4", "ambiguous_answer"),
        (f"train{suffix}:5", f"{train}-5", "bad_options"),
        (f"train{suffix}:6", f"{train}-6", "answer_not_in_options"),
        (f"test{suffix}:3", f"{test}-3", "too_few_options"),
        (f"test{suffix}:4", f"{test}-4", "bad_options"),
        (f"test{suffix}:5", f"{test}-5", "missing_media"),
    ]


SHARD = "-00000-of-00001.parquet"

CASES = {
    "folder": Published({**FILES, **VIDEOS}, trained("train"), tested("test"), refused(".jsonl", "train", "test")),
    "Parquet": Published(
        {f"data/train{SHARD}": TRAIN, f"data/test{SHARD}": TEST, **VIDEOS},
        trained("data-train"),
        tested("data-test"),
        refused(SHARD, "data-train", "data-test"),
        ("--train", "{}/data:train", "--eval", "{}/data:test", "--media-root", "{}"),
    ),
}
