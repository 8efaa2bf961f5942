"""LLaVA-Video-178K as published: each turn of a dialogue becomes a record, or is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import llava_video_178k
from data_pipelines.engine.rows import form_of
from data_pipelines.llava_video_178k import LLAVA_VIDEO_178K
from tests.support.pipeline_rows import annotations, empty_files, example, outcomes, reasons_of, samples_of, write_json
from vlm_pg.errors import ConfigError
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import MediaRef, Sample

LETTER = "\nPlease respond with only the letter of the correct answer."
OPTION = "\nPlease provide your answer by stating the letter followed by the full option."
VIDEO = "academic_source/youcook2/101/zukEQgbWdsY/split_2.mp4"
SUBSET = "0_30_s_academic_v0_1"
MC, OE, CAP = f"{SUBSET[:-5]}_mc_v0_1_qa_processed", f"{SUBSET[:-5]}_oe_v0_1_qa_processed", f"{SUBSET}_cap_processed"


def turns(*said: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(said)]


def row(*said: str, **changes: Any) -> dict[str, Any]:
    published = {"id": "101-zukEQgbWdsY-split_2", "conversations": turns(*said), "data_source": SUBSET, "video": VIDEO}
    return published | changes


PUBLISHED = row(
    "<image>\nWhat is visible on the person's arm in the video?\nA. A tattoo\nB. A watch\nC. A bracelet\nD. A scar"
    f"{LETTER}",
    "A.",
    f"What is the color of the skillet in the video?\nA. Black\nB. Silver\nC. Red\nD. Blue{OPTION}",
    "A. Black.",
)


def outcome(tmp_path: Path, *rows: Any) -> list[Any]:
    return outcomes(LLAVA_VIDEO_178K, write_json(tmp_path / f"{MC}.json", rows))


def only(tmp_path: Path, *said: str) -> Any:
    (one,) = outcome(tmp_path, row(*said))
    return one if isinstance(one, Sample) else one.reason


def test_each_turn_of_the_published_row_is_a_question(tmp_path: Path) -> None:
    first, second = outcomes(LLAVA_VIDEO_178K, write_json(tmp_path / f"{MC}.json", [PUBLISHED]))
    media = (MediaRef("video", VIDEO),)
    options = ("A. A tattoo", "B. A watch", "C. A bracelet", "D. A scar")
    asked = "What is visible on the person's arm in the video?"
    assert first == Sample(f"{MC}-1-1", asked, media, options, "A", "multiple_choice", source=SUBSET, category=SUBSET)
    assert second == example(llava_video_178k)
    assert list(gold_faults([first, second])) == [None, None]


def test_open_questions_and_captions_are_free_form_or_what_checks_them_better(tmp_path: Path) -> None:
    nextqa = {"data_source": "0_30_s_nextqa", "video": "NextQA/NExTVideo/1006/8968804598.mp4"}
    rows = [
        row("<image>\nWhat does she do?", "She stirs the soup.", "And then?", "She tastes it."),
        row("<image>\nis he alone\nAnswer the question using a single word or phrase.", "No.", **nextqa),
        row("how many people are there\n<image>", "3", **nextqa),
        row("<image>\nWhich number is on his shirt?", "07"),
        row("<image>\nA.D. or B.C. on the sign?\nD.C. in the title?", "B.C. and D.C."),
    ]
    samples = samples_of(outcomes(LLAVA_VIDEO_178K, write_json(tmp_path / f"{OE}.json", rows)))
    assert [(one.question, one.answer, one.answer_kind, one.source) for one in samples.values()] == [
        ("What does she do?", "She stirs the soup.", "free_form", SUBSET),
        ("And then?", "She tastes it.", "free_form", SUBSET),
        ("is he alone", "no", "yes_no", "0_30_s_nextqa"),
        ("how many people are there", "3", "numerical", "0_30_s_nextqa"),
        ("Which number is on his shirt?", "07", "free_form", SUBSET),
        ("A.D. or B.C. on the sign?\nD.C. in the title?", "B.C. and D.C.", "free_form", SUBSET),
    ]
    assert [name.removeprefix(f"{OE}-").count("-") for name in samples] == [1, 1, 0, 0, 0, 0]
    by_rule = [one for one in samples.values() if one.answer_kind != "free_form"]
    assert list(gold_faults(by_rule)) == [None, None]
    told = row("<image>\nPlease describe the video.", "A person cooks.\n\nThen the dish is served: 1. soup, 2. bread.")
    (caption,) = outcomes(LLAVA_VIDEO_178K, write_json(tmp_path / f"{CAP}.json", [told]))
    assert isinstance(caption, Sample) and caption.answer_kind == "free_form"
    assert caption.answer == told["conversations"][1]["value"] and caption.question == "Please describe the video."


@pytest.mark.parametrize(
    "asked, gold, options, letter",
    [
        ("Why?\nOptions:\nA. to train\nB. to rest\nC. fun\nD. fear\nE. pay", "E. pay.", 5, "E"),
        ("Why?\n(A) to train\n(B) to rest", "(B)", 2, "B"),
        ("Why?\nA. to train\nB. to rest", "to rest", 2, "B"),
        ("Why?\nA.To train\n\nB.To rest\n", "B. to  rest", 2, "B"),
        ("Why?\nB. to rest\nA. to train", "A", 2, "A"),
        ("Which letter?\nA. B\nB. A", "A. B.", 2, "A"),
        ("Why?\nA. to train\nC. to rest", "To rest.", 2, "B"),
        ("Why?\nA. to train\nB. fun\nD. to rest", "D. to rest.", 3, "C"),
        ("Why?\nA.U.S. Army\nB.NATO\nC. UN", "A.U.S. Army.", 3, "A"),
        ("Why?\nA.U.S. Army\nB.NATO\nC. UN", "B.", 3, "B"),
    ],
)
def test_options_and_gold_answers_in_their_spellings(
    asked: str, gold: str, options: int, letter: str, tmp_path: Path
) -> None:
    sample = only(tmp_path, f"<image>\n{asked}{OPTION}", gold)
    assert isinstance(sample, Sample) and sample.answer == letter and len(sample.options) == options
    assert sample.question in ("Why?", "Which letter?") and sample.answer_kind == "multiple_choice"


@pytest.mark.parametrize(
    "asked, gold, reason",
    [
        ("Why?\nA. to train\nB. to rest", "B. to train.", "ambiguous_answer"),
        ("Why?\nA. to train\nB. to rest", "B. nobody knows", "ambiguous_answer"),
        ("Which letter?\nA. B\nB. A", "A.", "ambiguous_answer"),
        ("Why?\nA. rest\nB. Rest.", "rest", "ambiguous_answer"),
        ("Why?\nA. to train\nB. to rest", "C.", "answer_not_in_options"),
        ("Why?\nA. to train\nB. to rest", "C. to eat", "answer_not_in_options"),
        ("Why?\nA. to train\nB. to rest", "to eat", "answer_not_in_options"),
        ("Why?\nA. to train\nB. to rest", "<answer>B</answer>", "answer_not_in_options"),
        ("Why?\nA. to rest\nB. to rest", "A.", "bad_options"),
        ("Why?\nA. to train\nC. to rest", "A.", "bad_options"),
        ("Why?\nA. to train\nC. to rest", "B. to rest", "bad_options"),
        ("Why?\nA. to train\nC. to rest", "to eat", "bad_options"),
        ("Why?\nA. rest\nB. Rest.\nD. fun", "rest", "bad_options"),
        ("Why?\nA. to train\nC. to rest\nD. B and C", "to rest", "bad_options"),
        ("Why?\nA. to train\nA. to rest", "A.", "bad_options"),
        ("Why?\nA. to train\nB. to rest\nor sleep", "A.", "bad_options"),
        ("Why?\nA. to train\nB.", "A.", "bad_options"),
        ("Why?\nA. to train", "A.", "bad_options"),
        ("A. to train\nB. to rest", "A.", "empty_question"),
        ("Why? A. to train B. to rest", "A. to train", "too_few_options"),
        ("Why? A. to train B. to rest", "to train", "too_few_options"),
    ],
)
def test_what_leaves_doubt_is_refused(asked: str, gold: str, reason: str, tmp_path: Path) -> None:
    assert only(tmp_path, f"<image>\n{asked}{LETTER}", gold) == reason


@pytest.mark.parametrize(
    "asked, gold, reason",
    [
        ("<image>\nWhat is seen?", "B.", "too_few_options"),
        ("<image>\nWhat is seen?", "B. a dog", "too_few_options"),
        ("<image>\nWhat is seen?", " ", "empty_answer"),
        ("<image>\nWhat is seen?", "a </answer> tag", "no_answer_tag"),
        ("<image>\n", "a dog", "empty_question"),
        ("<image>\nIs <image> before?", "yes", "media_token_in_text"),
        ("<image>\nIs <|vision_start|> there?", "yes", "media_token_in_text"),
    ],
)
def test_open_questions_that_cannot_be_checked_are_refused(asked: str, gold: str, reason: str, tmp_path: Path) -> None:
    assert only(tmp_path, asked, gold) == reason


def test_a_turn_in_the_wrong_place_costs_no_other(tmp_path: Path) -> None:
    late = row("<image>\nFirst?", "a dog", "Second?")
    twice = row("<image>\nFirst?", "a dog")
    twice["conversations"] += [{"from": "gpt", "value": "or a cat"}, *turns("Second?", "a bird")]
    result = outcome(tmp_path, late, twice)
    assert [one.answer for one in samples_of(result).values()] == ["a dog", "a dog"]
    assert list(reasons_of(result).values()) == ["bad_dialogue"] * 3


def test_odd_rows_are_refused(tmp_path: Path) -> None:
    turn = {"from": "human", "value": "<image>\nWhat?"}
    answer = {"from": "gpt", "value": "a dog"}
    odd = {
        "missing_field": [{}, {"id": 1}, row("a", "b", video=None), row("a", "b", video="")],
        "wrong_type": [row("a", "b", video=3), row("a", "b", video=["x.mp4"]), row("a", "b", data_source=["x"])],
        "not_a_record": [None, [], "text", 7],
    }
    odd["missing_field"] += [row("a", "b", data_source=value) for value in (None, "")]
    odd["wrong_type"] += [row(conversations=value) for value in (None, [], {}, "text", 3)]
    odd["wrong_type"] += [row(conversations=[turn, {"from": "gpt", "value": value}]) for value in (3, ["a"], {})]
    odd["missing_field"] += [
        row(conversations=[turn, {"from": "gpt"}]),
        row(conversations=[turn, answer | {"value": None}]),
    ]
    odd["bad_dialogue"] = [
        row(conversations=value) for value in ([turn], [None, None], [turn, "a"], [{}, {}], [[turn], answer])
    ]
    for reason, rows in odd.items():
        result = outcome(tmp_path, row("<image>\nWhat?", "a dog"), *rows)
        assert list(reasons_of(result).values()) == [reason] * len(rows), reason
        assert len(samples_of(result)) == 1


def test_videos_lie_in_the_folders_of_subsets_or_below_the_root(tmp_path: Path) -> None:
    annotations = write_json(tmp_path / f"{SUBSET}/{MC}.json", [row("<image>\nWhat?", "a dog")])
    empty_files(tmp_path, f"{SUBSET}/{VIDEO}", "30_60_s_academic_v0_1/academic_source/youcook2/other/split_2.mp4")

    def path(root: Path) -> str:
        (sample,) = samples_of(outcomes(LLAVA_VIDEO_178K, annotations, root=root)).values()
        return sample.media[0].path

    assert path(tmp_path) == f"{SUBSET}/{VIDEO}"
    assert path(tmp_path / SUBSET) == VIDEO


def test_a_video_of_the_same_name_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    annotations = write_json(tmp_path / f"{MC}.json", [row("<image>\nWhat?", "a dog")])
    empty_files(tmp_path, f"{SUBSET}/academic_source/youcook2/101/another/split_2.mp4")
    (sample,) = samples_of(outcomes(LLAVA_VIDEO_178K, annotations, root=tmp_path)).values()
    assert sample.media == (MediaRef("video", f"{SUBSET}/{VIDEO}"),)


def test_annotation_files_are_found_in_the_repository_and_in_a_subset(tmp_path: Path) -> None:
    names = [f"{SUBSET}/{name}.json" for name in (CAP, MC, OE)] + ["30_60_s_nextqa/30_60_s_nextqa_mc_qa_processed.json"]
    others = (
        "llava_hound/sharegptvideo_qa_255k_processed.json",
        "gpt4o_qa_prompt/a.json",
        f"{SUBSET}/a_videos_1.tar.gz",
    )
    empty_files(tmp_path, *names, *others)
    assert annotations(LLAVA_VIDEO_178K, tmp_path) == {"train": sorted(names), "eval": []}
    assert len(annotations(LLAVA_VIDEO_178K, tmp_path / SUBSET)["train"]) == 3


def test_rows_as_parquet(tmp_path: Path) -> None:
    shard = tmp_path / "multi_choice" / "train-00000-of-00001.parquet"
    shard.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([PUBLISHED]), shard)
    for path in (shard, Path(f"{shard.parent}:train")):
        samples = samples_of(outcomes(LLAVA_VIDEO_178K, path)).values()
        assert [one.answer for one in samples] == ["A", "A"]


def test_a_file_of_other_rows_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the row has no conversations, video, data_source\..*_processed\.json"):
        form_of(LLAVA_VIDEO_178K, write_json(tmp_path / "a.json", [{"question": "Who?"}]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"question_type": "absolute_count"},
            r"has 'question_type', as rows of VSI-590K \('vlm-pg prepare vsi'\) have",
        ),
        # Video-ChatGPT and others in the form of LLaVA.
        ({"data_source": ...}, "the row has no data_source"),
    ],
)
def test_dialogues_of_other_sets_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    other = {name: value for name, value in row("<image>\nHow many?", "4", **changes).items() if value is not ...}
    with pytest.raises(ConfigError, match=message):
        form_of(LLAVA_VIDEO_178K, write_json(tmp_path / f"{MC}.json", [other]))
    result = outcome(tmp_path, PUBLISHED, other)
    assert len(samples_of(result)) == 2 and len(reasons_of(result)) == 1
