"""Types of questions are worded as published; whole sets are in tests/integration/test_set_*.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.asking import CAT_OR_DOG, choice, question_of
from vlm_pg.eval.protocols.protocol import load_protocol, protocol_names
from vlm_pg.eval.wording import words
from vlm_pg.types import Sample

PONDER = (
    "Please think about this question as if you were a human pondering deeply. Engage in an internal dialogue using "
    "expressions such as 'let me think', 'wait', 'Hmm', 'oh, I see', 'let's break it down', etc, or other natural "
    "language thought expressions It's encouraged to include self-reflection or verification in the reasoning process. "
    "Provide your detailed reasoning between the <think> and </think> tags, and then give your final answer between "
    "the <answer> and </answer> tags."
)
ONE_LETTER = (
    " Please provide only the single option letter (e.g., A, B, C, D, etc.) within the <answer> </answer> tags."
)
CAREFULLY = (
    "Carefully watch the video and pay attention to the cause and sequence of events, the detail and movement of "
    "objects, and the action and pose of persons. Based on your observations, select the best option that accurately "
    "addresses the question.\n"
)
SELECT = (
    "Select the best answer to the following multiple-choice question based on the video. Respond with only the letter "
    "(A, B, C, or D) of the correct option.\n"
)
LMMS_SELECT = SELECT.replace("based on the video.", "based on the video and the subtitles.")
LEARN = "You should watch and learn the video content. Then apply what you learned to answer the following "
LAST_FRAME = " question. The image for this question is at the end of the video.\n"


def user(name: str, sample: Sample) -> str:
    return words(load_protocol(name), sample, (), ())[1]


@pytest.mark.parametrize(
    "name,sample,expected",
    [
        ("video_mme/qwen2_5_vl", choice(), SELECT + "Who is seen?\nA. a cat\nB. a dog\nThe best answer is:"),
        (
            "video_mme/lmms",
            choice(),
            LMMS_SELECT + "Who is seen?\nA. a cat\nB. a dog\n\nAnswer with the option's letter from the given choices "
            "directly.",
        ),
        (
            "video_mme/lmms_subtitles",
            choice(),
            "This video's subtitles are listed below: \nNo subtitles available\n"
            + LMMS_SELECT
            + "Who is seen?\nA. a cat\nB. a dog\nThe best answer is:",
        ),
        (
            "video_mme/lmms_qwen3_vl",
            choice(),
            "Question: Who is seen?\nOptions:\nA. a cat\nB. a dog\nAnswer with the option letter only.",
        ),
        (
            "video_mme/kit",
            choice(),
            "\nThese are the frames of a video. " + SELECT + "Question: Who is seen?\nA. a cat\nB. a dog\nAnswer: ",
        ),
        ("video_mme/qwen3_vl", choice(), SELECT + "Question: Who is seen?\nA. a cat\nB. a dog\nThe best answer is:"),
        ("video_mme/video_r1", choice(), f"Who is seen?Options:\nA. a cat\nB. a dog\n\n{PONDER}{ONE_LETTER}"),
        (
            "tempcompass/video_r1",
            choice(task="multi-choice"),
            f"Who is seen?Options:\nA. a cat\nB. a dog\n\n{PONDER}{ONE_LETTER}",
        ),
        (
            "mmvu/official",
            question_of("free_form"),
            "\nQuestion: Who is seen?\n\nAnswer the given question step by step. Begin by explaining your reasoning "
            "process clearly. Conclude by stating the final answer using the following format: 'Therefore, the final "
            "answer is: 'Answer: $ANSWER' (without quotes), where $ANSWER is the final answer of the question. Think "
            "step by step\nbefore answering.",
        ),
        (
            "vsi_bench/lmms",
            question_of("mean_relative_accuracy", "How many?"),
            "These are frames of a video.\nHow many?\nPlease answer the question using a single word or phrase.",
        ),
        (
            "vsi_bench/official_api",
            question_of("mean_relative_accuracy", "How many?"),
            "These are frames of a video.\nHow many?\nDo not response anything other than a single number!",
        ),
        (
            "vsi_bench/video_r1",
            question_of("mean_relative_accuracy", "How many?"),
            f"How many?\n{PONDER} Please provide the numerical value (e.g., 42 or 3.14) within the <answer> </answer> "
            "tags.",
        ),
        (
            "video_mmmu/video_r1",
            question_of("mathematics", "How long is it in <image 1>?", track="Adaptation"),
            f"How long is it in ?\n{PONDER} Please provide the numerical value (e.g., 42 or 3.14) within the <answer> "
            "</answer> tags.",
        ),
        (
            "video_mmmu/video_r1",
            question_of("free_form", "What is it? <image 1>", track="Adaptation"),
            f"What is it?\n{PONDER} Please provide your text answer within the <answer> </answer> tags.",
        ),
        (
            "video_mmmu/lmms",
            question_of("free_form", "What is it? <image 1>", track="Adaptation"),
            LEARN + "open-ended" + LAST_FRAME + "What is it? <image 1>",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value[:30] else "",
)
def test_the_words_are_the_published_ones(name: str, sample: Sample, expected: str) -> None:
    assert user(name, sample) == expected


@pytest.mark.parametrize(
    "details,options,expected",
    [
        (
            {"question_type": "multi_choice", "answer_type": "text", "precision": None, "unit": None},
            CAT_OR_DOG,
            "Question: What is it?\nChoices:\n(A) a cat\n(B) a dog\nHint: Please answer the question and provide the "
            "correct option letter, e.g., A, B, C, D, at the end.\nSolution:",
        ),
        (
            {"question_type": "free_form", "answer_type": "integer", "precision": None, "unit": "$"},
            (),
            "Question: What is it? (Unit: $)\nHint: Please answer the question requiring an integer answer and provide "
            "the final value, e.g., 1, 2, 3, at the end.\nSolution:",
        ),
        (
            {"question_type": "free_form", "answer_type": "float", "precision": 1.0},
            (),
            "Question: What is it?\nHint: Please answer the question requiring a floating-point number with one "
            "decimal "
            "place and provide the final value, e.g., 1.2, 1.3, 1.4, at the end.\nSolution:",
        ),
    ],
    ids=["choice", "integer", "one decimal"],
)
def test_mathvista_asks_its_published_question_with_unit_and_hint(
    details: dict[str, Any], options: tuple[str, ...], expected: str
) -> None:
    details = {"question": "What is it?", **details}
    sample = replace(question_of("exact", "What is it?\nRound it.", options), details=details)
    assert user("mathvista/official", sample) == expected


def test_system_messages_are_the_published_ones() -> None:
    assert load_protocol("mvbench/official").system == CAREFULLY
    step_by_step = "Please reason step by step, and put your final answer within \\boxed{}."
    assert load_protocol("gsm8k/qwen2_5_math").system == step_by_step
    begin = (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer. "
    )
    in_the_end = (
        "And the answer should be of the following format: 'Therefore, the final answer is: $\\boxed{{ANSWER}}$. I "
        "hope it is correct' (without quotes) where ANSWER is just the final number or expression that solves the "
        "problem. "
    )
    tags = (
        "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, "
        "respectively, i.e., <think> reasoning process here </think>\n<answer> answer here </answer>."
    )
    assert load_protocol("gsm8k/cppo").system == begin + tags
    # This recipe's ends in a blank.
    mathematics = begin + in_the_end + tags + " "
    assert {load_protocol(f"{name}/cppo").system for name in ("math500", "amc2023", "aime2024")} == {mathematics}
    assert load_protocol("video_mme/video_r1").system == ""


def test_lmms_eval_puts_a_system_message_before_videos_whatever_the_model() -> None:
    """Qwen2.5-VL's chat template has this one by itself, Qwen3-VL's none."""
    of_videos = [name for name in protocol_names() if name.partition("/")[2].startswith("lmms") and "aime" not in name]
    assert len(of_videos) == 12
    assert {load_protocol(name).system for name in of_videos} == {"You are a helpful assistant."}
    others = ("longvideobench/qwen2_5_vl", "longvideobench/qwen3_vl", "nextqa/official", "mvbench/qwen3_vl")
    assert {load_protocol(name).system for name in others} == {""}


def test_words_of_a_question_are_never_taken_for_places() -> None:
    sample = question_of("multiple_choice", "[[{options}]] {nope}", ("A. {question}", "B. b. c"))
    assert user("mvbench/lmms", sample) == (
        "Question:[[{options}]] {nope}\nOption:\n(A) {question}\n(B) b. c\nOnly give the best option.\n"
    )
