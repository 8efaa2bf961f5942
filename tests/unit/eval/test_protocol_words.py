"""Every type of question is asked word for word as published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.asking import CAT_OR_DOG, asked, choice
from vlm_pg.eval.protocols.load import load_protocol, protocol_names
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
FIND = (
    "Please find the visual event described by a sentence in the video, determining its starting and ending times. The "
    "format should be: 'The event happens in the start time - end time'. For example, The event 'person "
    "turn a light on' "
    "happens in the 24.3 - 30.4 seonds. Now I will give you the textual sentence: person opens a door.. Please return "
    "its start time and end time."
)


def user(name: str, sample: Sample) -> str:
    return words(load_protocol(name), sample, (), ())[1]


def of_tempcompass(task: str, published: str) -> Sample:
    """A question whose options were taken out of its text, which ``details`` keep as published."""
    return replace(choice(), question="Taken apart.", details={"task": task, "question": published})


@pytest.mark.parametrize(
    "name,sample,expected",
    [
        ("video_mme/official", choice(), SELECT + "Who is seen?\nA. a cat\nB. a dog\nThe best answer is:"),
        ("video_mme/qwen2_5_vl", choice(), SELECT + "Who is seen?\nA. a cat\nB. a dog\nThe best answer is:"),
        # Without subtitles the header goes as well.
        ("video_mme/official_subtitles", choice(), SELECT + "Who is seen?\nA. a cat\nB. a dog\nThe best answer is:"),
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
        (
            "video_mme/kit_subtitles",
            choice(),
            "\nThese are the frames of a video. This video's subtitles are listed below:\n\n"
            + SELECT
            + "Question: Who is seen?\nA. a cat\nB. a dog\nAnswer: ",
        ),
        ("video_mme/qwen3_vl", choice(), SELECT + "Question: Who is seen?\nA. a cat\nB. a dog\nThe best answer is:"),
        ("video_mme/video_r1", choice(), f"Who is seen?Options:\nA. a cat\nB. a dog\n\n{PONDER}{ONE_LETTER}"),
        ("mvbench/video_r1", choice(), f"Who is seen?Options:\nA. a cat\nB. a dog\n\n{PONDER}{ONE_LETTER}"),
        (
            "mvbench/official",
            choice(),
            CAREFULLY + "Question: Who is seen?\nOptions:\n(A) a cat\n(B) a dog\nOnly give the best option.",
        ),
        (
            "mvbench/lmms",
            choice(),
            "Question:Who is seen?\nOption:\n(A) a cat\n(B) a dog\nOnly give the best option.\n",
        ),
        (
            "mvbench/qwen3_vl",
            choice(),
            "Carefully watch the video and pay attention to the cause and sequence of events, the detail and movement "
            "of objects and the action and pose of persons.\nBased on your observations, select the best option that "
            "accurately addresses the question.\nQuestion: Who is seen?\nOptions:\n(A) a cat\n(B) a dog\nAnswer with "
            "the option's letter from the given choices directly and only give the best option.",
        ),
        (
            "tempcompass/official",
            of_tempcompass("multi-choice", "Who is seen?\nA. a cat\nB. a dog"),
            "Who is seen?\nA. a cat\nB. a dog\nPlease directly give the best option:",
        ),
        (
            "tempcompass/lmms",
            of_tempcompass("caption_matching", "Which caption?\nCaption A: x\nCaption B: y"),
            "Which caption?\nCaption A: x\nCaption B: y\nPlease directly give the best option:",
        ),
        (
            "tempcompass/official",
            asked("yes_no", "Is it fast?", task="yes_no"),
            "Is it fast?\nPlease answer yes or no:",
        ),
        (
            "tempcompass/official",
            asked("free_form", "Describe.\nGenerated Caption:", task="captioning"),
            "Describe.\nGenerated Caption:",
        ),
        (
            "tempcompass/video_r1",
            choice(task="multi-choice"),
            f"Who is seen?Options:\nA. a cat\nB. a dog\n\n{PONDER}{ONE_LETTER}",
        ),
        (
            "vsi_bench/official",
            choice(),
            "These are frames of a video.\nWho is seen?\nOptions:\nA. a cat\nB. a dog\nAnswer with the option's letter "
            "from the given choices directly.",
        ),
        (
            "vsi_bench/lmms",
            asked("mean_relative_accuracy", "How many?"),
            "These are frames of a video.\nHow many?\nPlease answer the question using a single word or phrase.",
        ),
        (
            "vsi_bench/official_api",
            asked("mean_relative_accuracy", "How many?"),
            "These are frames of a video.\nHow many?\nDo not response anything other than a single number!",
        ),
        (
            "vsi_bench/kit",
            choice(),
            "These are frames of a video.\nWho is seen?\nA. a cat\nB. a dog\nAnswer with the option's letter from the "
            "given choices directly.",
        ),
        (
            "vsi_bench/kit",
            asked("mean_relative_accuracy", "How many?"),
            "These are frames of a video.\nHow many?\nAnswer briefly and directly in one float number.",
        ),
        (
            "vsi_bench/video_r1",
            asked("mean_relative_accuracy", "How many?"),
            f"How many?\n{PONDER} Please provide the numerical value (e.g., 42 or 3.14) within the <answer> </answer> "
            "tags.",
        ),
        (
            "video_mmmu/official",
            choice(track="Adaptation"),
            LEARN + "multi-choice" + LAST_FRAME + "Who is seen?\nA. a cat\nB. a dog",
        ),
        (
            "video_mmmu/lmms",
            asked("free_form", "How long?", track="Adaptation"),
            LEARN + "open-ended" + LAST_FRAME + "How long?",
        ),
        (
            "video_mmmu/video_r1",
            asked("mathematics", "How long is it in <image 1>?", track="Adaptation"),
            f"How long is it in ?\n{PONDER} Please provide the numerical value (e.g., 42 or 3.14) within the <answer> "
            "</answer> tags.",
        ),
        (
            "video_mmmu/video_r1",
            asked("free_form", "What is it? <image 1>", track="Adaptation"),
            f"What is it?\n{PONDER} Please provide your text answer within the <answer> </answer> tags.",
        ),
        (
            "video_mmmu/lmms",
            asked("free_form", "What is it? <image 1>", track="Adaptation"),
            LEARN + "open-ended" + LAST_FRAME + "What is it? <image 1>",
        ),
        (
            "video_mmmu/official",
            choice(track="Perception"),
            "Who is seen?\nA. a cat\nB. a dog\nPlease ignore the Quiz question in last frame of the video.",
        ),
        (
            "video_mmmu/kit",
            choice(track="Comprehension"),
            "Who is seen?\nA. a cat\nB. a dog\nPlease ignore the Quiz question in last frame of the video.\n"
            "Add `Answer: {Your final answer}` at the end of your reply.",
        ),
        (
            "mmvu/official",
            choice(),
            "\nQuestion: Who is seen?\nA: a cat\nB: a dog\n\nAnswer the given multiple-choice question step by step. "
            "Begin by explaining your reasoning process clearly. Conclude by stating the final answer using the "
            "following format: 'Therefore, the final answer is: $LETTER' (without quotes), where $LETTER is one of the "
            "options. Think step by\nstep before answering.",
        ),
        (
            "mmvu/official",
            asked("free_form"),
            "\nQuestion: Who is seen?\n\nAnswer the given question step by step. Begin by explaining your reasoning "
            "process clearly. Conclude by stating the final answer using the following format: 'Therefore, the final "
            "answer is: 'Answer: $ANSWER' (without quotes), where $ANSWER is the final answer of the question. Think "
            "step by step\nbefore answering.",
        ),
        (
            "mmvu/official_direct",
            choice(),
            "\nQuestion: Who is seen?\nA: a cat\nB: a dog\n\nDo not generate any intermediate reasoning process. "
            "Answer "
            "directly with the option letter from the given choices.\n",
        ),
        (
            "mmvu/official_direct",
            asked("free_form"),
            "\nQuestion: Who is seen?\n\nDo not generate any intermediate reasoning process. Directly output the final "
            "short answer.\n",
        ),
        (
            "mmvu/lmms",
            choice(),
            "\nQuestion:Who is seen?\nA: a cat\nB: a dog\nVisual Information: processed video\nDo not generate any "
            "intermediate reasoning process. Answer directly with the option letter from the\ngiven choices.\n",
        ),
        (
            "mmvu/lmms",
            asked("free_form"),
            "\nQuestion:Who is seen?\nVisual Information: processed video\nDo not generate any intermediate reasoning "
            "process. Directly output the final answer.\n",
        ),
        ("mmvu/video_r1", choice(), f"Who is seen?Options:\nA. a cat\nB. a dog\n\n{PONDER}{ONE_LETTER}"),
        (
            "longvideobench/lmms",
            choice(),
            "Who is seen?\nA. a cat\nB. a dog\nAnswer with the option's letter from the given choices directly.\n",
        ),
        (
            "longvideobench/official",
            choice(),
            "Question: Who is seen?\nA. a cat\nB. a dog\nAnswer with the option's letter from the given choices "
            "directly.",
        ),
        (
            "longvideo_reason/official",
            choice(),
            "You are a helpful assistant. The user asks a question, and then you solves it.\n\nPlease first "
            "think deeply "
            "about the question based on the given video, and then provide the final answer. The reasoning process and "
            "answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> "
            "reasoning process here </think> <answer> answer here </answer>.\n\n Question: Who is seen?\nA. a "
            "cat\nB. a "
            "dog",
        ),
        ("nextqa/lmms", choice(), "Who is seen?\nA. a cat\nB. a dog"),
        ("gsm8k/qwen2_5_math", asked("numerical", "1 + {1}?"), "1 + {1}?"),
        ("math500/cppo", asked("mathematics", "Half of one?"), "Half of one?"),
        ("amc2023/cppo", asked("mathematics", "Half of one?"), "Half of one?"),
        ("aime2024/lmms", asked("numerical", "Half of one?"), "Half of one?"),
        ("charades_sta/lmms", asked("time_span", sentence="person opens a door."), FIND),
        ("charades_sta/qwen2_5_vl", asked("time_span", sentence="person opens a door."), FIND),
        (
            "charades_sta/time_r1",
            asked("time_span", sentence="person opens a door."),
            'To accurately pinpoint the event "person opens a door." in the video, determine the precise time '
            "period of "
            "the event.\n\nOutput your thought process within the <think> </think> tags, including analysis with "
            "either "
            "specific timestamps (xx.xx) or time ranges (xx.xx to xx.xx) in <timestep> </timestep> tags.\n\nThen, "
            'provide the start and end times (in seconds, precise to two decimal places) in the format "start time to '
            'end time" within the <answer> </answer> tags. For example: "12.54 to 17.83".',
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
        (
            {"question_type": "free_form", "answer_type": "float", "precision": 2},
            (),
            "Question: What is it?\nHint: Please answer the question requiring a floating-point number with two "
            "decimal "
            "places and provide the final value, e.g., 1.23, 1.34, 1.45, at the end.\nSolution:",
        ),
        (
            {"question_type": "free_form", "answer_type": "list", "precision": None},
            (),
            "Question: What is it?\nHint: Please answer the question requiring a Python list as an answer and provide "
            "the final list, e.g., [1, 2, 3], [1.2, 1.3, 1.4], at the end.\nSolution:",
        ),
    ],
    ids=["choice", "integer", "one decimal", "two decimals", "list"],
)
def test_mathvista_asks_its_published_question_with_unit_and_hint(
    details: dict[str, Any], options: tuple[str, ...], expected: str
) -> None:
    details = {"question": "What is it?", **details}
    sample = replace(asked("exact", "What is it?\nRound it.", options), details=details)
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
    sample = asked("multiple_choice", "[[{options}]] {nope}", ("A. {question}", "B. b. c"))
    assert user("mvbench/lmms", sample) == (
        "Question:[[{options}]] {nope}\nOption:\n(A) {question}\n(B) b. c\nOnly give the best option.\n"
    )
