"""Each evaluation set from its published files to its figures, through the commands.

Files are those of ``tests/support/published``. Outputs are written by hand; readings, scores and figures are worked out
by hand from the published rules.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.scored_sets import prepare, prompts, score
from vlm_pg.cli import main

# Answer and score of an output. OUT: not in the denominator. WORTHLESS: without a score.
OUT, WORTHLESS = ("left out", None), (None, None)
OURS = "ours"


@dataclass(frozen=True)
class Reader:
    """A reader, by its protocol, and what it makes of the table.

    ``name``: as ``--reader`` takes it. ``figures``: of the whole set, the cited one first. ``counts``: those that are
    not 0, where they differ from those of a
    set whose questions are all scored. ``groups``: mean and number of scored questions, of some groups.
    """

    protocol: str
    name: str
    figures: Mapping[str, float | None]
    counts: Mapping[str, int]
    groups: Mapping[str, Mapping[str, tuple[float | None, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalSet:
    """A form of a set, the frames of its first question by protocol, outputs with what each reader makes of them.

    ``table``: question, output, a reading for each of ``readers`` (None: not prompted); several outputs of a question
    follow each other.
    """

    form: str
    frames: Mapping[str, int]
    table: Sequence[tuple[Any, ...]]
    readers: Sequence[Reader]


A, C, P = "Adaptation_", "Comprehension_", "Perception_"
MATH, MEDICINE, ART = "validation_Math_15", "validation_Basic_Medical_Science_10", "new_Art_Theory_3"
CM, MC, YN = "caption_matching_1034419625", "multi-choice_1034419625", "yes_no_1034419625"
MEAN, TASKS, TRACKS = "mean over questions", "mean of tasks", "mean of tracks"
ACTION, SPEED = "fine-grained action", "absolute speed"
PIPELINES = {"math500": "math", "vsi_bench": "vsi"}
SETS: dict[str, EvalSet] = {
    "video_mme": EvalSet(
        "as the archives unpack",
        {"official": 600, "lmms_subtitles": 32, "qwen3_vl": 512},
        [
            ("001-1", "A man counts, so the answer is C.", ("C", 1), ("A", 0), ("A", 0)),
            ("001-2", "", (None, 0), OUT, (None, 0)),
            ("002-1", "<answer>A</answer>", ("A", 1), ("A", 1), ("A", 1)),
        ],
        [
            Reader("official", OURS, {MEAN: 2 / 3}, {"unparsed": 1}, {"duration": {"long": (1, 1), "short": (0.5, 2)}}),
            # What is not read leaves the denominator.
            Reader(
                "official",
                "published",
                {MEAN: 1 / 2},
                {"scored": 2, "no_value": 1, "unparsed": 1, "left_out": 1},
                {"task_type": {"Counting Problem": (0.5, 2), "OCR Problems": (None, 0)}},
            ),
            Reader("lmms", "published", {MEAN: 1 / 3}, {"unparsed": 1}, {"domain": {"Knowledge": (0.333333, 3)}}),
        ],
    ),
    "mvbench": EvalSet(
        "as published",
        {"official": 600},
        [
            ("action_antonym-1", "C) Left.", ("C", 1), ("C", 1), ("C", 1)),
            ("action_sequence-1", "", (None, 0), (None, 1), OUT),
            ("action_sequence-2", "A man sat down.", (None, 0), ("A", 1), ("A", 1)),
            ("character_order-1", "b) because he holds it.\nOn reflection, A.", ("A", 0), ("B", 1), ("B", 1)),
            ("episodic_reasoning-1", "The answer is C", ("C", 1), (None, 0), ("C", 1)),
            ("moving_count-1", "**C**", ("C", 1), (None, 0), ("C", 1)),
        ],
        [
            # Tasks 1, 0, 0, 1, 1; questions 1, 0, 0, 0, 1, 1.
            Reader(
                "qwen2_5_vl",
                OURS,
                {TASKS: 3 / 5, MEAN: 3 / 6},
                {"scored": 6, "no_output": 1, "unparsed": 2},
                {"task": {"action_antonym": (1, 1), "action_sequence": (0, 2), "fine_grained_pose": (None, 0)}},
            ),
            Reader("official", "published", {TASKS: 3 / 5, MEAN: 4 / 6}, {"scored": 6, "no_output": 1, "unparsed": 3}),
            Reader(
                "lmms",
                "published",
                {TASKS: 1, MEAN: 1},
                {"scored": 5, "no_output": 1, "no_value": 1, "unparsed": 1, "left_out": 1},
            ),
        ],
    ),
    "tempcompass": EvalSet(
        "the project's files",
        {"official": 300, "lmms": 32},
        [
            (f"{CM}_action_1", "Option 2", ("B", 1), ("B", 1), ("B", 1), None),
            (f"{CM}_action_2", "He sits.", ("A", 1), ("A", 1), ("A", 1), None),
            (f"{CM}_direction_1", "Caption A: He sits.", ("A", 0), ("A", 0), ("A", 0), None),
            ("captioning_1034419625_action_1", "A man dunks.", WORTHLESS, WORTHLESS, WORTHLESS, None),
            (f"{MC}_action_1", "(A)", ("A", 1), (None, 0), (None, 0), (None, 0)),
            (f"{MC}_reverse_order_1", " B", ("B", 1), ("B", 1), (None, 0), ("B", 1)),
            (f"{YN}_action_1", "Yes, he is.", ("yes", 1), ("yes", 1), ("yes", 1), None),
            (f"{YN}_speed_1", "Not sure.", (None, 0), ("no", 1), ("no", 1), None),
        ],
        [
            # Caption matching 2/3, choice 1, yes/no 1/2.
            Reader(
                "official",
                OURS,
                {TASKS: 13 / 18, MEAN: 5 / 7},
                {"scored": 7, "no_value": 1, "unparsed": 2},
                {
                    "dim": {"action": (1, 4), "direction": (0, 1), "order": (1, 1), "speed": (0, 1)},
                    "fine_dim of yes_no": {SPEED: (0, 1), ACTION: (1, 1)},
                },
            ),
            # 2/3, 1/2, 1.
            Reader(
                "official",
                "published",
                {TASKS: 13 / 18, MEAN: 5 / 7},
                {"scored": 7, "no_value": 1, "unparsed": 2},
                {"fine_dim": {"(not given)": (0, 1), SPEED: (1, 1), ACTION: (0.75, 4), "order": (1, 1)}},
            ),
            # " B" is not stripped: 2/3, 0, 1.
            Reader("lmms", "published", {TASKS: 5 / 9, MEAN: 4 / 7}, {"scored": 7, "no_value": 1, "unparsed": 3}),
            # It prompts the choices alone.
            Reader(
                "video_r1",
                "published",
                {TASKS: 1 / 2, MEAN: 1 / 2},
                {"total": 2, "scored": 2, "unparsed": 1, "not_asked": 6},
            ),
        ],
    ),
    "vsi_bench": EvalSet(
        "VSI-Bench, lines",
        {"official": 600, "video_r1": 16},
        [
            # Off by a quarter: five of ten thresholds, and one more with "<=".
            ("0", "5", ("5", 0.5), ("5", 0.6), ("5", 0.5)),
            ("7", "B.", ("B", 1), ("B", 1), (None, 0)),
            ("8", "<answer>A</answer>", ("A", 1), (None, 0), ("A", 1)),
            ("9", "There are 2.", ("2", 0), (None, 0), (None, 0)),
        ],
        [
            Reader(
                "official",
                OURS,
                {TASKS: 2.5 / 4, MEAN: 2.5 / 4},
                {},
                {"task": {"object_counting": (0.5, 1), "object_rel_direction": (1, 1)}},
            ),
            Reader("official", "published", {TASKS: 1.6 / 4, MEAN: 1.6 / 4}, {"unparsed": 2}),
            Reader(
                "video_r1",
                "published",
                {"(choice + numerical) / 2": 0.75 / 2, "choice": 1 / 2, "numerical": 1 / 4},
                {"unparsed": 2},
            ),
        ],
    ),
    "video_mmmu": EvalSet(
        "lmms-lab's Parquet",
        {"official": 600, "lmms": 32},
        [
            # The gold answer is a list that lost a quotation mark, as it is published.
            (f"{A}{MATH}", "3.429", ("3.429", 0), ("3.429", 0), ("3.429", 0)),
            (f"{A}{MATH}_question_only", "3.429", ("3.429", 0), ("3.429", 0), ("3.429", 0)),
            (f"{A}{MEDICINE}", "It is C.", ("C", 1), ("It is C.", 1), ("It is C.", 1)),
            # Options, and no type: the published code takes it for an open question.
            (f"{A}{ART}", "It is B.", ("B", 0), ("It is B.", 0), ("It is B.", 0)),
            (f"{A}dev_Math_1", "It is 0.3.", ("0.3", 1), ("It is 0.3.", 1), ("It is 0.3.", 1)),
            (f"{C}{MATH}", "K", ("K", 1), ("K", 1), ("K", 1)),
            (f"{P}{MATH}", "Not (A); it is (C)", ("C", 1), ("C", 1), ("C", 1)),
            (f"{P}{MEDICINE}", "I choose option B.", ("B", 0), ("B", 0), ("I", 0)),
            (f"{P}{ART}", "", (None, 0), OUT, (None, 0)),
        ],
        [
            # Adaptation 0, 1, 0, 1; comprehension 1; perception 1, 0, 0: (1/2 + 1 + 1/3) / 3.
            Reader(
                "official",
                OURS,
                {TRACKS: 11 / 18, MEAN: 4 / 8, "adaptation without the lecture": 0, "knowledge gain": 50},
                {"total": 8, "scored": 8, "unparsed": 1},
                {
                    "track": {"Adaptation": (0.5, 4), "Comprehension": (1, 1), "Perception": (0.333333, 3)},
                    "subject": {"Art_Theory": (0, 2), "Basic_Medical_Science": (0.5, 2), "Math": (0.75, 4)},
                },
            ),
            # Perception 1, 0, out.
            Reader(
                "official",
                "published",
                {TRACKS: 2 / 3, MEAN: 4 / 7, "adaptation without the lecture": 0, "knowledge gain": 50},
                {"total": 8, "scored": 7, "no_value": 1, "unparsed": 1, "left_out": 1},
            ),
            Reader(
                "lmms",
                "published",
                {TRACKS: 11 / 18, MEAN: 4 / 8, "adaptation without the lecture": 0, "knowledge gain": 50},
                {"total": 8, "scored": 8, "unparsed": 1},
            ),
        ],
    ),
    "mmvu": EvalSet(
        "the hub",
        {"official": 64, "lmms": 32},
        [
            ("validation_0", "", (None, 0), (None, 1), None),
            ("validation_1", "Therefore, the final answer is: A", ("A", 1), ("A", 1), (None, 0)),
            ("validation_2", "It is B, not E.", ("B", 0), (None, 1), (None, 0)),
            ("validation_3", "48", ("48", 1), ("48", 1), None),
            ("validation_4", "No, it is a pan.", ("no", 0), ("No, it is a pan.", 0), None),
            ("validation_5", "The answer is 0.286.", ("0.286", 1), ("The answer is 0.286.", 1), None),
            ("validation_6", "48 g/mol", ("48 g/mol", 0), ("48 g/mol", 1), None),
        ],
        [
            Reader(
                "official",
                OURS,
                {MEAN: 3 / 7, "multiple choice": 1 / 2, "open-ended": 2 / 5},
                {"scored": 7, "no_output": 1, "unparsed": 1},
                {
                    "group": {"Humanities & Social Science": (0.4, 5), "Science": (0.5, 2)},
                    "subject": {"Art": (0.4, 5), "Chemistry": (1, 1), "Modern Physics": (0, 1)},
                },
            ),
            Reader(
                "lmms",
                "published",
                {MEAN: 6 / 7, "multiple choice": 1, "open-ended": 4 / 5},
                {"scored": 7, "no_output": 1, "unparsed": 2},
            ),
            Reader(
                "video_r1",
                "published",
                {MEAN: 0, "multiple choice": 0, "open-ended": None},
                {"total": 3, "scored": 2, "no_output": 1, "unparsed": 2, "not_asked": 5},
            ),
        ],
    ),
    "longvideobench": EvalSet(
        "as published",
        {"official": 256, "lmms": 32},
        [
            ("9PD3ciudpIE_0", "Answer: A", ("A", 1), ("A", 1)),
            ("9PD3ciudpIE_1", "It might be Bob's, so the answer is (C).", ("C", 1), ("B", 0)),
        ],
        [
            Reader(
                "lmms",
                OURS,
                {MEAN: 1},
                {"scored": 2, "no_output": 1},
                {"duration_group": {"15": (None, 0), "60": (1, 2)}, "level": {"L1-Perception": (1, 2)}},
            ),
            Reader(
                "lmms",
                "published",
                {MEAN: 1 / 2},
                {"scored": 2, "no_output": 1},
                {"question_category": {"T2A": (1, 1), "TOS": (0, 1)}},
            ),
        ],
    ),
    "longvideo_reason": EvalSet(
        "folder",
        {"official": 600},
        [
            ("test-1", "<answer>(A)</answer>", ("A", 1), ("(A)", 0)),
            ("test-2", "<answer>A</answer> No: <answer>D</answer>", ("D", 1), ("A", 0)),
        ],
        [
            Reader("official", OURS, {MEAN: 1}, {}, {"problem_type": {"goal": (1, 1), "plot": (1, 1)}}),
            Reader("official", "published", {MEAN: 0}, {}),
        ],
    ),
    "nextqa": EvalSet(
        "Parquet, flat",
        {"official": 600, "lmms": 32},
        [
            ("17_0", "First B. Wait, he gets up again: the answer is (D).", ("D", 1), ("D", 1)),
            ("18_0", "<think>It may be (A).</think>\n\nB. dog", ("B", 1), ("A", 0)),
        ],
        [
            Reader("lmms", OURS, {MEAN: 1}, {}, {"type": {"DO": (1, 2)}, "kind": {"D": (1, 2)}}),
            Reader("lmms", "published", {MEAN: 1 / 2}, {}),
        ],
    ),
    "mathvista": EvalSet(
        "object by pid",
        {"official": 1},
        [
            # Published, without its judge: any other output to a choice is the shortest one.
            ("1", "(B)", ("B", 1), ("A", 0)),
            ("2", "14.9", ("14.9", 0), (None, 0)),
            # The set's precision decides: round(1.25, 1) is 1.2 in Python.
            ("3", "1.25", ("1.25", 1), ("1.2", 1)),
            ("4", "0.36", ("0.36", 1), ("0.36", 1)),
            ("5", "[2014, 2016]", ("[2014, 2016]", 1), (None, 0)),
            ("6", "It is -3 cm.", ("-3", 1), (None, 0)),
            ("7", "3", ("C", 1), ("C", 1)),
        ],
        [
            Reader(
                "official",
                OURS,
                {MEAN: 6 / 7},
                {},
                {
                    "answer_type": {"float": (1, 2), "integer": (0.5, 2), "list": (1, 1), "text": (1, 2)},
                    "skills": {"statistical reasoning": (0.857143, 7)},
                },
            ),
            Reader("official", "published", {MEAN: 3 / 7}, {"unparsed": 3}),
        ],
    ),
    # Times of 16 bits: 24.3 is stored as 24.296875, and the published span scores 1.
    "charades_sta": EvalSet(
        "Parquet and tables",
        {"lmms": 32, "time_r1": 358},
        [
            ("data-test-1", "24.3 - 30.4 s", ("[24.3, 30.4]", 1), ("[24.3, 30.4]", 1)),
            ("data-test-1", "It starts at 24.3 seconds and ends at 30.4 seconds.", ("[24.3, 30.4]", 1), (None, 0)),
            ("data-test-2", "From 0.1 to 15.3 seconds.", ("[0.1, 15.3]", 0.5), ("[0.1, 15.3]", 0.5)),
            ("data-test-2", "I cannot see that.", (None, 0), (None, 0)),
        ],
        [
            Reader(
                "lmms",
                OURS,
                {"mIoU": 62.5, "R@1 IoU>=0.3": 75, "R@1 IoU>=0.5": 75, "R@1 IoU>=0.7": 50},
                {"unparsed": 1},
            ),
            Reader(
                "lmms",
                "published",
                {"mIoU": 37.5, "R@1 IoU>=0.3": 50, "R@1 IoU>=0.5": 50, "R@1 IoU>=0.7": 25},
                {"unparsed": 2},
            ),
        ],
    ),
    # Qwen2.5-Math: the box, else behind "he answer is", else the last number; a hundredth of the gold is right.
    "gsm8k": EvalSet(
        "json lines",
        {"qwen2_5_math": 0, "cppo": 0},
        [
            ("test-1", "First I count 5. No, wait: one more. The answer is 6.", ("6", 1), ("6", 1)),
            ("test-2", r"Thus \boxed{0.08}", ("0.08", 0), ("0.08", 1)),
        ],
        [
            Reader("qwen2_5_math", OURS, {"mean@1": 1 / 2, "majority@1": 1 / 2, "pass@1": 1 / 2}, {}),
            Reader("qwen2_5_math", "published", {"mean@1": 1, "majority@1": 1, "pass@1": 1}, {}),
        ],
    ),
    # CPPO's rule reads boxes, and LaTeX behind "final answer is" and the like.
    "math500": EvalSet(
        "MATH-500",
        {"qwen2_5_math": 0},
        [
            ("test/number_theory/7.json", "So $1 + 1 = 2$.", ("1 + 1 = 2", 1), (None, 0)),
            ("test/precalculus/807.json", r"\boxed{(3, \pi/2)}", (r"(3, \pi/2)", 1), (r"(3, \pi/2)", 1)),
        ],
        [
            Reader("cppo", OURS, {"mean@1": 1, "majority@1": 1, "pass@1": 1}, {}, {"level": {"1": (1, 2)}}),
            Reader(
                "cppo",
                "published",
                {"mean@1": 1 / 2, "majority@1": 1 / 2, "pass@1": 1 / 2},
                {"unparsed": 1},
                {"subject": {"Number Theory": (0, 1), "Precalculus": (1, 1)}},
            ),
        ],
    ),
    "aime2024": EvalSet(
        "HuggingFaceH4",
        {"cppo": 0, "lmms": 0},
        [
            ("60", r"Thus $\boxed{204}$.", ("204", 1), ("204", 1)),
            ("60", "The answer is 204.", ("204", 1), (None, 0)),
            ("60", "So it is $204$.", ("204", 1), (None, 0)),
            ("60", "I do not know.", (None, 0), (None, 0)),
            ("61", r"\boxed{025}", ("25", 1), ("025", 1)),
            ("61", r"\boxed{25}", ("25", 1), ("25", 1)),
            ("61", r"\boxed{52}", ("52", 0), ("52", 0)),
            ("61", r"\boxed{52}", ("52", 0), ("52", 0)),
            ("62", r"\boxed{000}", ("0", 1), ("000", 1)),
            ("62", r"\boxed{0}", ("0", 1), ("0", 1)),
            ("62", "", (None, 0), (None, 0)),
            ("62", r"\boxed{1}", ("1", 0), ("1", 0)),
        ],
        [
            # Right of four: 3, 2, 2. Votes: 204 three times; 25 and 52 twice each, which share; 0 twice against one 1.
            Reader("cppo", OURS, {"mean@4": 7 / 12, "majority@4": 2.5 / 3, "pass@4": 1}, {"unparsed": 2}),
            # Right: 1, 2, 2. Spelled differently 025 and 25 have one vote each against two of 52; 000, 0 and 1 share.
            Reader("cppo", "published", {"mean@4": 5 / 12, "majority@4": 5 / 9, "pass@4": 1}, {"unparsed": 4}),
        ],
    ),
    "amc2023": EvalSet(
        "Qwen2.5-Math, the repository",
        {"cppo": 0},
        [
            ("0", r"\boxed{0.27}", ("0.27", 0), ("0.27", 1)),
            ("1", "So $a_{2023} = -1$.", ("-1", 1), ("-1", 1)),
            ("2", "The answer is 3,159.", ("3159", 1), ("3,159", 1)),
            ("test-5", r"First 5. Wait, that counts one twice: \boxed{4.0}", ("4", 1), ("4", 1)),
        ],
        [
            Reader("qwen2_5_math", OURS, {"mean@1": 3 / 4, "majority@1": 3 / 4, "pass@1": 3 / 4}, {}),
            Reader("qwen2_5_math", "published", {"mean@1": 1, "majority@1": 1, "pass@1": 1}, {}),
        ],
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", SETS)
def test_a_set_is_prompted_and_scored_as_published(name: str, tmp_path: Path) -> None:
    eval_set, pipeline = SETS[name], PIPELINES.get(name, name)
    case = import_module(f"tests.support.published.{pipeline}").CASES[eval_set.form]
    prepared = prepare(pipeline, tmp_path, case)
    for protocol, frames in eval_set.frames.items():
        lines = prompts(tmp_path, prepared, f"{name}/{protocol}")
        assert list(lines) == [one.sample_id for one in case.evaluation]
        first = next(iter(lines.values()))
        assert first["user"] and [len(one["frame_seconds"] or "1") for one in first["media"]] == [frames][: frames > 0]
    outputs: dict[str, list[str]] = {}
    for question, output, *_ in eval_set.table:
        outputs.setdefault(question, []).append(output)
    for index, reader in enumerate(eval_set.readers):
        scored = score(tmp_path / str(index), prepared.records, outputs, f"{name}/{reader.protocol}", reader.name)
        lines_of = {question: iter(line["outputs"]) for question, line in scored.answers.items()}
        for question, output, *readings in eval_set.table:
            if (expected := readings[index]) is None:
                assert question not in lines_of
                continue
            line = next(lines_of[question])
            found = OUT if not line["counts"] else (line["answer"], line["score"])
            assert found == (expected[0], pytest.approx(expected[1])), (reader, output)
        total = len(case.evaluation)
        assert scored.counts == {"total": total, "scored": total} | reader.counts
        assert scored.figures == {key: pytest.approx(value) for key, value in reader.figures.items()}
        assert scored.row["accuracy"] == pytest.approx(
            next(iter(reader.figures.values())) / (100 if name == "charades_sta" else 1)
        )
        assert (scored.row["reader"] == OURS) == (reader.name == OURS)
        for key, groups in reader.groups.items():
            found_groups = scored.group(key)
            assert {group: found_groups[group] for group in groups} == groups, (reader, key)


def real_outputs(name: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Question and two outputs, the second one wrong."""
    if name == "nextqa":
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                gold = int(line["answer"])
                yield f"{line['video']}_{line['qid']}", ["ABCDE"[gold], "ABCDE"[(gold + 1) % 5]]
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        if name == "gsm8k":
            gold = int(row["answer"].split("#### ")[1].replace(",", ""))
            question, answers = f"gsm8k_test-{number}", [gold, gold + abs(gold) // 10 + 1]
        else:
            question, answers = row["unique_id"], [row["answer"], "987654321"]
        yield question, [f"I think so.\n\nIt is $\\boxed{{{answer}}}$." for answer in answers]


@pytest.mark.matrix
@pytest.mark.parametrize("reader", [OURS, "published"])
@pytest.mark.parametrize(
    ("name", "file", "protocol", "questions"),
    [
        ("gsm8k", "gsm8k_test.jsonl", "gsm8k/qwen2_5_math", 1319),
        ("math", "math500_test.jsonl", "math500/qwen2_5_math", 500),
        ("nextqa", "nextqa_val.csv", "nextqa/lmms", 4996),
    ],
)
def test_gold_answers_of_all_real_questions_are_right_and_others_wrong(
    name: str, file: str, protocol: str, questions: int, reader: str, data_dir: Path, tmp_path: Path
) -> None:
    arguments = ["prepare", name, "--eval", str(data_dir / file), "--out", str(tmp_path / "out")]
    if name == "nextqa":
        arguments += ["--media-root", str(tmp_path), "--skip-media-check"]
    assert main(arguments) == 0
    outputs = dict(real_outputs(name, data_dir / file))
    assert len(outputs) == questions
    scored = score(tmp_path, f"{tmp_path / 'out'}:eval", outputs, protocol, reader)
    found = {question: [one["score"] for one in line["outputs"]] for question, line in scored.answers.items()}
    assert found == {question: [1.0, 0.0] for question in outputs}
    # Of one gold answer nothing is left by Qwen2.5-Math's spelling: an output of nothing is right there.
    unread = {"unparsed": 1} if name == "math" and reader == "published" else {}
    assert scored.counts == {"total": questions, "scored": questions} | unread
    assert scored.row["accuracy"] == 0.5
