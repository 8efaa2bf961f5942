"""Published rules of reading: each does what the code it is named after does, in the awkward cases above all.

Expected values are worked out by hand from that code.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import Mock

import pytest

from vlm_pg.answers.pool import Outcome
from vlm_pg.answers.published import PUBLISHED, checking, published_rule
from vlm_pg.errors import ConfigError
from vlm_pg.eval.contracts import Reading
from vlm_pg.types import AnswerKind, Sample

OPTIONS = ("A. a cat", "B. a dog", "C. Vitamin C", "D. a red bird", "E. none of these")


def question(answer: str, kind: AnswerKind | None = None, options: int = 4, text: str = "Q?", **details: Any) -> Sample:
    """A question with that many options where ``kind`` is not given, else one without."""
    kind = kind or "multiple_choice"
    assert kind in get_args(AnswerKind)
    letters = OPTIONS[:options] if kind == "multiple_choice" else ()
    return Sample("q1", text, (), letters, answer, kind, "set", "category", details=details)


def read(name: str, output: str, sample: Sample) -> Reading:
    return published_rule(name)(sample, output, False)


def letter(name: str, output: str, options: int = 4) -> str | None:
    return read(name, output, question("B", options=options)).answer


def score(name: str, output: str, answer: str, kind: AnswerKind | None = None, **details: Any) -> float | None:
    return read(name, output, question(answer, kind, **details)).score


# --- names ---


def test_every_rule_says_whose_it_is_where_its_code_lies_and_what_is_odd_on_one_line() -> None:
    for name, rule in PUBLISHED.items():
        assert rule.name == name and name.count("/") == 1
        assert rule.whose and "/" in rule.source and rule.odd.endswith(".")
        assert rule.line.startswith(f"{name}: ") and "\n" not in rule.line


def test_every_set_has_a_rule() -> None:
    sets = {name.split("/")[0] for name in PUBLISHED}
    assert sets == {
        *("video_mme", "mvbench", "tempcompass", "vsi_bench", "video_mmmu", "mmvu", "longvideobench"),
        *("longvideo_reason", "nextqa", "mathvista", "gsm8k", "math500", "amc", "aime", "charades_sta"),
    }


def test_an_unknown_name_is_refused_with_the_nearest_and_those_of_the_set() -> None:
    with pytest.raises(ConfigError, match=r"nearest is 'vsi_bench/official'. Known are vsi_bench/official, vsi_bench/"):
        published_rule("vsi_bench/offical")
    with pytest.raises(ConfigError, match=r"Known are video_mme/official, video_mme/lmms, .*charades_sta/time_r1"):
        published_rule("no_such_set")


# Rules that read letters, number of options -> output: letter
LETTERS: dict[tuple[str, int], dict[str, str | None]] = {
    # video mme official takes the first capital letter
    ("video_mme/official", 4): {
        "A man is running": "A",  # the article
        "Based on the video, the answer is A": "B",  # lower-case lead-ins stay, and "Based" begins with B
        "The best answer is C": "C",  # "The best answer is" is removed before "B" could be found in it
        "Best option: D": "B",  # this lead-in is not removed, for a comma is missing in the published list
        "Answer: D": "A",
    },
    # video mme lmms ranks letters by form
    ("video_mme/lmms", 4): {
        "(A) Vitamin C.": "C",  # a letter at the end goes before one in brackets
        "**Answer: C. Plan B.**": "B",  # of letters with a point the last one
        "B. C": "B",  # a letter at the start goes before all
        "the answer is A or D maybe": "D",  # all that follows the phrase counts, the last most
        "answer is A, B? the answer is A now": "A",  # a second phrase is ranked by itself
        "It is (B) for sure": "B",
        "xAx": "A",  # anywhere, where there is no better form
        "nothing": None,
    },
    # nextqa reads as mmmu does
    ("nextqa/lmms", 5): {
        "C. A cat on a mat": "A",  # "A " is looked for before "C."
        "(B) A cat": "B",
        "A or B ": "B",  # of several the last
        "C.": "C",
        "I saw it was a red bird over there": "D",  # an option's text, in more than 5 words
    },
    # video mmmu official goes through forms in order
    ("video_mmmu/official", 4): {
        "B. or (C)": "B",
        "A: no, D: yes": "D",
        "A. no, D: yes": "A",
        "(C) it is": "C",
        "zzz": None,
    },
    # mvbench lmms takes the first lone letter
    ("mvbench/lmms", 4): {
        "There is a man": "A",
        "b. the dog": "B",
        "The answer is (D).": "D",
        "C.\nbecause of a": "C",  # a label before text on one line, which may be the next
        "C. one\ntwo a": "C",  # no label here, but the first lone letter
        "running": None,
    },
    # vsi kit goes through places in order
    ("vsi_bench/kit", 4): {
        "<answer>b</answer>": "B",
        "<answer>front</answer>": "F",  # the letter that the word begins with
        "<answer>Door</answer> <answer>B</answer>": "D",  # the first tags
        "<answer>the left (C) </answer>": "C",  # the letter before the closing tag
        "<answer>the left</answer>\nB": "B",
        "so B</think> it is so": "B",  # before the end of thinking
        "A\nB\n\n**C**": "C",  # the last line
        "D. left\nas A and C show": "D",  # a line with two letters is passed over
        "A man stands to the left": "A",  # the article
        "b) left of the door": "B",
        "Option B: left\nD": "D",
        "D\nOption B: left": "D",  # a line that names an option is passed over
        "Neither A nor B.\n" + "so\n" * 7: None,
        "The answer: B\n" + "so\n" * 7: "B",
        "The answer is A, not B, so the answer is B" + "\nso" * 7: "A",  # the first phrase, not the last
        "it is D" + "\nso" * 7: "D",  # the one capital that stands alone
        "nothing": None,
        "": None,
    },
}
# rule, gold answer, its kind -> output: score
SCORES: dict[tuple[str, str, AnswerKind], dict[str, float]] = {
    # vsi official reads the text before the first blank
    ("vsi_bench/official", "B", "multiple_choice"): {
        "B": 1.0,
        "b.": 1.0,
        "B. left": 1.0,
        "(B)": 0.0,
        "B)": 0.0,
        " B": 0.0,
        "The answer is B": 0.0,
    },
    # longvideo reason wants the gold text
    ("longvideo_reason/long_rl", "B", "multiple_choice"): {
        "<think>x</think><answer> B </answer>": 1.0,
        "<answer>B\n</answer> <answer>B</answer>": 1.0,  # the first on one line
        "<answer>A</answer><answer>B</answer>": 0.0,
        "<answer>Therefore the final answer is: B</answer>": 1.0,
        "<answer>(B)</answer>": 0.0,
        "B.": 0.0,
        " B\n": 1.0,
    },
    # gsm8k by cppo
    ("gsm8k/cppo", "18", "numerical"): {
        "18": 1.0,
        "<think>9 + 9</think><answer>18</answer>": 1.0,
        "<answer>18</answer> <answer>20</answer>": 0.0,  # the last tags
        "18 <answer>20</answer>": 0.0,  # the tags alone
        "<answer>...</answer> 18": 1.0,  # tags without an answer: the whole output
        "<answer>18": 1.0,
        "<answer>$18.00</answer>": 1.0,  # one number
        "<answer>9 + 9 = 18 dollars</answer>": 1.0,  # the last number
        "<answer>18 = 9 + 9</answer>": 0.0,
        "<answer>-18</answer>": 1.0,  # one number that is not 18, but the last one has no sign
        "2 - 18": 1.0,
        "The answer is 18. Step 2": 0.0,
        "eighteen": 0.0,
    },
    # aime by lmms
    ("aime/lmms", "073", "mathematics"): {
        r"\boxed{073}": 1.0,
        r"\boxed{73}$ and more": 1.0,
        r"$\boxed 73$ it is": 1.0,
        "Answer: 73": 1.0,
        "Answer: 73.": 0.0,  # all that follows must be the answer
        "Answer: 7 Answer: 73": 0.0,
        "it is 73": 0.0,
    },
    # charades by lmms
    ("charades_sta/lmms", "[0, 8]", "time_span"): {
        "2 - 8": 0.75,  # [2, 8] of [0, 8]: 6 / 8
        "from 2 to 8 seconds": 0.75,  # "to" becomes "-"
        "8 to 2": 0.75,  # turned round
        "0 - 4, or rather 0 - 8": 0.5,  # the first
        "Start: 2 s\nEnd: 8 s": 0.75,  # one time a sentence
        "It starts at 2 and ends at 8.": 0.0,  # both times in one sentence
        "[2, 8]": 0.0,
        '{"start": 2, "end": 8}': 0.0,
        "从2到8秒": 0.0,
        "9 - 12": 0.0,
        "a specific example is : 20.8 - 30.0 seconds": 0.0,  # the prompt's own example is left out
        "1..2 - 8": 0.75,
        # Not so before May 2026: lines with a keyword come first, dashes and times of other kinds are read.
        "Perhaps 0 - 4.\nThe event happens in 2 - 8 seconds.": 0.75,
        "The event happens in 2 – 8 seconds.": 0.75,
        "The event happens in 2s - 8s.": 0.75,
        "The event happens in 2 s to 8 s.": 0.75,
        "The event happens in 0:02 - 0:08.": 0.75,
        "It starts at 00:00:02 and ends at 00:00:08.": 0.75,
        "It starts at 0:02.\nIt ends at 0:08.": 0.75,
        "2\n8": 0.75,
        "The event happens.\n2 - 8": 0.0,  # the line with a keyword has no time
    },
    # charades by time r1
    ("charades_sta/time_r1", "[0, 8]", "time_span"): {
        "0 to 4 ... 2 to 8": 0.75,  # the last
        "2 and 8": 0.75,
        "8 to 2": 0.0,  # not turned round: (min(8, 2) - max(0, 8)) / 8 is negative
        "2 - 8": 0.0,
    },
}


@pytest.mark.parametrize("case", LETTERS)
def test_letters(case: tuple[str, int]) -> None:
    name, options = case
    assert {output: letter(name, output, options) for output in LETTERS[case]} == LETTERS[case]


@pytest.mark.parametrize("case", SCORES)
def test_scores(case: tuple[str, str, AnswerKind]) -> None:
    name, gold, kind = case
    assert {output: score(name, output, gold, kind) for output in SCORES[case]} == pytest.approx(SCORES[case])


# --- Video-MME, LongVideoBench ---


@pytest.mark.parametrize("output", ["", "none of these", "e"])
def test_video_mme_official_leaves_unread_outputs_out(output: str) -> None:
    reading = read("video_mme/official", output, question("B"))
    assert (reading.answer, reading.counts) == (None, False)
    assert read("video_mme/lmms", "", question("B")) == Reading(None, 0.0, "the rule reads no answer")


def test_longvideobench_takes_the_first_capital_letter_of_five() -> None:
    assert letter("longvideobench/lmms", "Answer: B", 5) == "A"
    assert letter("longvideobench/lmms", "Best option: E", 5) == "E"  # here no comma is missing


@pytest.mark.parametrize("name", ["longvideobench/lmms", "nextqa/lmms"])
def test_an_option_is_drawn_by_rule_question_and_output(name: str) -> None:
    for output in map("no idea {}".format, range(50)):
        drawn = int.from_bytes(hashlib.sha256(f"{name}\0q1\0{output}".encode()).digest()[:8], "big") % 4
        expected = Reading("ABCD"[drawn], float(drawn == 1), "drawn: nothing was read")
        assert read(name, output, question("B")) == expected


# --- NExT-QA, Video-MMMU ---


def ten_options(answer: str = "B") -> Sample:
    options = tuple(f"{one}. text {one}" for one in "ABCDEFGHIJ")
    return Sample("q", "Q?", (), options, answer, "multiple_choice", "s", "c")


def test_video_mmmu_takes_i_for_an_option_only_by_the_rule_of_lmms() -> None:
    assert read("video_mmmu/lmms", "I choose option B.", ten_options()).answer == "I"
    assert read("video_mmmu/official", "I choose option B.", ten_options()).answer == "B"


def test_video_mmmu_leaves_empty_outputs_out() -> None:
    choice, open_question = question("B", question_type="multiple-choice"), question("3.43", "free_form")
    assert not read("video_mmmu/official", "", choice).counts
    assert not read("video_mmmu/official", "", open_question).counts
    assert read("video_mmmu/lmms", "", choice) == Reading(None, 0.0, "the rule reads no answer")
    assert not read("video_mmmu/lmms", "", open_question).counts


@pytest.mark.parametrize(
    ("output", "gold", "expected"),
    [
        ("0.286 or 0.3", "0.29", 1.0),  # both numbers are read, and 0.286 is 0.29 after rounding
        ("The value is 0.28", "0.29", 0.0),
        ("The ratio is 1,250 units", "1250", 1.0),
        ("x = 4\nso y = 3.429", "3.43", 1.0),
        ("The answer is Paris.", "paris", 1.0),  # text within text
        ("a cat", "a", 1.0),  # one character, with a blank on one side
        ("cat", "a", 0.0),
        ("3.43", "['24/7', '3.429', '3.43]", 0.0),  # a broken list is a text that no answer contains
    ],
)
def test_video_mmmu_open_answers_are_read_by_indicators_and_rounded(output: str, gold: str, expected: float) -> None:
    for name in ("video_mmmu/official", "video_mmmu/lmms"):
        assert score(name, output, gold, "free_form") == expected


# --- MVBench ---


@pytest.mark.parametrize(
    ("output", "gold", "expected"),
    [
        ("", "C", 1.0),  # the empty word is part of "(c)"
        ("A man runs", "A", 1.0),
        ("A man runs", "B", 0.0),
        ("The answer is B", "B", 0.0),
        ("**B**", "B", 0.0),
        ("<answer>(B)</answer>", "B", 1.0),  # "(b)" is part of the word
        ("<answer>B</answer>", "B", 0.0),
        ("B. a dog", "B", 1.0),
        ("(B)", "B", 1.0),
        ("B\nbecause", "B", 1.0),  # first line only
        ("(", "D", 1.0),
    ],
)
def test_mvbench_official_compares_the_first_word(output: str, gold: str, expected: float) -> None:
    assert score("mvbench/official", output, gold) == expected


def test_mvbench_official_has_no_answer_where_it_takes_an_output_for_several() -> None:
    assert read("mvbench/official", "", question("C")) == Reading(None, 1.0, "the rule takes it for A, B, C, D")
    assert read("mvbench/official", "b", question("C")) == Reading("B", 0.0)


def test_mvbench_kit_reads_the_whole_output() -> None:
    assert score("mvbench/kit", "B\nbecause", "B") == 0.0  # the first word reaches over the line's end
    assert score("mvbench/kit", "It must be (B) a dog.", "B") == 1.0
    assert score("mvbench/official", "It must be (B) a dog.", "B") == 0.0


def test_mvbench_lmms_leaves_empty_outputs_out_and_takes_the_first_of_equal_options() -> None:
    assert not read("mvbench/lmms", "", question("B")).counts
    equal = Sample("q", "Q?", (), ("A. up", "B. up", "C. down"), "B", "multiple_choice", "s", "c")
    assert read("mvbench/lmms", "A", equal).score == 1.0
    assert read("mvbench/lmms", "B", equal).score == 0.0


# --- TempCompass ---


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("B", 1.0),
        ("B. a dog", 1.0),
        ("B) whatever", 1.0),
        ("B. a cat", 1.0),
        ("A", 0.0),
        ("(B)", 0.0),  # for the judge
        ("B: a dog", 0.0),
        ("a dog", 0.0),
    ],
)
def test_tempcompass_choices_are_read_by_their_start(output: str, expected: float) -> None:
    for name in ("tempcompass/official", "tempcompass/lmms"):
        assert score(name, output, "B", task="multi-choice") == expected


def test_tempcompass_official_removes_blanks_and_lmms_does_not() -> None:
    assert score("tempcompass/official", " B</s>", "B") == 1.0
    assert score("tempcompass/lmms", " B", "B") == 0.0


@pytest.mark.parametrize(
    ("output", "expected"),
    [("Nothing", "no"), ("Not sure", "no"), ("Yes and no", "yes"), ("NO.", "no"), ("I say yes", None)],
)
def test_tempcompass_yes_or_no_is_what_the_output_starts_with(output: str, expected: str | None) -> None:
    assert read("tempcompass/official", output, question("no", "yes_no")).answer == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Sentence B: it rises", 1.0),
        ("it rises", 1.0),
        ("B", 1.0),
        ("Sentence B.", 1.0),
        ("(B) it rises", 1.0),  # the text behind ") "
        ("Sentence A", 0.0),
        ("B) it falls", 0.0),
        ("(B)", 0.0),  # for the judge
    ],
)
def test_tempcompass_captions_are_matched_by_line_text_or_name(output: str, expected: float) -> None:
    details = {"question": "Which?\nSentence A: it falls\nSentence B: it rises", "answer": "Sentence B: it rises"}
    sample = replace(question("B", options=2), details={"task": "caption_matching", **details})
    assert read("tempcompass/official", output, sample).score == expected


def test_tempcompass_has_no_value_where_only_a_judge_scores_or_details_lack() -> None:
    assert score("tempcompass/official", "A dog.", "B", task="captioning") is None
    assert score("tempcompass/official", "A", "A", task="caption_matching") is None
    assert score("tempcompass/official", "A", "A", task="dancing") is None


# --- VSI-Bench ---


@pytest.mark.parametrize(
    ("predicted", "gold", "official", "video_r1"),
    [
        ("3", "4", 0.6, 0.5),  # error .25 equals 1 - .75
        ("5", "10", 0.1, 0.0),  # error .5 equals 1 - .5
        ("5", "4", 0.6, 0.5),
        ("2", "4", 0.1, 0.0),
        ("4", "4", 1.0, 1.0),
        ("3.9", "4", 1.0, 1.0),  # error .025, below .05
        ("8", "4", 0.0, 0.0),
    ],
)
def test_vsi_relative_accuracy_differs_where_the_error_equals_a_threshold(
    predicted: str, gold: str, official: float, video_r1: float
) -> None:
    kind: AnswerKind = "mean_relative_accuracy"
    assert score("vsi_bench/official", f"{predicted}. I think", gold, kind) == pytest.approx(official)
    assert score("vsi_bench/video_r1", f"<answer>{predicted}</answer>", gold, kind) == pytest.approx(video_r1)


def test_vsi_numbers_that_are_not_read_are_wrong_and_a_gold_of_0_has_no_value() -> None:
    kind: AnswerKind = "mean_relative_accuracy"
    assert score("vsi_bench/official", "about 4", "4", kind) == 0.0
    assert score("vsi_bench/video_r1", "about 4", "4", kind) == 0.0
    assert score("vsi_bench/official", "0", "0", kind) is None
    assert score("vsi_bench/video_r1", "0", "0", kind) is None


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("3", 3.0),
        ("There are 3 boxes and 4 bags.", 3.0),
        ("Three boxes, 4 bags.", 3.0),  # a word before the figures
        ("4 bags, three boxes", 4.0),
        ("twenty-one", 21.0),
        ("three hundred and twenty-one", 321.0),
        ("two thousand five hundred", 2500.0),
        ("hundred", 100.0),
        ("one, two", 3.0),  # a run goes on over what is no word
        ("one or two", 1.0),  # "or" is a word
        ("1,200", 1.0),
        ("-2.5 m", -2.5),
        ("It is about 2.", 2.0),
        ("a chair", None),
        ("", None),
    ],
)
def test_vsi_lmms_reads_the_first_number_anywhere(output: str, number: float | None) -> None:
    reading = read("vsi_bench/lmms", output, question("3", "mean_relative_accuracy"))
    assert (reading.answer is None) == (number is None)
    assert number is None or float(reading.answer or "nan") == number


def test_vsi_lmms_reads_choices_as_the_authors_do_and_passes_ties() -> None:
    assert score("vsi_bench/lmms", "b. left", "B") == 1.0
    assert score("vsi_bench/lmms", "The answer is B", "B") == 0.0
    assert score("vsi_bench/lmms", "I see three of them", "4", "mean_relative_accuracy") == pytest.approx(0.6)
    assert score("vsi_bench/lmms", "3", "0", "mean_relative_accuracy") is None


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("3 or 4", 4.0),  # the last
        ("<answer>3 to 4</answer>, not 5", 3.0),  # what stands at the beginning of the first tags
        ("<answer>about 3</answer> or 4", 4.0),  # tags that begin with no number are passed over
        ("<answer>1,200</answer>", 1.0),
        ("<answer>two</answer>", 2.0),
        ("<think>7</think> It is 3.5 m", 3.5),
        ("<think>7</think> none", 7.0),  # nothing behind the thinking: the last of all
        ("<think>7 then 8", 8.0),
        ("[5, 6]", 5.0),  # a list's first member
        ("[5, 6", 6.0),
        ("[five]", None),  # no list that Python reads
        ("twenty-one", -1.0),  # "20-1": the words count as figures one by one
        ("1e2", 100.0),
        ("4 chairs (seen at 0:30)", 30.0),
        ("none", None),
    ],
)
def test_vsi_kit_reads_the_last_number(output: str, number: float | None) -> None:
    reading = read("vsi_bench/kit", output, question("3", "mean_relative_accuracy"))
    assert (reading.answer is None) == (number is None)
    assert number is None or float(reading.answer or "nan") == number


def test_vsi_kit_passes_ties() -> None:
    assert score("vsi_bench/kit", "5 or 3", "4", "mean_relative_accuracy") == pytest.approx(0.6)
    assert score("vsi_bench/kit", "5", "10", "mean_relative_accuracy") == pytest.approx(0.1)


def test_vsi_kit_reads_no_more_than_the_last_six_lines_behind_thinking_first() -> None:
    assert letter("vsi_bench/kit", "<think>B</think>" + "\nso" * 7) == "B"  # the letter before the closing tag
    assert letter("vsi_bench/kit", "<think>A\nno</think>\n" + "so\n" * 6 + "D") == "D"


# --- Video-R1 ---


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("<think>A</think><answer> B </answer>", 1.0),
        ("<answer>B</answer> <answer>A</answer>", 1.0),  # the first tags
        ("B", 1.0),
        ("<answer></answer>B", 0.0),  # empty tags: the whole output
        ("<answer>(B)</answer>", 0.0),
        ("<answer>B.</answer>", 0.0),
        ("<answer>B", 0.0),
    ],
)
def test_video_r1_wants_the_letter_alone(output: str, expected: float) -> None:
    for name in ("video_mme", "mvbench", "tempcompass", "video_mmmu", "mmvu", "vsi_bench"):
        assert score(f"{name}/video_r1", output, "B") == expected


def test_video_r1_numbers_are_rounded_and_written_alike() -> None:
    assert score("video_mmmu/video_r1", "<answer>3.431</answer>", "3.43", "numerical") == 1.0
    assert score("video_mmmu/video_r1", "<answer>3</answer>", "3.0", "numerical") == 0.0  # one has a point
    assert score("video_mmmu/video_r1", "3.43", "3.429", "mathematics") == 1.0


def test_video_r1_scores_answers_in_words_0_and_counts_them() -> None:
    assert score("video_mmmu/video_r1", "text", "text", "free_form") == 0.0
    assert score("video_mmmu/video_r1", "yes", "yes", "yes_no") == 0.0
    assert score("video_mmmu/video_r1", "1/2", "1/2", "mathematics") == 0.0
    assert score("video_mmmu/video_r1", "3", "three", "numerical") is None


# --- MMVU ---


@pytest.mark.parametrize(
    ("output", "gold", "expected"),
    [
        ("It is a C or a D", "D", 1.0),  # any lone letter will do
        ("It is a C or a D", "A", 1.0),  # the article, in any case
        ("the red bird sings", "D", 1.0),  # D stands in "bird", and "red" is a word of its text
        ("No", "B", 0.0),
    ],
)
def test_mmvu_choices_are_right_too_often(output: str, gold: str, expected: float) -> None:
    assert score("mmvu/lmms", output, gold) == expected


@pytest.mark.parametrize(
    ("output", "gold", "expected"),
    [
        ("", "anything", 1.0),  # part of every answer
        ("5 mV", "5 µV", 1.0),
        ("84 g/mol", "48 g/mol", 1.0),  # "g/mol" is the only word of more than 2 letters
        ("It takes O(n²) steps", "O(n^2)", 1.0),
        ("12.005 m", "12 kg", 1.0),  # first numbers within 0.01
        ("12.02 metres", "12 kilograms", 0.0),
        ("12.02 m", "12 kg", 1.0),  # no word of more than 2 letters is missing
        ("blue", "red", 0.0),
    ],
)
def test_mmvu_open_answers_are_right_too_often(output: str, gold: str, expected: float) -> None:
    assert score("mmvu/lmms", output, gold, "free_form", question_type="open-ended") == expected


# --- LongVideo-Reason ---


# --- MathVista ---


def test_mathvista_takes_the_shortest_choice_for_what_it_cannot_read() -> None:
    options = ("A. seven", "B. two", "C. six")
    sample = Sample("q", "Q?", (), options, "B", "multiple_choice", "s", "c", details={"question_type": "multi_choice"})
    assert read("mathvista/official", "seven", sample).answer == "A"
    assert read("mathvista/official", "", sample).answer == "B"  # "two" and "six" have 3 letters; the first of them
    assert read("mathvista/official", "C", sample).answer == "B"  # a bare letter is for the judge
    assert read("mathvista/official", "", sample).score == 1.0


def test_mathvista_reads_a_letter_in_brackets_within_a_choice() -> None:
    options = ("A. f(b)", "B. g(x)", "C. h")
    sample = Sample("q", "Q?", (), options, "B", "multiple_choice", "s", "c")
    assert read("mathvista/official", "f(b)", sample).answer == "B"
    # "X" is no option; one replacement makes it "h", four make it "g(x)".
    assert read("mathvista/official", "g(x)", sample).answer == "C"


@pytest.mark.parametrize(
    ("output", "gold", "kind", "official", "lmms"),
    [
        ("14", "14", "integer", 1.0, 1.0),
        ("14.9", "14", "integer", 0.0, 0.0),  # no int() of a text with a point: for the judge
        ("1.449", "1.45", "float", 1.0, 0.0),  # rounded to 2 decimals; lmms-eval fails on all floats
        ("1.44", "1.45", "float", 0.0, 0.0),
        ("[1, 2]", "[1, 2]", "list", 0.0, 0.0),
    ],
)
def test_mathvista_numbers(output: str, gold: str, kind: str, official: float, lmms: float) -> None:
    details = {"question_type": "free_form", "answer_type": kind, "precision": 2.0}
    assert score("mathvista/official", output, gold, "numerical", **details) == official
    assert score("mathvista/lmms", output, gold, "numerical", **details) == lmms


# --- GSM8K, MATH-500, AMC, AIME ---


@pytest.mark.parametrize(
    ("output", "strict", "flexible"),
    [
        ("so 18\n#### 18", 1.0, 1.0),
        ("#### 18 #### 20", 1.0, 0.0),  # the first, and the last
        ("The answer is $18.", 0.0, 1.0),
        (r"The answer is $\boxed{18}$.", 0.0, 0.0),  # the last match is "$."
        ("#### 18.00", 0.0, 0.0),
        ("#### $18", 0.0, 1.0),
    ],
)
def test_gsm8k_by_lmms(output: str, strict: float, flexible: float) -> None:
    assert score("gsm8k/lmms_strict", output, "18", "numerical") == strict
    assert score("gsm8k/lmms_flexible", output, "18", "numerical") == flexible


def test_gsm8k_by_lmms_ignores_commas() -> None:
    assert score("gsm8k/lmms_strict", "#### 1,250", "1250", "numerical") == 1.0


def test_gsm8k_by_cppo_ignores_commas_and_needs_a_number_for_gold() -> None:
    assert score("gsm8k/cppo", "<answer>1,250</answer>", "1,250", "numerical") == 1.0
    assert score("gsm8k/cppo", "it is 1,250.", "1250", "numerical") == 1.0
    assert score("gsm8k/cppo", "x", "unknown", "numerical") is None


@pytest.mark.parametrize(
    ("output", "gold", "expected"),
    [
        (r"\boxed{0.27}", "27", 1.0),  # a hundredth
        (r"\boxed{2700}", "27", 1.0),  # the hundredfold
        (r"\boxed{[1,4]}", "[1,4)", 1.0),  # brackets are ignored
        (r"\boxed{27} or \boxed{28}", "27", 0.0),  # the last box
        ("The answer is 27 apples.", "27", 1.0),  # a unit
        ("The answer is five apples.", "5", 1.0),  # a number word
        (r"\boxed{two thousand and one hundred three}", "2103", 1.0),
        (r"\boxed{three point two five}", "3.25", 1.0),
        ("first 3, then 1,027", "1027", 1.0),  # the last number
        (r"so it is $\sqrt{2}$", r"\sqrt{2}", 0.0),  # without a box only a number is read: 2
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x=27}", "27", 1.0),
        (r"\boxed{100.005}", "100", 1.0),  # within a relative 1e-4
        (r"\boxed{100.02}", "100", 0.0),
        (r"\boxed{(1,4.5)}", r"(1,\frac{9}{2})", 1.0),  # element by element, the last by math-verify
        (r"\boxed{073}", "73", 1.0),
        (r"\boxed{\text{west}}", r"\text{east}", 1.0),  # both are taken for units, and nothing is left of either
        ("", "27", 0.0),
    ],
)
def test_qwen25_math(output: str, gold: str, expected: float) -> None:
    assert score("math500/qwen25_math", output, gold, "mathematics") == expected


def test_a_gold_answer_that_cannot_be_compared_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    assert score("math500/qwen25_math", r"\boxed{5}", r"\cot x", "mathematics") == 0.0
    monkeypatch.setattr(checking, "_pool", lambda: Mock(run=lambda calls: [Outcome(problem="too slow")]))
    assert score("math500/qwen25_math", r"\boxed{y}", "x", "mathematics") == 0.0


def test_easyr1_reads_boxes_alone() -> None:
    assert score("math500/easyr1", r"\boxed{\frac{1}{2}}", "0.5", "mathematics") == 1.0
    assert score("math500/easyr1", "The answer is 0.5", "0.5", "mathematics") == 0.0


def test_cppo_compares_latex_of_the_whole_output_with_the_solution() -> None:
    solution = r"Half of it: $\boxed{\frac{1}{2}}$."
    assert score("math500/cppo", r"thus $\boxed{0.5}$", "1/2", "mathematics", solution=solution) == 1.0
    assert score("math500/cppo", r"thus $\boxed{0.6}$", "1/2", "mathematics", solution=solution) == 0.0
    assert score("aime/cppo", r"$\boxed{73}$", "73", "mathematics") == 1.0
    # Outputs, and not solutions, are read without repairing LaTeX that leaves braces out.
    assert score("math500/cppo", r"$\boxed{\frac43}$", "4/3", "mathematics", solution=r"$\boxed{\frac{4}{3}}$") == 0.0
    # A solution without mathematics makes every output right.
    assert score("math500/cppo", "no idea", "x", "mathematics", solution="see above") == 1.0


# --- Charades-STA ---


def test_charades_gold_that_is_no_span_has_no_value() -> None:
    for gold in ("8", "[8, 0]", "[1, 2, 3]", "two"):
        assert score("charades_sta/lmms", "2 - 8", gold, "time_span") is None


# --- hostile outputs ---

HOSTILE = {
    "digits": "1" * 100_000,
    "digits and a comma": "1" * 100_000 + ",",
    "points": "1." * 50_000,
    "blanks": "1" + " " * 100_000,
    "openings": "O(" * 50_000,
    "tags": "<answer>" * 12_500,
    "braces": "\\boxed" + "{" * 100_000,
    "letters": "A" * 100_000,
    "lines": "A.\n" * 33_000,
    "answers": "answer : " * 11_000,
    "tags in a tag": "<answer " * 12_500 + ">",
    "tags with letters": "<answer>a" * 11_000,
}
KINDS: dict[str, AnswerKind] = {
    "charades_sta": "time_span",
    "gsm8k": "numerical",
    "math500": "mathematics",
    "amc": "mathematics",
    "aime": "mathematics",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_output_of_100_kb_is_read_by_every_rule(what: str) -> None:
    """All are read within a second; a reading in the square of the length would take hours in all."""
    # One name of each reader: several sets are read by one.
    for name in {rule.read: name for name, rule in PUBLISHED.items()}.values():
        own = KINDS.get(name.split("/")[0])
        if own is None:
            assert read(name, HOSTILE[what], question("B")).score in (0.0, 1.0)
            if name != "longvideo_reason/long_rl":  # where math-verify reads on until it is stopped
                read(name, HOSTILE[what], question("18", "free_form", question_type="open", answer_type="float"))
        else:
            gold = "[0, 8]" if own == "time_span" else "18"
            assert read(name, HOSTILE[what], question(gold, own)).score == 0.0


def test_a_rule_for_choices_has_no_value_for_a_question_without_options() -> None:
    for name in ("video_mme/lmms", "longvideobench/lmms", "nextqa/lmms", "mvbench/official", "mvbench/lmms"):
        assert read(name, "A", question("5", "numerical")).score is None
        assert read(name, "none", question("5", "numerical")).score is None
