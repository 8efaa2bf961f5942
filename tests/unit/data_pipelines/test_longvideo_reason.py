"""LongVideo-Reason as published: each row becomes a record, or is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import longvideo_reason
from data_pipelines.engine.rows import form_of
from data_pipelines.flashes import encode_mp4
from data_pipelines.longvideo_reason import LONGVIDEO_REASON
from tests.support.pipeline_rows import annotations, empty_files, example, outcomes, reasons_of, samples_of, write_lines
from vlm_pg.errors import ConfigError
from vlm_pg.media.paths import resolve
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import Sample

GOAL = "What is the man's primary goal in the workshop, as inferred from the video?"
ASKED = f"""{GOAL}  \nA. Creating a prop replica of Ash's chainsaw hand from "Evil Dead"  \n\
B. Building a custom storage container for mixed nuts  \nC. Installing a ventilation system using pipes and fans  \n\
D. Crafting a DIY household appliance  \n"""


def row(problem: Any = ASKED, answer: Any = "<answer>A</answer>", **changes: Any) -> dict[str, Any]:
    published = {"problem_id": 0, "problem": problem, "data_type": "video", "problem_type": "goal"}
    published |= {"reasoning": "Checking the video ...", "videos": "longvila_videos/5nKz1hzvSqs.mp4", "answer": answer}
    return published | changes


def outcome(tmp_path: Path, *rows: Any, name: str = "train") -> list[Any]:
    return outcomes(LONGVIDEO_REASON, write_lines(tmp_path / f"{name}.jsonl", rows))


def only(tmp_path: Path, *fields: Any, **changes: Any) -> Any:
    (one,) = outcome(tmp_path, row(*fields, **changes))
    return one if isinstance(one, Sample) else one.reason


def test_the_published_row(tmp_path: Path) -> None:
    sample = only(tmp_path)
    assert sample == example(longvideo_reason)
    assert list(gold_faults([sample])) == [None]
    assert sample.category == "goal" and sample.process == "Checking the video ..." and len(sample.options) == 4


def test_ids_are_unique_though_each_file_counts_anew(tmp_path: Path) -> None:
    result = outcome(tmp_path, row(), row(), name="train") + outcome(tmp_path, row(), name="test")
    assert list(samples_of(result)) == ["train-1", "train-2", "test-1"]


def test_options_may_stand_out_of_order(tmp_path: Path) -> None:
    sample = only(
        tmp_path, "Why?  \nD. to contrast  \nA. to promote  \nB. to guide  \nC. to document", "<answer>D</answer>"
    )
    assert sample.options == ("D. to contrast", "A. to promote", "B. to guide", "C. to document")
    assert sample.question == "Why?" and sample.answer == "D"


@pytest.mark.parametrize(
    "gold, answer, kind",
    [
        ("<answer>To show how rice is grown, from seed to table.</answer>", None, "free_form"),
        ("To show how rice is grown.", None, "free_form"),
        ("<answer>Yes.</answer>", "yes", "yes_no"),
        ("<answer>4</answer>", "4", "numerical"),
    ],
)
def test_open_questions(gold: str, answer: str | None, kind: str, tmp_path: Path) -> None:
    (sample,) = outcome(tmp_path, row("What is it for?", gold), name="openended")
    assert isinstance(sample, Sample) and sample.answer_kind == kind and sample.options == ()
    assert sample.answer == (answer or gold.removeprefix("<answer>").removesuffix("</answer>"))


DAMAGED = "Why?\nA. But this requires the test-taker to weigh both.\nA. to play\nB. to eat\nC. to rest\nD. to train"


@pytest.mark.parametrize(
    "problem, answer, reason",
    [
        ("Why does the elephant come first?", "<answer>B</answer>", "too_few_options"),  # as problem_id 379, 857
        (DAMAGED, "<answer>B</answer>", "bad_options"),  # as problem_id 147, 743, 825
        ("Why?\nA. to play\nB. But wait, that is not\nC. to rest", "<answer>C</answer>", "bad_options"),
        ("Why?\nA. a\nB. b\nC. c\nD. d\nE. e", "<answer>C</answer>", "bad_options"),
        (f"{ASKED}\nHmm, is that too easy?", "<answer>A</answer>", "bad_options"),
        (ASKED, "<answer>E</answer>", "answer_not_in_options"),
        (ASKED, "<answer>A, B</answer>", "answer_not_in_options"),
        (ASKED, "<answer>A. Crafting a DIY household appliance</answer>", "ambiguous_answer"),
        (ASKED, "<answer>D. Crafting a DIY household appliance.</answer>", None),
        (ASKED, "<answer>A</answer> or <answer>B</answer>", "no_answer_tag"),
        (ASKED, "<answer>A</answer> I think", "no_answer_tag"),
        (ASKED, "A</answer>", "no_answer_tag"),
        (ASKED, "<answer></answer>", "answer_not_in_options"),
        ("Why?", "<answer> </answer>", "empty_answer"),
        ("", "<answer>A</answer>", "missing_field"),
        ("  ", "<answer>to eat</answer>", "empty_question"),
        (f"<video>\n{ASKED}", "<answer>A</answer>", None),
        (f"<|video_pad|>{ASKED}", "<answer>A</answer>", "media_token_in_text"),
    ],
)
def test_what_leaves_doubt_is_refused(problem: str, answer: str, reason: str | None, tmp_path: Path) -> None:
    result = only(tmp_path, problem, answer)
    assert isinstance(result, Sample) if reason is None else result == reason


def test_odd_rows_are_refused(tmp_path: Path) -> None:
    odd = {
        "missing_field": [{}, {"problem": "Why?"}, *(row(**{key: None}) for key in ("problem", "videos", "answer"))],
        "wrong_type": [
            row(problem=3),
            row(answer=["A"]),
            row(answer={"a": 1}),
            row(videos={}),
            row(videos=["a.mp4", "b.mp4"]),
            row(videos=[]),
            row(videos=[3]),
            row(reasoning=["step"]),
            row(problem_type=1),
        ],
        "not_a_record": [None, [], 3, "text"],
    }
    for reason, rows in odd.items():
        result = outcome(tmp_path, row(), *rows)
        assert list(reasons_of(result).values()) == [reason] * len(rows), reason
        assert list(samples_of(result)) == ["train-1"]
    assert only(tmp_path, reasoning=None).process == ""


def test_videos_lie_where_readme_or_archives_put_them(tmp_path: Path) -> None:
    frames = np.zeros((2, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "longvideo_eval_subset7").mkdir()
    encode_mp4(frames, tmp_path / "longvideo_eval_subset7/5nKz1hzvSqs.mp4")
    empty_files(tmp_path, "longvila_videos/I_Q3ajyOrcI.webm", "longvideo_eval_subset0/-a_b.mkv")
    names = ["5nKz1hzvSqs.mp4", "I_Q3ajyOrcI.webm", "-a_b.mkv", "gone.mp4"]
    rows = [row(videos=f"longvila_videos/{name}") for name in names] + [row(videos=["longvila_videos/5nKz1hzvSqs.mp4"])]
    annotations = write_lines(tmp_path / "test.jsonl", rows)
    paths = [one.media[0].path for one in samples_of(outcomes(LONGVIDEO_REASON, annotations, root=tmp_path)).values()]
    assert paths == [
        "longvideo_eval_subset7/5nKz1hzvSqs.mp4",
        "longvila_videos/I_Q3ajyOrcI.webm",
        "longvideo_eval_subset0/-a_b.mkv",
        "longvila_videos/gone.mp4",
        "longvideo_eval_subset7/5nKz1hzvSqs.mp4",
    ]
    (first, *_) = samples_of(outcomes(LONGVIDEO_REASON, annotations, root=tmp_path)).values()
    assert Path(resolve(first.media[0], tmp_path)).stat().st_size > 0


def test_annotation_files_are_found(tmp_path: Path) -> None:
    empty_files(tmp_path, *(f"{name}.jsonl" for name in ("train", "val", "test", "openended")), "data/train-0.parquet")
    assert annotations(LONGVIDEO_REASON, tmp_path) == {"train": ["train.jsonl"], "eval": ["test.jsonl"]}


def test_rows_as_parquet(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        rows = pyarrow.Table.from_pylist([row(), row("Why?", "<answer>to eat</answer>", problem_type=None)])
        pyarrow.parquet.write_table(rows, folder / f"{split}-00000-of-00001.parquet")
    first, second = samples_of(outcomes(LONGVIDEO_REASON, Path(f"{folder}:test"))).values()
    assert (first.answer, second.answer, second.category) == ("A", "to eat", "longvideo_reason")
    assert first.sample_id == "data-test-1"


def test_a_file_of_other_rows_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the row has no problem, videos\..*\{train,val,test,openended\}\.jsonl"):
        form_of(LONGVIDEO_REASON, write_lines(tmp_path / "a.jsonl", [{"answer": "A"}]))
