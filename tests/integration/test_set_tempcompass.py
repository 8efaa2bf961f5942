"""TempCompass the whole way: four nested files or tables, and the annotations of their videos; asked; scored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scored_sets import WORTHLESS, PreparedSet, Scores, check_scores
from tests.support.tiny_media import mp4

pytestmark = pytest.mark.matrix

ONE, BACK = "1034419625", "1034419625_reverse"
CHOICE = "What is the man doing in the video?\nA. dunking a basketball\nB. passing a basketball\nC. resting"
OPTION = "Which description is a more suitable match for the video?\nOption 1: He passes.\nOption 2: He dunks."
SENTENCE = "Which sentence better captures the essence of the video?\nSentence A: He sits.\nSentence B: He runs."
CAPTION = "Which caption matches the video better?\nCaption A: He sits.\nCaption B: He runs."
INFORMATION = "Generate a video caption.\nInformation A: {'action': 'dunking'}\nGenerated Caption:"
DUNKING, PASSING = "A. dunking a basketball", "B. passing a basketball"


def asked(question: str, answer: str) -> dict[str, Any]:
    return {"question": question, "answer": answer}


FILES = {
    "questions/multi-choice.json": {
        ONE: {
            "action": [asked(CHOICE, DUNKING), asked(CHOICE.replace("man", "player"), PASSING)],
            "speed": [asked(CHOICE.replace("What", "Slowly, what"), PASSING)],
        },
        BACK: {"order": [asked(CHOICE, PASSING)]},
    },
    "questions/yes_no.json": {
        ONE: {
            "action": [asked("Is the man dunking?", "yes"), asked("Is he sleeping?", "no")],
            "speed": [asked("Is it slow?", "no")],
        }
    },
    "questions/caption_matching.json": {
        ONE: {"action": [asked(OPTION, "Option 2: He dunks."), asked(SENTENCE, "Sentence A: He sits.")]},
        BACK: {"order": [asked(CAPTION, "Caption B: He runs.")]},
    },
    "questions/captioning.json": {ONE: {"action": [asked(INFORMATION, "A. dunking")]}},
    # As the project annotates its videos: null for a dimension that is not asked about; order has no finer type.
    "meta_info.json": {
        ONE: {
            "eval_dim": {
                "action": {"subject": "man", "action": "dunking", "type": "fine-grained action"},
                "speed": {"subject": "entire video", "speed": "slow motion", "type": "absolute speed"},
                "direction": None,
                "order": None,
                "attribute_change": None,
            },
            "content": ["people"],
        },
        BACK: {
            "eval_dim": {"action": None, "order": {"subject": "man", "event1": "runs", "event2": "sits"}},
            "content": ["people"],
        },
    },
    f"videos/{ONE}.mp4": mp4(1, seconds=10),
    f"videos/{BACK}.mp4": mp4(2, seconds=16),
}
QUESTIONS = "questions/"


def flat(task: str) -> list[dict[str, Any]]:
    """The same questions as lmms-lab's table has them, a row each."""
    found = [
        {"video_id": name, **one, "dim": dim}
        for name, dims in FILES[f"{QUESTIONS}{task}.json"].items()
        for dim, several in dims.items()
        for one in several
    ]
    judged = {"mc_question": CHOICE, "mc_answer": DUNKING}
    return [row | judged for row in found] if task == "captioning" else found


BESIDE = {name: content for name, content in FILES.items() if not name.startswith(QUESTIONS)}
TASKS = ("multi-choice", "yes_no", "caption_matching", "captioning")
FORMS = {
    "the project's files": FILES,
    "lmms-lab's tables": {**{f"{task}/test-00000-of-00001.parquet": flat(task) for task in TASKS}, **BESIDE},
}
MC, YN, CM = f"multi-choice_{ONE}", f"yes_no_{ONE}", f"caption_matching_{ONE}"
# Question, output, what ours, the authors' rules without their judge and lmms-eval's say. The authors' take an option's
# line, its letter, or a letter before "." or ")"; what begins with "no"; a caption's line, text, name or letter.
TABLE = [
    (f"{CM}_action_1", "Option 2", ("B", 1), ("B", 1), ("B", 1)),
    (f"{CM}_action_2", "He sits.", ("A", 1), ("A", 1), ("A", 1)),
    (f"caption_matching_{BACK}_order_1", "Caption A: He sits.", ("A", 0), ("A", 0), ("A", 0)),
    (f"captioning_{ONE}_action_1", "A man dunks.", WORTHLESS, WORTHLESS, WORTHLESS),
    (f"{MC}_action_1", "A", ("A", 1), ("A", 1), ("A", 1)),
    (f"{MC}_action_2", "(B)", ("B", 1), (None, 0), (None, 0)),
    (f"{MC}_speed_1", "B: passing a basketball", ("B", 1), (None, 0), (None, 0)),
    (f"multi-choice_{BACK}_order_1", " B", ("B", 1), ("B", 1), (None, 0)),
    (f"{YN}_action_1", "Yes, he is.", ("yes", 1), ("yes", 1), ("yes", 1)),
    (f"{YN}_action_2", "Not sure.", (None, 0), ("no", 1), ("no", 1)),
    (f"{YN}_speed_1", "Yes and no.", (None, 0), ("yes", 0), ("yes", 0)),
]
NOTE = "No question of captioning could be scored; the mean is over the other tasks."
FINE, SLOW = "fine-grained action", "absolute speed"
SCORES = [
    # Caption matching 1, 1, 0; choice 1, 1, 1, 1; yes/no 1, 0, 0: (2/3 + 1 + 1/3) / 3, and 7/10.
    Scores(
        "tempcompass/official",
        "ours",
        "ours",
        2 / 3,
        {"mean of tasks": 2 / 3, "mean over questions": 7 / 10},
        {"total": 11, "scored": 10, "no_value": 1, "unparsed": 3},
        {
            "task": {
                "caption_matching": (2 / 3, 3),
                "captioning": (None, 0),
                "multi-choice": (1, 4),
                "yes_no": (1 / 3, 3),
            },
            # Action: 1, 1; 1, 1; 1, 0. Speed: 1; 0. Order: 0; 1.
            "dim": {"action": (5 / 6, 6), "order": (1 / 2, 2), "speed": (1 / 2, 2)},
            "fine_dim": {SLOW: (1 / 2, 2), FINE: (5 / 6, 6), "order": (1 / 2, 2)},
            "dim of multi-choice": {"action": (1, 2), "order": (1, 1), "speed": (1, 1)},
            "fine_dim of yes_no": {SLOW: (0, 1), FINE: (1 / 2, 2)},
        },
        [NOTE],
    ),
    # 1, 1, 0; 1, 0, 0, 1; 1, 1, 0: (2/3 + 1/2 + 2/3) / 3 = 11/18, and 6/10.
    Scores(
        "tempcompass/official",
        "published",
        "tempcompass/official",
        11 / 18,
        {"mean of tasks": 11 / 18, "mean over questions": 6 / 10},
        {"total": 11, "scored": 10, "no_value": 1, "unparsed": 3},
        {
            "task": {
                "caption_matching": (2 / 3, 3),
                "captioning": (None, 0),
                "multi-choice": (1 / 2, 4),
                "yes_no": (2 / 3, 3),
            },
            # Action: 1, 1; 1, 0; 1, 1. Speed: 0; 0. Order: 0; 1.
            "fine_dim": {SLOW: (0, 2), FINE: (5 / 6, 6), "order": (1 / 2, 2)},
            "fine_dim of multi-choice": {SLOW: (0, 1), FINE: (1 / 2, 2), "order": (1, 1)},
            "fine_dim of caption_matching": {FINE: (1, 2), "order": (0, 1)},
        },
        [NOTE],
    ),
    # " B" is not stripped: 1, 0, 0, 0. (2/3 + 1/4 + 2/3) / 3 = 19/36, and 5/10.
    Scores(
        "tempcompass/lmms",
        "published",
        "tempcompass/lmms",
        19 / 36,
        {"mean of tasks": 19 / 36, "mean over questions": 5 / 10},
        {"total": 11, "scored": 10, "no_value": 1, "unparsed": 4},
        {"fine_dim": {SLOW: (0, 2), FINE: (5 / 6, 6), "order": (0, 2)}},
        [NOTE],
    ),
]


@pytest.fixture(scope="module", params=FORMS)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return PreparedSet(tmp_path_factory.mktemp("tempcompass"), "tempcompass", FORMS[request.param])


def test_questions_become_records_of_their_tasks(prepared: PreparedSet) -> None:
    assert list(prepared.samples) == [question for question, *_ in TABLE] and not prepared.refused
    kinds = {one.details["task"]: one.answer_kind for one in prepared.samples.values()}
    assert kinds == {
        "caption_matching": "multiple_choice",
        "captioning": "free_form",
        "multi-choice": "multiple_choice",
        "yes_no": "yes_no",
    }
    # What a caption's judge is asked is the first question of multiple choice about the same video and dimension.
    details = prepared.samples[f"captioning_{ONE}_action_1"].details
    assert (details["mc_question"], details["mc_answer"]) == (CHOICE, DUNKING)


def test_words_are_those_published(prepared: PreparedSet) -> None:
    asked = prepared.prompts("tempcompass/official")
    words = {name: line["user"] for name, line in asked.items()}
    assert words[f"{MC}_action_1"] == f"{CHOICE}\nPlease directly give the best option:"
    assert words[f"{CM}_action_1"] == f"{OPTION}\nPlease directly give the best option:"
    assert words[f"{YN}_action_1"] == "Is the man dunking?\nPlease answer yes or no:"
    assert words[f"captioning_{ONE}_action_1"] == INFORMATION
    # One frame a second. 10 of 20 frames are 19 / 9 apart: 0, 2.11, 4.22, 6.33, 8.44, 10.56, ... rounded, in halves.
    assert asked[f"{MC}_action_1"]["media"][0]["frame_seconds"] == [0, 1, 2, 3, 4, 5.5, 6.5, 7.5, 8.5, 9.5]


def test_lmms_eval_shows_at_most_32_frames(prepared: PreparedSet) -> None:
    """All of 32 frames, and all of 20."""
    asked = prepared.prompts("tempcompass/lmms")
    assert asked[f"multi-choice_{BACK}_order_1"]["media"][0]["frame_seconds"] == [number / 2 for number in range(32)]
    assert asked[f"{MC}_action_1"]["media"][0]["frame_seconds"] == [number / 2 for number in range(20)]


def test_video_r1_asks_the_choices_alone(prepared: PreparedSet) -> None:
    """The rule takes the whole text in the tags, or the whole output: "(B)" and " B: ..." are wrong, " B" is right."""
    assert set(prepared.prompts("tempcompass/video_r1")) == {one for one in prepared.samples if one.startswith("multi")}
    table = [
        (f"{MC}_action_1", "<think>B?</think><answer> A </answer>", ("A", 1)),
        (f"{MC}_action_2", "<answer>(B)</answer>", (None, 0)),
        (f"{MC}_speed_1", "<answer>A</answer>", ("A", 0)),
        (f"multi-choice_{BACK}_order_1", "B", ("B", 1)),
    ]
    expected = Scores(
        "tempcompass/video_r1",
        "published",
        "tempcompass/video_r1",
        2 / 4,
        {"mean of tasks": 2 / 4, "mean over questions": 2 / 4},
        {"total": 4, "scored": 4, "unparsed": 1, "not_asked": 7},
        notes=["The set has 4 tasks, and questions of 1 are here."],
    )
    check_scores(prepared, table, 0, expected)


@pytest.mark.parametrize("place", range(3), ids=["ours", "official", "lmms"])
def test_outputs_are_read_scored_and_averaged(prepared: PreparedSet, place: int) -> None:
    check_scores(prepared, TABLE, place, SCORES[place])
