"""STAR: csbobby/STAR_Benchmark's JSON arrays beside the videos of Charades."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, video
from vlm_pg.types import Sample


def row(name: str, clip: tuple[str, Any, Any], choices: tuple[str, ...], answer: str | None) -> dict[str, Any]:
    """``clip``: video, start, end. Without an answer there is no such field, as in the test file."""
    published: dict[str, Any] = {"question_id": name, "question": "Which object was put down?", "video_id": clip[0]}
    published |= {"start": clip[1], "end": clip[2], "question_program": [{"function": "Situations", "value_input": []}]}
    published["choices"] = [
        {"choice_id": number, "choice": text, "choice_program": []} for number, text in enumerate(choices)
    ]
    published["situations"] = {"000198": {"rel_pairs": [["o000", "o003"]], "rel_labels": ["r002"]}}
    return published if answer is None else published | {"answer": answer}


def sample(name: str, start: float, end: float, path: str, answer: str) -> Sample:
    return Sample(
        name,
        "Which object was put down?",
        video(path, start=start, end=end),
        ("A. The bag.", "B. The dish.", "C. The shoe.", "D. The book."),
        answer,
        "multiple_choice",
        "star",
        name.partition("_")[0],
    )


FOUR = ("The bag.", "The dish.", "The shoe.", "The book.")
TWICE = ("The bag.", "The dish.", "The bag.", "The book.")
TRAIN = [
    row("Interaction_T1_13", ("6H78U", 11.1, 19.6), FOUR, "The shoe."),
    row("Sequence_T6_2", ("6H78U", 0, 12), FOUR, "The bag."),
    row("Prediction_T1_3", ("47U0Y", 2.5, 30.0), FOUR, " The  book."),
    row("Feasibility_T2_4", ("47U0Y", 2.5, 30.0), FOUR, "The lamp."),
    row("Feasibility_T2_5", ("47U0Y", 2.5, 30.0), TWICE, "The bag."),
    row("Feasibility_T2_6", ("47U0Y", 30.0, 2.5), FOUR, "The bag."),
    row("Feasibility_T2_7", ("GONE1", 2.5, 30.0), FOUR, "The bag."),
    row("Interaction_T1_13", ("47U0Y", 2.5, 30.0), FOUR, "The bag."),
]
VAL = [row("Interaction_T1_1", ("0A8CF", 3.3, 4.4), FOUR, "The dish.")]
TEST = [row(f"Sequence_T1_{number}", ("ZZ89W", 3.3, 4.4), FOUR, None) for number in range(2)]


def kept(folder: str) -> list[Sample]:
    return [
        sample("Interaction_T1_13", 11.1, 19.6, f"{folder}6H78U.mp4", "C"),
        sample("Sequence_T6_2", 0.0, 12.0, f"{folder}6H78U.mp4", "A"),
        sample("Prediction_T1_3", 2.5, 30.0, f"{folder}47U0Y.mp4", "D"),
    ]


def videos(folder: str) -> dict[str, None]:
    return media(*(f"{folder}{name}.mp4" for name in ("6H78U", "47U0Y", "0A8CF", "ZZ89W")))


REFUSED = [
    ("STAR_train.json:1, record 4", "Feasibility_T2_4", "answer_not_in_options"),
    ("STAR_train.json:1, record 5", "Feasibility_T2_5", "ambiguous_answer"),
    ("STAR_train.json:1, record 6", "Feasibility_T2_6", "bad_clip"),
    ("STAR_train.json:1, record 7", "Feasibility_T2_7", "missing_media"),
    ("STAR_train.json:1, record 8", "Interaction_T1_13", "duplicate_id"),
]
AT_480 = "Charades_v1_480/"

CASES = {
    "folder": Published(
        {"STAR_train.json": TRAIN, "STAR_val.json": VAL, "STAR_test.json": TEST, **videos(AT_480)},
        kept(AT_480),
        [sample("Interaction_T1_1", 3.3, 4.4, f"{AT_480}0A8CF.mp4", "B")],
        REFUSED,
    )
}
