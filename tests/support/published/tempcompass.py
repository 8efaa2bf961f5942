"""TempCompass: the project's files, nested by video and dimension, and lmms-lab's tables, a row a question."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, video
from vlm_pg.types import AnswerKind, Sample

ONE, BACK, LOST = "1034419625", "1034419625_reverse", "1111657885"
CHOICE = "What is the man doing in the video?\nA. dunking a basketball\nB. passing a basketball"
OPTION = "Which description is a more suitable match for the video?\nOption 1: He passes: now.\nOption 2: He dunks."
SENTENCE = "Which sentence better captures the essence of the video?\nSentence A: He sits.\nSentence B: He runs."
CAPTION = "Which caption matches the video better?\nCaption A: He sits.\nCaption B: He runs."
YES_NO = "Is the man dunking?"
INFORMATION = "Generate a video caption.\nInformation A: {'action': 'dunking'}\nGenerated Caption:"


def pair(question: str, answer: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer}


FILES = {
    "multi-choice": {
        ONE: {"action": [pair(CHOICE, "A. dunking a basketball"), pair(CHOICE, "C. shooting")]},
        BACK: {"order": [pair(CHOICE, "B. passing a basketball")], "pace": [pair(CHOICE, "A. dunking a basketball")]},
        LOST: {"action": [pair(CHOICE, "A. dunking a basketball")]},
    },
    "yes_no": {ONE: {"action": [pair(YES_NO, "yes"), pair(YES_NO, "maybe"), "Is it?"], "speed": [pair(YES_NO, "no")]}},
    "caption_matching": {
        ONE: {
            "action": [pair(OPTION, "Option 2: He dunks."), pair(SENTENCE, "Sentence A: He sits.")],
            "direction": [pair(CAPTION, "Caption B: He runs."), pair(CAPTION, "He runs."), pair(CHOICE, "A. x")],
        }
    },
    "captioning": {ONE: {"action": [pair(INFORMATION, "A. dunking")], "speed": [pair(INFORMATION, "A. dunking")]}},
}
META = {
    ONE: {"eval_dim": {"action": {"type": "fine-grained action"}, "speed": {"type": "absolute speed"}, "order": None}},
    BACK: {"eval_dim": {"order": {"event1": "smoking"}}},
}
FINE = {"action": "fine-grained action", "speed": "absolute speed"}


def sample(
    name: str, problem: str, options: tuple[str, ...], gold: str, kind: AnswerKind, folder: str, **details: Any
) -> Sample:
    """The name is the task's, the video's, the dimension's and a number."""
    task, rest = next((one, name[len(one) + 1 :]) for one in FILES if name.startswith(f"{one}_"))
    which = BACK if rest.startswith(BACK) else ONE
    dim = rest[len(which) + 1 : -2]
    if which == ONE and dim in FINE and "fine_dim" not in details:
        details["fine_dim"] = FINE[dim]
    details = {name: value for name, value in details.items() if value}
    about = {"task": task, "dim": dim, "video_id": which, **details}
    ref = video(f"{folder}/{which}.mp4")
    return Sample(name, problem, ref, options, gold, kind, "tempcompass", dim, details=about)


def chosen(name: str, published: str, answer: str, letter: str, folder: str, **details: Any) -> Sample:
    question, *lines = published.split("\n")
    texts = [line.split(" ", 1)[1] if line[1] == "." else line.split(": ", 1)[1] for line in lines]
    options = tuple(f"{name}. {text}" for name, text in zip("AB", texts, strict=True))
    more = {"question": published, "answer": answer, **details}
    return sample(name, question, options, letter, "multiple_choice", folder, **more)


def kept(folder: str) -> dict[str, list[Sample]]:
    """By task, in the order of its questions."""
    return {
        "caption_matching": [
            chosen(f"caption_matching_{ONE}_action_1", OPTION, "Option 2: He dunks.", "B", folder),
            chosen(f"caption_matching_{ONE}_action_2", SENTENCE, "Sentence A: He sits.", "A", folder),
            chosen(f"caption_matching_{ONE}_direction_1", CAPTION, "Caption B: He runs.", "B", folder),
        ],
        "captioning": [
            sample(
                f"captioning_{ONE}_action_1",
                INFORMATION,
                (),
                "A. dunking",
                "free_form",
                folder,
                mc_question=CHOICE,
                mc_answer="A. dunking a basketball",
            )
        ],
        "multi-choice": [
            chosen(f"multi-choice_{ONE}_action_1", CHOICE, "A. dunking a basketball", "A", folder),
            chosen(f"multi-choice_{BACK}_order_1", CHOICE, "B. passing a basketball", "B", folder),
        ],
        "yes_no": [
            sample(f"yes_no_{ONE}_action_1", YES_NO, (), "yes", "yes_no", folder),
            sample(f"yes_no_{ONE}_speed_1", YES_NO, (), "no", "yes_no", folder),
        ],
    }


def every(folder: str) -> list[Sample]:
    return [one for samples in kept(folder).values() for one in samples]


def rows(task: str) -> list[dict[str, Any]]:
    """The same questions as lmms-lab's table has them, without what no table can hold."""
    found = [
        {"video_id": name, **one, "dim": dim}
        for name, dims in FILES[task].items()
        for dim, questions in dims.items()
        for one in questions
        if isinstance(one, dict)
    ]
    if task == "captioning":
        judged = {"mc_question": CHOICE, "mc_answer": "A. dunking a basketball"}
        return [row | (judged if row["dim"] == "action" else dict.fromkeys(judged)) for row in found]
    return found


VIDEOS = ("videos/1034419625.mp4", "videos/1034419625_reverse.mp4")
REASONS = [
    ("caption_matching", 1, f"caption_matching_{ONE}_direction_2", "answer_not_in_options"),
    ("caption_matching", 1, f"caption_matching_{ONE}_direction_3", "bad_options"),
    ("captioning", 1, f"captioning_{ONE}_speed_1", "no_mc_question"),
    ("multi-choice", 1, f"multi-choice_{ONE}_action_2", "answer_not_in_options"),
    ("multi-choice", 2, f"multi-choice_{BACK}_pace_1", "unknown_dim"),
    ("multi-choice", 3, f"multi-choice_{LOST}_action_1", "missing_media"),
    ("yes_no", 1, f"yes_no_{ONE}_action_2", "no_gold_answer"),
    ("yes_no", 1, f"yes_no_{ONE}_action_3", "wrong_type"),
]
NESTED = {f"questions/{task}.json": content for task, content in FILES.items()}
TABLES = {f"{task}/test-00000-of-00001.parquet": rows(task) for task in FILES}
SHARD = "test-00000-of-00001.parquet"

CASES = {
    "the project's files": Published(
        {**NESTED, "meta_info.json": META, **media(*VIDEOS)},
        (),
        every("videos"),
        [
            (f"{task}.json:1" if number == 1 else f"{task}.json:1, record {number}", name, reason)
            for task, number, name, reason in REASONS
        ],
    ),
    "in a folder of all sets, without what lies beside": Published(
        {
            **{f"TempCompass/questions/{task}.json": FILES[task] for task in ("captioning", "yes_no")},
            **media(*(f"TempCompass/{name}" for name in VIDEOS)),
        },
        (),
        [
            sample(one.sample_id, one.question, (), one.answer, "yes_no", "TempCompass/videos", fine_dim="")
            for one in kept("videos")["yes_no"]
        ],
        [
            ("captioning.json:1", f"captioning_{ONE}_action_1", "no_mc_question"),
            ("captioning.json:1", f"captioning_{ONE}_speed_1", "no_mc_question"),
            ("yes_no.json:1", f"yes_no_{ONE}_action_2", "no_gold_answer"),
            ("yes_no.json:1", f"yes_no_{ONE}_action_3", "wrong_type"),
        ],
    ),
    "lmms-lab's tables": Published(
        {**TABLES, "meta_info.json": META, **media(*VIDEOS)},
        (),
        every("videos"),
        [
            (f"{SHARD}:4", f"caption_matching_{ONE}_direction_2", "answer_not_in_options"),
            (f"{SHARD}:5", f"caption_matching_{ONE}_direction_3", "bad_options"),
            (f"{SHARD}:2", f"captioning_{ONE}_speed_1", "no_mc_question"),
            (f"{SHARD}:2", f"multi-choice_{ONE}_action_2", "answer_not_in_options"),
            (f"{SHARD}:4", f"multi-choice_{BACK}_pace_1", "unknown_dim"),
            (f"{SHARD}:5", f"multi-choice_{LOST}_action_1", "missing_media"),
            (f"{SHARD}:2", f"yes_no_{ONE}_action_2", "no_gold_answer"),
        ],
        forms=(1,),
    ),
}
