"""Video-R1: its JSON array for reinforcement learning, and the one with reasoning, which numbers the same questions."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, image, media, video
from vlm_pg.types import Sample

MISSILE = "LLaVA-Video-178K/liwei_youtube_videos/videos/youtube_video_2024/ytb_7nRmsEw7nsE.mp4"
SOURCE = "LLaVA-Video-178K/30_60_s_youtube_v0_1"
OPTIONS = ["A. A notification", "B. A command", "C. A warning", "D. A weather update"]


def row(number: int, kind: str, solution: str, path: str, source: str = SOURCE, **more: Any) -> dict[str, Any]:
    published: dict[str, Any] = {"problem_id": number, "problem": "What is it?", "data_type": "video"}
    if path.endswith((".png", ".jpg")):
        published["data_type"] = "image"
    published |= {"problem_type": kind, "options": OPTIONS if kind == "multiple choice" else []}
    return published | {"solution": f"<answer>{solution}</answer>", "path": f"./{path}", "data_source": source, **more}


CHART, SIGN, ROOM, CUP = "Chart/1.png", "OCR/1.jpg", "Spatial/room/1.png", "PerceptionTest/video_1.mp4"
ROWS = [
    row(1, "multiple choice", "A", MISSILE),
    row(2, "numerical", "12.5", CHART, "ChartQA"),
    row(3, "OCR", "STOP HERE", SIGN, "TextVQA"),
    row(4, "free-form", "A person cracks an egg.", CUP, "PerceptionTest"),
    row(5, "regression", "2.7", ROOM, "SpaceR"),
    row(6, "multiple choice", "C", CHART, "ChartQA"),
    row(7, "multiple choice", "E", MISSILE),
    row(8, "numerical", "twelve", CHART, "ChartQA"),
    # Of another source there is a picture of that name.
    row(9, "numerical", "4", "Math/1.png", "Multimath-300k"),
    row(10, "free-form", "", MISSILE),
    row(11, "riddle", "A", MISSILE),
    row(12, "free-form", "egg", MISSILE, problem="What does <|vision_start|> mean?"),
    row(1, "multiple choice", "B", MISSILE),
    row(14, "multiple choice", "A</answer> or <answer>B", MISSILE),
    row(15, "multiple choice", "A</answer>, as I said: <answer>A", MISSILE),
]
THOUGHTS = "<think>Let me look.\nIt is in Russian ...</think>"
COT = [
    row(1, "multiple choice", "A", MISSILE, process=THOUGHTS),
    row(2, "numerical", "12.5", CHART, "ChartQA", process=THOUGHTS),
]


def sample(number: int, answer: str, **fields: Any) -> Sample:
    fields = {"media": video(MISSILE), "options": (), "source": SOURCE} | fields
    return Sample(str(number), "What is it?", answer=answer, category=fields["source"], **fields)


def choice(number: int, answer: str, **fields: Any) -> Sample:
    return sample(number, answer, answer_kind="multiple_choice", options=tuple(OPTIONS), **fields)


FILE = "Video-R1-260k.json"
FILES = media(MISSILE, CHART, SIGN, ROOM, CUP)

CASES = {
    "for reinforcement learning": Published(
        {FILE: ROWS, "Video-R1-COT-165k.json": COT, **FILES},
        [
            choice(1, "A"),
            sample(2, "12.5", answer_kind="numerical", media=image(CHART), source="ChartQA"),
            sample(3, "STOP HERE", answer_kind="ocr", media=image(SIGN), source="TextVQA"),
            sample(4, "A person cracks an egg.", answer_kind="free_form", media=video(CUP), source="PerceptionTest"),
            sample(5, "2.7", answer_kind="regression", media=image(ROOM), source="SpaceR"),
            choice(6, "C", media=image(CHART), source="ChartQA"),
            choice(15, "A"),
        ],
        refused=[
            (f"{FILE}:1, record 7", "7", "answer_not_in_options"),
            (f"{FILE}:1, record 8", "8", "unscorable_gold_answer"),
            (f"{FILE}:1, record 9", "9", "missing_media"),
            (f"{FILE}:1, record 10", "10", "empty_answer"),
            (f"{FILE}:1, record 11", "11", "unknown_answer_kind"),
            (f"{FILE}:1, record 12", "12", "media_token_in_text"),
            (f"{FILE}:1, record 13", "1", "duplicate_id"),
            (f"{FILE}:1, record 14", "14", "ambiguous_answer"),
        ],
        arguments=("{}", "--eval-share", "0"),
    ),
    "with reasoning": Published(
        {FILE: ROWS, "Video-R1-COT-165k.json": COT, **FILES},
        [
            choice(1, "A", process=THOUGHTS),
            sample(2, "12.5", answer_kind="numerical", media=image(CHART), source="ChartQA", process=THOUGHTS),
        ],
        arguments=("--train", "{}/Video-R1-COT-165k.json", "--media-root", "{}", "--eval-share", "0"),
    ),
}
