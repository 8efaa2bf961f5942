"""Rows of every data set, one at a time: the docstring's example, variants that are kept, and rows that are refused.

``tests/support/published`` has whole files of each published form; here is what those tables do not hold.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import mvbench
from data_pipelines.engine.annotation_files import find_files
from data_pipelines.engine.rows import form_of
from tests.support.pipeline_rows import check_odd_rows, example, one_row
from tests.support.published.case import cases_of, dataset_of, lay_out
from vlm_pg.rewards.rewarder import gold_faults
from vlm_pg.types import BadSample, MediaRef, Sample

Row = dict[str, Any]
WIKI = "https://artofproblemsolving.com/wiki/index.php"
FLASHED = "<image>\nThese are frames of a video.\n"
CHOICES = ("the presence of the gray cube", "the collision between the cube and the sphere")
FIVE = {"A": "10.0", "B": "5.0", "C": "12.0", "D": "15.0", "E": "20.0"}
HUB = "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos"
OPTIONS = "A. dunking a basketball\nB. dribbling a basketball\nC. passing a basketball"
CUPS = ["the left one", "the middle one", "the right one"]
SUBSET, VIDEO = "0_30_s_academic_v0_1", "academic_source/youcook2/101/zukEQgbWdsY/split_2.mp4"
LETTER = "\nPlease respond with only the letter of the correct answer."
GOAL = """What is the man's primary goal in the workshop, as inferred from the video?  \n\
A. Creating a prop replica of Ash's chainsaw hand from "Evil Dead"  \n\
B. Building a custom storage container for mixed nuts  \nC. Installing a ventilation system using pipes and fans  \n\
D. Crafting a DIY household appliance  \n"""


def dialogue(*texts: Any) -> list[Row]:
    return [{"from": ("human", "gpt")[index % 2], "value": text} for index, text in enumerate(texts)]


# Published rows of the examples in the docstrings, as their forms read them.
ROWS: dict[str, Row] = {
    "aime2024": {
        "ID": "2024-II-4", "Problem": "Let $x,y$ and $z$ be positive real numbers ...", "Solution": "Denote ...",
        "Answer": 33,
    },
    "amc2023": {
        "id": 0, "question": "Cities $A$ and $B$ are $45$ miles apart. ...", "answer": "27",
        "url": f"{WIKI}/2023_AMC_12A_Problems/Problem_1",
    },
    "charades_sta": {"line": "3MSZA 24.3 30.4##person turn a light on.", "length": None},
    "clevrer": {
        "scene_index": 10_000, "video_filename": "video_10000.mp4", "questions": [{
            "question_id": 11, "question": "Which of the following is responsible for the collision?",
            "question_type": "explanatory", "choices": [
                {"choice_id": 0, "choice": CHOICES[0], "answer": "correct"},
                {"choice_id": 1, "choice": CHOICES[1], "answer": "wrong"},
                {"choice_id": 2, "choice": "the red object's entering the scene", "answer": "correct"},
            ],
        }],
    },
    "geometry3k": {
        "problem_text": "Find $x$.", "choices": ["5", r"5 \sqrt { 2 }", r"5 \sqrt { 3 }", "10"], "answer": "B",
        "id": 2401, "problem_type_goal": ["Length"], "file": "/geometry3k/test/2401/data.json",
    },
    "gsm8k": {"question": "Natalia sold ...", "answer": "Natalia sold 48/2 = <<48/2=24>>24 ...\n#### 72"},
    "llava_video_178k": {
        "id": "101-zukEQgbWdsY-split_2", "data_source": SUBSET, "video": VIDEO, "conversations": dialogue(
            "What is the color of the skillet in the video?\nA. Black\nB. Silver\nC. Red\nD. Blue\nPlease provide your "
            "answer by stating the letter followed by the full option.", "A. Black.",
        ),
    },
    "longvideo_reason": {
        "problem_id": 0, "problem": GOAL, "data_type": "video", "problem_type": "goal",
        "reasoning": "Checking the video ...", "videos": "longvila_videos/5nKz1hzvSqs.mp4",
        "answer": "<answer>A</answer>",
    },
    "longvideobench": {
        "id": "9PD3ciudpIE_0", "video_id": "9PD3ciudpIE", "question": "What color is the woman's clothing?",
        "question_wo_referring_query": "What color is it?", "candidates": ["yellow", "green", "blue", "red"],
        "correct_choice": 0, "position": [3068], "topic_category": "NP-News-Programs", "question_category": "T2A",
        "level": "L1-Perception", "video_path": "9PD3ciudpIE.mp4", "subtitle_path": "9PD3ciudpIE_en.json",
        "duration_group": 600, "duration": 467.92, "starting_timestamp_for_subtitles": 0, "view_count": 4172,
    },
    "math": {
        "problem": "Half of one?", "level": "Level 1", "type": "Algebra", "solution": r"So $\boxed{\frac{1}{2}}$.",
        "file": "/MATH/train/algebra/1.json",
    },
    "mathvista": {
        "question": "What is the mean?", "image": "images/7.jpg", "choices": None, "unit": "$", "precision": 1.0,
        "answer": "1.2", "question_type": "free_form", "pid": "7", "answer_type": "float",
        "metadata": {"task": "figure question answering", "source": "FigureQA", "split": "testmini"},
    },
    "mmvu": {
        "id": "validation_1", "video": f"{HUB}/Chemistry/0.mp4", "question_type": "multiple-choice",
        "metadata": {"subject": "Chemistry", "textbook": "Chemistry", "knowledge": []}, "choices": FIVE, "answer": "A",
        "question": "... how many grams of precipitate are produced approximately?",
    },
    "mvbench": {
        "task": "action_sequence", "number": 1, "video": "ZS9XR.mp4", "answer": "Ate the medicine.",
        "question": "What happened after the person took the food?", "start": 10.2, "end": 24.8,
        "candidates": ["Ate the medicine.", "Tidied up the blanket.", "Put down the cup.", "Took the box."],
    },
    "nextqa": {
        "video": "4010069381", "question": "how do the two man play the instrument", "answer": "0", "qid": "6",
        "type": "CH", "a0": "roll the handle", "a1": "tap their feet", "a2": " strum the string",
        "a3": "hit with sticks", "a4": "pat with hand ",
    },
    "perception_test": {
        "video_name": "video_10309", "cut": 60, "map": "cut_frame_mapping_valid.json",
        "metadata": {"split": "valid", "frame_rate": 30.0, "num_frames": 300}, "mc_question": [{
            "id": 2, "question": "Under which cup is the ball at the end?", "options": CUPS, "answer_id": 1,
            "area": "memory",
        }],
    },
    "star": {
        "question_id": "Interaction_T1_13", "question": "Which object was tidied up by the person?",
        "video_id": "6H78U", "start": 11.1, "end": 19.6, "answer": "The clothes.", "choices": [
            {"choice_id": number, "choice": text}
            for number, text in enumerate(("The closet/cabinet.", "The blanket.", "The clothes.", "The table."))
        ],
    },
    "tempcompass": {
        "video_id": "1034419625", "task": "multi-choice", "fine": {"action": "fine-grained action"}, "judged": {},
        "action": [
            {"answer": "A. dunking a basketball", "question": f"What is the man doing in the video?\n{OPTIONS}"}
        ],
    },
    "video_mme": {
        "video_id": "001", "duration": "short", "domain": "Knowledge", "sub_category": "Humanity & History",
        "videoID": "fFjv93ACGo8", "question_id": "001-1", "task_type": "Temporal Perception", "answer": "C",
        "question": "What is shown first in the video?",
        "options": ["A. Apples.", "B. Candles.", "C. Berries.", "D. Stars."],
    },
    "video_mmmu": {
        "id": "validation_Math_2", "question": "Which graph is it? <image 1>", "options": ["the first", "the second"],
        "answer": "B", "question_type": "multiple-choice", "link_selected": "https://www.youtube.com/watch?v=x",
        "track": "Adaptation",
    },
    "video_r1": {
        "problem_id": 2, "problem": "What appears on the screen in Russian during the missile's ascent?",
        "data_type": "video", "problem_type": "multiple choice", "options": [
            "A. A YouTube subscription notification", "B. A military command", "C. A warning message",
            "D. A weather update",
        ],
        "process": "<think>Let me think about this ...</think>", "solution": "<answer>A</answer>",
        "path": "./LLaVA-Video-178K/liwei_youtube_videos/videos/youtube_video_2024/ytb_7nRmsEw7nsE.mp4",
        "data_source": "LLaVA-Video-178K/30_60_s_youtube_v0_1",
    },
    "vsi": {
        "conversations": dialogue(f"{FLASHED}How many chairs are in this room?", "4"),
        "question_type": "absolute_count", "video": "scannet/scene0191_00.mp4",
    },
}  # fmt: skip
FORMS = {"aime2024": 1, "math": 1}
# Names of rows without one come from their file; a domain's folder is found, not published.
FROM_FILES: dict[str, Row] = {
    "charades_sta": {"sample_id": "charades_sta_test-1"},
    "gsm8k": {"sample_id": "train-17"},
    "llava_video_178k": {"sample_id": "0_30_s_academic_mc_v0_1_qa_processed-1-2"},
    "longvideo_reason": {"sample_id": "train-1"},
    "video_mmmu": {"media": (MediaRef("video", "Science/validation_Math_2.mp4"),)},
    "vsi": {"sample_id": "vsi_590k-1"},
}


@pytest.mark.parametrize("name", ROWS)
def test_the_published_row_becomes_the_record_of_the_docstring(name: str) -> None:
    (sample,) = one_row(dataset_of(name), ROWS[name], FORMS.get(name, 0))
    expected = example(importlib.import_module(f"data_pipelines.{name}"))
    assert isinstance(sample, Sample) and replace(sample, where="", **FROM_FILES.get(name, {})) == expected
    assert list(gold_faults([sample])) == [None]


# Of damaged rows, by form: what was done, and the reason of the refusal.
DAMAGED: dict[str, dict[int, Mapping[str, str]]] = {
    "aime2024": {
        0: {"without reward_model.ground_truth": "no_gold_answer", "reward_model=7.5": "wrong_type"},
        1: {"without Answer": "missing_field"},
    },
    "amc2023": {0: {"without question": "missing_field", "answer=[]": "wrong_type"}},
    "charades_sta": {1: {"timestamp=[]": "bad_time_span", "caption=7.5": "wrong_type"}},
    "clevrer": {0: {"questions=[]": "no_questions"}},
    "geometry3k": {
        0: {"choices=[None]": "wrong_type", "answer=True": "wrong_type"}, 1: {"without answer": "missing_field"}
    },
    "gsm8k": {0: {"answer=''": "no_gold_answer", "question=7.5": "wrong_type"}},
    "llava_video_178k": {0: {"video={}": "wrong_type", "conversations=[None]": "bad_dialogue"}},
    "longvideo_reason": {0: {"videos={}": "wrong_type", "reasoning=[None]": "wrong_type"}},
    "longvideobench": {0: {"correct_choice=-1": "answer_not_in_options"}, 1: {"id=[]": "wrong_type"}},
    "math": {
        0: {"answer=[]": "wrong_type", "answer=' '": "no_gold_answer", "answer=nan": "wrong_type"},
        1: {"solution=7.5": "no_gold_answer", "without solution": "missing_field"},
    },
    "mathvista": {0: {"answer=''": "no_gold_answer", "image=[]": "wrong_type"}},
    "mmvu": {0: {"choices=7.5": "wrong_type", "choices.A=7.5": "bad_options", "video=[]": "wrong_type"}},
    "mvbench": {0: {"answer='odd'": "answer_not_in_options"}},
    "nextqa": {0: {"answer=-1": "answer_not_in_options", "a0=''": "missing_field"}},
    "perception_test": {0: {"mc_question.0.options=[None]": "wrong_type"}},
    "star": {0: {"choices.0=None": "wrong_type"}},
    "tempcompass": {1: {"dim='odd'": "unknown_dim"}},
    "video_mme": {0: {"answer='odd'": "answer_not_in_options", "without duration": "missing_field"}},
    "video_mmmu": {0: {"options=7.5": "bad_options", "id=[]": "wrong_type", "question=''": "missing_field"}},
    "video_r1": {0: {"options={}": "wrong_type", "problem_type='odd'": "unknown_answer_kind"}},
    "vsi": {
        0: {"conversations=[{}]": "bad_conversation", "video=None": "bad_media", "question_type=7.5": "wrong_type"},
        1: {"ground_truth=True": "wrong_type", "without dataset": "missing_field"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_damaged_row_of_any_form_is_kept_or_refused_with_an_expected_reason(name: str, tmp_path: Path) -> None:
    """The first row of each form, damaged in every field in every way."""
    dataset, first_rows = dataset_of(name), {FORMS.get(name, 0): ROWS[name]}
    for number, case in enumerate(cases_of(name).values()):
        if first_rows.keys() >= set(case.forms) or not case.arguments[0].startswith("{}"):
            continue
        folder = tmp_path / str(number)
        lay_out(folder, {file: text for file, text in case.files.items() if not isinstance(text, bytes | None)})
        found, _ = find_files(dataset, Path(case.arguments[0].replace("{}", str(folder))))
        for path in (path for paths in found.values() for path in paths):
            form = form_of(dataset, path)
            first_rows.setdefault(dataset.forms.index(form), next(iter(form.rows(path)))[1])
    assert len(first_rows) == len(dataset.forms)
    for form_number, row in first_rows.items():
        refused = dict(check_odd_rows(dataset, row, form_number))
        expected = DAMAGED[name].get(form_number, {})
        assert {what: refused[what].reason for what in expected} == expected
        assert len(refused) > 15


def changed(name: str, changes: Row) -> Sample | BadSample:
    """The outcome of the example's row with changes. ``form``: another form, of which ``changes`` are the whole row."""
    changes = dict(changes)
    form = changes.pop("form", None)
    (one,) = one_row(dataset_of(name), ROWS[name] | changes if form is None else changes, form or FORMS.get(name, 0))
    return one


AIME = {"form": 1, "id": 60, "problem": "How long?", "solution": "So.", "answer": "025"}
GEOMETRY = {"form": 1, "images": "a.png", "problem": "<image>Find it.", "answer": "3"}
OPEN = {"question_type": "open-ended", "choices": {}, "answer": "Dolly Zoom"}
TRACK = {"options": [], "question_type": "open"}
TABLE = {
    "form": 1,
    "task": "yes_no",
    "video_id": "7",
    "dim": "speed",
    "number": 2,
    "question": "Is it?",
    "answer": "yes",
}
MATCHING = TABLE | {"task": "caption_matching", "answer": "Option 1: a."}
LVB = {"form": 1, **{name: value for name, value in ROWS["longvideobench"].items() if name != "candidates"}}
CLEVRER = ROWS["clevrer"]["questions"][0]
EVENT = {"form": 1, "video": "3MSZA.mp4", "caption": "a", "length": None}


def solution(text: str) -> Row:
    return {"form": 2, "problem": "1 + 1?", "solution": text}


def count(question: str, answer: Any = "4", **changes: Any) -> Row:
    return {"conversations": dialogue(question, answer), **changes}


def columns(*texts: str) -> Row:
    return LVB | {f"option{index}": text for index, text in enumerate(texts)}


REFUSED: list[tuple[str, str, list[Row]]] = [
    ("aime2024", "no_gold_answer", [AIME | {"answer": answer} for answer in (-1, None, "m+n", "#### 25", 1000)]),
    ("aime2024", "other_data_set", [
        AIME | {"year": 2022}, AIME | {"url": f"{WIKI}/2022_AIME_I_Problems/Problem_1"}, {"ID": "2023-I-1"},
    ]),
    ("amc2023", "no_gold_answer", [{"answer": answer} for answer in ("27 miles", "1e3", 2.5, "#### 27", "9" * 400)]),
    ("charades_sta", "bad_line", [{"line": line} for line in (
        "3MSZA 24.3##person turns.", "3MSZA 24.3 30.4 person turns.", "3MSZA 24,3 30,4##person turns.",
        "3MSZA -1.0 30.4##person turns.", "3MSZA 1e1 30.4##person turns.", "##person turns.",
    )]),
    ("charades_sta", "bad_time_span", [
        *({"line": f"3MSZA 30.4 {end}##person turns."} for end in ("24.3", "30.4", "30.4001")),
        {"line": "3MSZA 11.17 12.0##person turns.", "length": 11.17},
        *(EVENT | {"timestamp": times} for times in ([], [31.0], [1.0, 2.0, 3.0])),
    ]),
    ("charades_sta", "empty_question", [{"line": "3MSZA 24.3 30.4## "}]),
    ("clevrer", "unknown_answer", [
        {"questions": [CLEVRER | {"question_type": "descriptive", "answer": answer}]} for answer in ("pink", "2.5", "²")
    ]),
    ("geometry3k", "ambiguous_answer", [
        GEOMETRY | {"answer": answer, "choices": ["7", choice], "ground_truth": "B"}
        for choice, answer in ((r"5 \sqrt { 2 }", r"5 \sqrt { 3 }"), ("12", "1 2"), ("-5", "5"))
    ]),
    ("geometry3k", "media_mark_without_medium", [GEOMETRY | {"images": ["a.png", "b.png"]}]),
    ("gsm8k", "no_gold_answer", [{"answer": answer} for answer in ("1e400", "#### 7 #### 8 or 9", "#### ")]),
    ("longvideo_reason", "bad_options", [
        {"problem": f"Why?\n{lines}"} for lines in (
            "A. to play\nB. But wait, that is not\nC. to rest", "A. a\nB. b\nC. c\nD. d\nE. e", f"{OPTIONS}\nHmm.",
        )
    ]),
    ("longvideo_reason", "no_answer_tag", [{"answer": answer} for answer in (
        "<answer>A</answer> or <answer>B</answer>", "<answer>A</answer> I think", "A</answer>",
    )]),
    ("longvideo_reason", "wrong_type", [
        *({"videos": videos} for videos in ({}, ["a.mp4", "b.mp4"], [], [3])), {"answer": ["A"]},
    ]),
    ("longvideobench", "wrong_type", [LVB | {"option0": "yellow"}]),
    ("longvideobench", "bad_options", [columns("yellow", "N/A", "blue", "N/A", "N/A")]),
    ("math", "no_gold_answer", [solution("Nobody knows."), solution(r"\boxed{5"), solution(r"\boxed{}")]),
    ("math", "other_data_set", [{"form": 2, "question": "1 + 1?", "answer": "It is 2.\n#### 2"}]),
    ("mathvista", "unknown_precision", [
        {"precision": None}, {"precision": 1.5}, {"answer": "1.25"}, {"precision": "one"},
    ]),
    ("mathvista", "no_gold_answer", [
        {"answer_type": kind, "answer": answer}
        for kind, answer in (("integer", "14.5"), ("integer", "fourteen"), ("float", "1,2"), ("list", "3"))
    ]),
    ("mmvu", "bad_options", [
        {"choices": {"A": "1", "C": "2"}}, {"choices": {"A": "1", "B": "", "C": "2"}}, {"choices": {"A": "1", "B": 2}},
        {"question_type": "open-ended"},
    ]),
    ("mmvu", "bad_media", [{"video": "https://www.youtube.com/watch?v=6HuyUxJBY3E"}, {"video": "videos"}]),
    ("mvbench", "missing_field", [
        {"task": task, part: None} for task in mvbench._OF_CLIPS for part in ("start", "end")
    ]),
    ("mvbench", "unknown_task", [{"task": "object_count"}]),
    ("nextqa", "missing_field", [{"question": ""}, {"a4": None}, {"video": None}, {"answer": None}]),
    ("star", "missing_field", [{"answer": None}]),
    ("star", "wrong_type", [{"start": "11.1"}]),
    ("star", "too_few_options", [{"choices": [{"choice": "The clothes."}]}]),
    ("star", "bad_options", [{"choices": [{"choice": text} for text in (*map(str, range(26)), "The clothes.")]}]),
    ("tempcompass", "bad_options", [MATCHING | {"question": f"Which is it?\n{lines}"} for lines in (
        "Option 1: a.", "Option 1: a.\nOption 2: b.\nOption 1: c.", "Option 1: a.\nB. b.", "Caption C: a.\nb", "",
    )]),
    ("tempcompass", "unknown_task", [TABLE | {"task": "open-ended"}]),
    ("video_mme", "missing_field", [{"question_id": None}]),
    ("video_mmmu", "too_few_options", [{"options": []}, {"options": ["one"], "answer": "A"}]),
    ("video_mmmu", "bad_options", [{"options": options} for options in (
        "red or blue", "[" * 5_000, "[" * 50_000, "{'A': 'red'}", [f"text {number}" for number in range(27)],
    )]),
    ("video_mmmu", "unknown_track", [{"track": None}]),
    ("video_r1", "unknown_data_type", [{"data_type": "sound"}, {"data_type": 3}]),
    ("video_r1", "too_few_options", [{"options": []}, {"options": None}]),
    ("vsi", "media_mark_without_medium", [
        count("<image>\nHow many <image>s?"), count("<image><image>\nHow many chairs?"),
    ]),
    ("vsi", "no_gold_answer", [count("How many?", "four"), count("How many?", None)]),
    ("vsi", "wrong_type", [count("How many?", ["4"])]),
    ("vsi", "bad_options", [count("More?\nOptions:\nA. yes\nC. no", question_type="relative_count"),
                            count("How many?\nA. 3\nB. 4")]),
    ("vsi", "bad_media", [{"image": "a.jpg"}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "reason", "rows"), REFUSED, ids=[f"{name} {reason}" for name, reason, _ in REFUSED])
def test_rows_that_cannot_be_records_are_refused_with_the_reason(name: str, reason: str, rows: list[Row]) -> None:
    for changes in rows:
        one = changed(name, changes)
        assert isinstance(one, BadSample) and one.reason == reason, changes
        assert one.sample_id, "a row without a name is called by its line"


METADATA = {"task": "figure question answering", "context": "table", "grade": "high school", "category": "vqa"}
COMPREHENSION = {"track": "Comprehension", "subject": "Math", "question_type": "multiple-choice"}
KEPT: list[tuple[str, Row, Row]] = [
    ("aime2024", AIME | {"answer": 33.0}, {"answer": "33", "process": "So.", "details": {"id": 60}}),
    ("aime2024", AIME | {"answer": "999"}, {"answer": "999"}),
    ("amc2023", {"answer": "27.0", "url": 7}, {"answer": "27", "details": {"id": 0, "url": 7}}),
    ("amc2023", {"answer": -1.0, "url": None}, {"answer": "-1", "details": {"id": 0}}),
    ("amc2023", {"answer": 0.0}, {"answer": "0"}),
    ("charades_sta", {"line": "3MSZA 24.3 31.9##x", "length": 30.96},
     {"answer": "[24.3, 30.96]", "details": {"sentence": "x", "duration": 30.96}}),
    *(("geometry3k", GEOMETRY | {"answer": answer, "choices": ["7", choice], "ground_truth": "B"}, {"answer": answer})
      for choice, answer in (
          (r"5 \sqrt { 2 }", r"5\sqrt{2}"), (r"5 \sqrt { 2 }", r"$5 \sqrt{2}$"), (r"\frac { 1 } { 2 }", r"\frac12"),
          (r"30 ^ { \circ }", r"30^{\circ}"))),
    *(("gsm8k", {"question": None, "problem": "1 + 1?", "answer": answer}, {"question": "1 + 1?", "answer": gold})
      for answer, gold in (("1,002", "1002"), (142.0, "142"), (-7, "-7"))),
    ("longvideo_reason", {"problem": f"<video>\n{GOAL}", "answer": "<answer>D. Crafting a DIY household appliance."
     "</answer>", "videos": ["longvila_videos/5nKz1hzvSqs.mp4"], "reasoning": None}, {"answer": "D", "process": ""}),
    ("longvideo_reason", {"problem": "What is it for?", "answer": "To show it."}, {"answer_kind": "free_form"}),
    ("longvideobench", columns(*"abcde"), {"options": ("A. a", "B. b", "C. c", "D. d", "E. e")}),
    *(("math", {"form": 2, "answer": "7", **row}, {"question": "1 + 1?", "answer": answer}) for row, answer in (
        ({"question": "1 + 1?", "answer": 142.0}, "142"), ({"problem": "1 + 1?", "answer": 0}, "0"),
        ({"ID": "2024-I-1", "Problem": "1 + 1?", "Solution": "So \\boxed{204}.", "answer": None, "Answer": 204}, "204"),
        ({"problem": "1 + 1?", "solution": "So \\boxed{204}.", "answer": None}, "204"))),
    ("math", {"form": 2, "problem": "?", "solution": r"\boxed{2}", "source": "aops_forum"}, {"source": "aops_forum"}),
    ("math", {"file": "/elsewhere/1.json"}, {"sample_id": "rows-1"}),
    ("mathvista", {"metadata": METADATA}, {"details": {
        "question": "What is the mean?", "question_type": "free_form", "answer_type": "float", "precision": 1.0,
        "unit": "$", **METADATA}}),
    ("mathvista", {"question_type": "multi_choice", "choices": ["yes", "n" * 2_000], "answer": "yes", "metadata": None,
                   "unit": None}, {"answer": "A", "details": {
        "question": "What is the mean?", "question_type": "multi_choice", "answer_type": "float", "precision": 1.0}}),
    *(("mmvu", {"video": None, "video_path": path}, {"media": (MediaRef("video", found),)}) for path, found in (
        (f" {HUB}/Modern%20Physics/12.mp4", "videos/Modern Physics/12.mp4"),
        ("./data/videos/Art/1.mp4", "videos/Art/1.mp4"))),
    *(("mmvu", {"metadata": metadata, "video": f"{HUB}/Modern_Physics/1.mp4"}, {"category": "Modern Physics"})
      for metadata in (None, {"subject": None})),
    *(("mmvu", OPEN | {"choices": choices}, {"options": (), "answer": "Dolly Zoom", "answer_kind": "exact"})
      for choices in (dict.fromkeys("ABCDE", ""), dict.fromkeys("ABCDE"), None)),
    *(("tempcompass", TABLE | {"answer": answer}, {"answer": gold}) for answer, gold in (("No", "no"), (" no ", "no"))),
    ("tempcompass", TABLE | {"task": "multi-choice", "question": f"What?\n{OPTIONS}",
                             "answer": "B. dribbling a basketball"}, {"question": "What?", "answer": "B"}),
    *(("video_mmmu", {"options": options}, {"options": expected}) for options, expected in (
        (["A. red", "B. blue"], ("A. red", "B. blue")), ("['red', 'blue']", ("A. red", "B. blue")),
        ("['it\\'s red', \"it's blue\"]", ("A. it's red", "B. it's blue")),
        (["E. coli", "S. aureus"], ("A. E. coli", "B. S. aureus")), (["$1.00", " 2 "], ("A. $1.00", "B. 2")))),
    *(("video_mmmu", TRACK | {"options": options, "answer": "x"}, {"options": (), "answer_kind": "exact"})
      for options in ("[]", "", None)),
    ("video_mmmu", {"track": "Comprehension"}, {"details": {**COMPREHENSION, "link_selected": ROWS["video_mmmu"][
        "link_selected"]}}),
    ("vsi", count("<image>\nThese are photos.\nHow many chairs?"), {"question": "These are photos.\nHow many chairs?"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "expected"), KEPT)
def test_other_spellings_of_a_row_become_the_expected_record(name: str, changes: Row, expected: Row) -> None:
    sample = changed(name, changes)
    assert isinstance(sample, Sample), sample
    assert {field: getattr(sample, field) for field in expected} == expected
    assert sample.answer_kind == "free_form" or list(gold_faults([sample])) == [None]
