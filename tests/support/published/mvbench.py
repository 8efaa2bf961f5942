"""MVBench: a file for each task in ``json``, and its videos in the folder of the set that they come from."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, video
from vlm_pg.types import Sample

STAR, CLEVRER, PERCEPTION = "star/Charades_v1_480", "clevrer/video_validation", "perception/videos"


def row(file: str, answer: str | None, *candidates: str, **changes: Any) -> dict[str, Any]:
    texts = list(candidates or ("Sat down.", "Took the cup.", "Left."))
    return {"video": file, "question": "What came after it?", "candidates": texts, "answer": answer} | changes


FILES = {
    "json/action_sequence.json": [
        row("ZS9XR.mp4", "Took the cup.", start=10.2, end=24.8, accurate_start=11.0, accurate_end=20.0),
        row("ZS9XR.mp4", "Sat down.", start=0, end=4),
        row("ZS9XR.mp4", "Left."),
        row("ZS9XR.mp4", "Left.", start=9.0, end=2.0),
        row("AAAAA.mp4", "Left.", start=1.0, end=2.0),
        row("ZS9XR.mp4", "Stood up.", start=1.0, end=2.0),
        row("ZS9XR.mp4", "Left.", "Left.", "Sat.", "Left.", start=1.0, end=2.0),
    ],
    # A video of this name is in two sets' folders. Other tasks' rows are about whole videos, whatever they say.
    "json/character_order.json": [row("video_10309.mp4", "cat", "a", "cat", start=1.0, end=2.0)],
    "json/moving_count.json": [row("video_10309.mp4", "3", "2", "4", "3", "1")],
    "json/action_antonym.json": [row("166583.webm", "Left.")],
    "json/fine_grained_pose.json": [row("S001C001P001R001A008_rgb.avi", "Left.")],
    "json/episodic_reasoning.json": [
        row("castle_s07e05_seg02_clip_19", "Left.", start=1.5, end=6.0),
        row("castle_s07e05_seg02_clip_20", "Left.", start=1.5, end=6.0),
    ],
}
NAMES = [f"{STAR}/ZS9XR.mp4", f"{PERCEPTION}/video_10309.mp4", f"{CLEVRER}/video_10309.mp4", "ssv2_video/166583.webm"]
NTU = "nturgbd/S001C001P001R001A008_rgb.avi"
CASTLE = "tvqa/frames_fps3_hq/castle_s07e05_seg02_clip_19"
PICTURES = [f"{CASTLE}/{number:05}.jpg" for number in range(1, 16)]  # of 5 s
CHOICES = ("A. Sat down.", "B. Took the cup.", "C. Left.")


def sample(name: str, path: str, options: tuple[str, ...], answer: str, **clip: float) -> Sample:
    task = name.partition("-")[0]
    question = "What came after it?"
    of_task = {"task": task}
    return Sample(
        name, question, video(path, **clip), options, answer, "multiple_choice", "mvbench", task, details=of_task
    )


def kept(folder: str) -> list[Sample]:
    star, perception, clevrer, ssv2 = (f"{folder}/{name}" for name in NAMES)
    return [
        sample("action_antonym-1", ssv2, CHOICES, "C"),
        sample("action_sequence-1", star, CHOICES, "B", start=10.2, end=24.8),
        sample("action_sequence-2", star, CHOICES, "A", start=0.0, end=4.0),
        sample("character_order-1", perception, ("A. a", "B. cat"), "B"),
        sample("episodic_reasoning-1", f"{folder}/{CASTLE}", CHOICES, "C", start=1.5, end=6.0, folder_fps=3.0),
        sample("fine_grained_pose-1", f"{folder}/{NTU}", CHOICES, "C"),
        sample("moving_count-1", clevrer, ("A. 2", "B. 4", "C. 3", "D. 1"), "C"),
    ]


IN = "action_sequence.json:1, record"
REFUSED = [
    (f"{IN} 3", "action_sequence-3", "missing_field"),
    (f"{IN} 4", "action_sequence-4", "bad_clip"),
    (f"{IN} 5", "action_sequence-5", "missing_media"),
    (f"{IN} 6", "action_sequence-6", "answer_not_in_options"),
    (f"{IN} 7", "action_sequence-7", "ambiguous_answer"),
    ("episodic_reasoning.json:1, record 2", "episodic_reasoning-2", "missing_media"),
]
CASES = {
    "as published": Published(
        {**FILES, **media(*(f"video/{name}" for name in (*NAMES, *PICTURES, NTU)), f"other/{STAR}/AAAAA.mp4")},
        (),
        kept("video"),
        REFUSED,
    )
}
