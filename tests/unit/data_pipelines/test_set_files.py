"""What single data sets read of whole files: tables beside the annotations, splits, dialogues, subtitles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import video_mme
from data_pipelines.aime2024 import _AROUND, AIME2024
from data_pipelines.charades_sta import CHARADES_STA
from data_pipelines.clevrer import _WORDS, CLEVRER
from data_pipelines.engine.answers import open_answer
from data_pipelines.engine.media_finder import MediaFinder
from data_pipelines.engine.rows import RowReader, form_of
from data_pipelines.geometry3k import GEOMETRY3K
from data_pipelines.llava_video_178k import LLAVA_VIDEO_178K
from data_pipelines.longvideobench import cues_of
from data_pipelines.math import MATH, last_boxed
from data_pipelines.mvbench import FOLDERS, MVBENCH
from data_pipelines.nextqa import NEXTQA
from data_pipelines.perception_test import PERCEPTION_TEST
from data_pipelines.tempcompass import TEMPCOMPASS
from data_pipelines.video_mme import VIDEO_MME
from data_pipelines.video_mmmu import VIDEO_MMMU
from tests.support.pipeline_rows import (
    empty_files,
    kept,
    one_row,
    outcomes,
    parted,
    reasons_of,
    samples_of,
    verdicts,
    write_json,
    write_lines,
)
from tests.support.published import charades_sta as charades
from tests.support.published import video_mme as mme
from tests.support.published.case import dataset_of, lay_out
from tests.unit.data_pipelines.test_resume import killed
from tests.unit.data_pipelines.test_set_rows import LETTER, ROWS, dialogue
from vlm_pg.answers.mathematics import compare
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.rewards.rewarder import gold_faults
from vlm_pg.types import BadSample, Cue, MediaRef, Sample

Row = dict[str, Any]
QUESTION = {"question": "How many?", "answer": "3", "options": ["3", "4"]}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", QUESTION, "'options', as rows of multiple choice sets have"),
        ("aime2024", ROWS["aime2024"] | {"unique_id": ["x"]}, "'unique_id', as rows of MATH-500"),
        ("amc2023", ROWS["amc2023"] | {"solution": ["x"]}, "'solution', as rows of sets with worked solutions"),
        # hiyouga/geometry3k, whose diagrams would be lost; MathVista; MMLU, of whose answer only the number would stay.
        ("math", {"problem": "Find $x$.", "answer": "3", "images": ["a.png"]}, "'images', as rows of sets with media"),
        (
            "math",
            {"question": "?", "answer": "3", "decoded_image": "a.png", "choices": None},
            "'decoded_image', as rows",
        ),
        ("math", {"question": "?", "answer": 1, "choices": ["3", "4"]}, "'choices', as rows of multiple choice sets"),
        (
            "llava_video_178k",
            ROWS["llava_video_178k"] | {"question_type": "absolute_count"},
            r"'question_type', as rows of VSI-590K \('vlm-pg prepare vsi'\) have",
        ),
    ],
)
def test_rows_of_similar_sets_are_refused_each_and_files_of_them_alone_as_a_whole(
    tmp_path: Path, name: str, row: Row, message: str
) -> None:
    dataset = dataset_of(name)
    with pytest.raises(ConfigError, match=f"test.jsonl:1: the row has {message}"):
        parted(dataset, write_lines(tmp_path / "test.jsonl", [row]))
    own = {field: value for field, value in row.items() if f"'{field}'" not in message}
    mixed = write_lines(tmp_path / "mixed.jsonl", [row, own | {"choices": [], "images": None}])
    samples, refused = parted(dataset, mixed)
    assert len(samples) == 1 and [one.reason for one in refused] == ["other_data_set"]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("llava_video_178k", {"question": "Who?"}, r"no conversations, video, data_source\..*_processed\.json"),
        ("longvideo_reason", {"answer": "A"}, r"no problem, videos\..*\{train,val,test,openended\}\.jsonl"),
        ("video_r1", {"question": "?"}, r"no problem_id, problem, data_type.*Video-R1-COT-165k\.json"),
        # lmms-lab/NExTQA has these in a folder beside.
        ("nextqa", {"video": 17, "question": "?", "answer": "bird", "qid": 3, "type": "DC"}, "no a0, a1, a2, a3, a4"),
        ("llava_video_178k", {"conversations": [], "video": "x"}, "no data_source"),  # Video-ChatGPT and others
    ],
)
def test_a_file_of_other_rows_is_refused_with_the_expected_fields(
    tmp_path: Path, name: str, row: Row, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"the row has {message}"):
        form_of(dataset_of(name), write_lines(tmp_path / "rows.jsonl", [row]))


def prompt(problem: str, answer: str = "204") -> Row:
    before, after = _AROUND
    return {
        "prompt": [{"role": "user", "content": f"{before}\n\n{problem}\n\n{after}"}],
        "reward_model": {"ground_truth": answer},
        "extra_info": {"index": 7, "raw_problem": ""},
    }


def test_the_first_of_repeated_problems_is_kept_and_damaged_rows_are_refused_each(tmp_path: Path) -> None:
    damaged = prompt("How long?") | {"prompt": []}
    rows = [prompt("How long?"), prompt("How  wide?"), prompt("How long?"), prompt("How wide?\n"), damaged, damaged, 7]
    samples, refused = parted(AIME2024, write_lines(tmp_path / "aime.jsonl", [*rows, prompt("How long?")]))
    assert [(one.sample_id, one.question, one.details) for one in samples] == [
        ("aime-1", "How long?", {"id": 7}),
        ("aime-2", "How  wide?", {"id": 7}),
    ]
    assert [one.reason for one in refused] == ["bad_conversation", "bad_conversation", "not_a_record"]


@pytest.mark.parametrize("cell", ["", "long", "nan"])
@pytest.mark.parametrize("folder", ["Charades", ".."])
def test_spans_are_cut_by_the_tables_of_charades_and_a_damaged_table_is_an_error(
    tmp_path: Path, folder: str, cell: str
) -> None:
    lines, table = tmp_path / "sta" / "charades_sta_test.txt", tmp_path / "sta" / folder / "Charades_v1_test.csv"
    for path in (lines, table):
        path.parent.mkdir(exist_ok=True, parents=True)
    lines.write_text("3MSZA 24.3 31.9##a\n\n0A8CF 11.2 12.0##b\nUNKNO 11.2 120.0##c\n")
    table.write_text(charades.lengths(**{"3MSZA": "30.96", "0A8CF": "11.17"}))
    cut, refused, unknown = outcomes(CHARADES_STA, lines)
    assert isinstance(cut, Sample) and isinstance(unknown, Sample) and isinstance(refused, BadSample)
    assert (cut.answer, cut.details) == ("[24.3, 30.96]", {"sentence": "a", "duration": 30.96})
    assert (unknown.sample_id, unknown.answer) == ("charades_sta_test-4", "[11.2, 120]")
    assert (
        refused.where == "charades_sta_test.txt:3" and "from 11.2 to 11.17 s of a video of 11.17 s" in refused.message
    )
    table.write_text(charades.lengths(**{"3MSZA": cell}))
    with pytest.raises(ConfigError, match=r"Charades_v1_test\.csv:3' has no length of a video.*or remove it"):
        verdicts(CHARADES_STA, lines)


def test_times_of_half_precision_are_the_tenths_they_were(tmp_path: Path) -> None:
    """All of a video's first two minutes, where no two tenths are one number."""
    times = [*((tenth / 10, tenth / 10 + 5) for tenth in range(1230)), (24.28125, 30.4)]
    halves = pyarrow.array([list(map(np.float16, pair)) for pair in times], pyarrow.list_(pyarrow.float16()))
    columns = {"video": ["3MSZA.mp4"] * len(times), "caption": ["on"] * len(times), "timestamp": halves}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "test-00000-of-00001.parquet")
    tenths = [f"{tenth / 10:.1f}".removesuffix(".0") for tenth in range(1280)]
    expected = [*(f"[{tenths[n]}, {tenths[n + 50]}]" for n in range(1230)), "[24.28, 30.4]"]
    assert [one.answer for one in kept(CHARADES_STA, Path(f"{tmp_path}:test"))] == expected


def test_the_21_words_of_clevrer_are_graded_and_questions_without_an_id_are_numbered() -> None:
    words = ["yes", "no", *map(str, range(6)), *_WORDS]
    question = [
        {"question_id": n, "question": "?", "question_type": "descriptive", "answer": w} for n, w in enumerate(words)
    ]
    found = one_row(CLEVRER, ROWS["clevrer"] | {"questions": [*question, "What?", question[0] | {"question_id": None}]})
    samples = samples_of(found)
    assert len(words) == 21 and [one.answer for one in samples.values()] == [*words, "yes"]
    assert list(gold_faults(list(samples.values()))) == [None] * 22
    assert reasons_of(found) == {"rows-1-22": "wrong_type"} and "rows-1-23" in samples


def test_a_table_of_more_rows_than_geometry3k_is_another_set(tmp_path: Path) -> None:
    """BUAADreamer/clevr_count_70k has the same fields."""
    row = {"images": "a.png", "problem": "<image>How many?", "answer": "3"}
    for count in (3302, 3303):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * count), tmp_path / f"{count}.parquet")
    _, form = GEOMETRY3K.forms
    assert len(list(form.rows(tmp_path / "3302.parquet"))) == 3302
    with pytest.raises(ConfigError, match="has more than 3302 rows"):
        list(form.rows(tmp_path / "3303.parquet"))


@pytest.mark.parametrize(
    ("gold", "answer", "wrong"),
    [
        (r"5 \sqrt { 2 }", r"5\sqrt{2}", "7.07"),
        (r"\frac { 5 } { 12 }", "5/12", "12/5"),
        (r"4 \pi", r"4\pi", "4"),
        (r"30 ^ { \circ }", "30", "60"),
        ("5 : 6", "5:6", "6:5"),
    ],
)
def test_spaced_latex_is_compared_as_mathematics(gold: str, answer: str, wrong: str) -> None:
    assert [compare(gold, one)[0] for one in (gold, answer, wrong)] == [1.0, 1.0, 0.0]


def dialogues(*conversations: Any) -> list[Sample | BadSample]:
    """The outcomes of dialogues of LLaVA-Video-178K."""
    row = ROWS["llava_video_178k"]
    return [one for turns in conversations for one in one_row(LLAVA_VIDEO_178K, row | {"conversations": turns})]


WHY, ARMY = "Why?\nA. to train\nB. to rest", "Why?\nA.U.S. Army\nB.NATO\nC. UN"


@pytest.mark.parametrize(
    ("question", "gold", "outcome"),
    [
        ("Why?\nOptions:\nA. to train\nB. to rest\nC. fun\nD. fear\nE. pay", "E. pay.", (5, "E")),
        ("Why?\n(A) to train\n(B) to rest", "(B)", (2, "B")), (WHY, "to rest", (2, "B")),
        ("Why?\nA.To train\n\nB.To rest\n", "B. to  rest", (2, "B")), ("Why?\nB. to rest\nA. to train", "A", (2, "A")),
        ("Which letter?\nA. B\nB. A", "A. B.", (2, "A")), ("Why?\nA. to train\nC. to rest", "To rest.", (2, "B")),
        ("Why?\nA. to train\nB. fun\nD. to rest", "D. to rest.", (3, "C")), (ARMY, "A.U.S. Army.", (3, "A")),
        (ARMY, "B.", (3, "B")),
        # what leaves doubt
        (WHY, "B. to train.", "ambiguous_answer"), (WHY, "B. nobody knows", "ambiguous_answer"),
        ("Which?\nA. B\nB. A", "A.", "ambiguous_answer"), ("Why?\nA. rest\nB. Rest.", "rest", "ambiguous_answer"),
        (WHY, "C.", "answer_not_in_options"), (WHY, "C. to eat", "answer_not_in_options"),
        (WHY, "<answer>B</answer>", "answer_not_in_options"), ("Why?\nA. to rest\nB. to rest", "A.", "bad_options"),
        ("Why?\nA. to train\nC. to rest", "A.", "bad_options"), ("Why?\nA. train\nC. rest", "to eat", "bad_options"),
        ("Why?\nA. rest\nB. Rest.\nD. fun", "rest", "bad_options"), ("Why?\nA. to train\nB.", "A.", "bad_options"),
        ("Why?\nA. to train\nC. to rest\nD. B and C", "to rest", "bad_options"), ("Why?\nA. so", "A.", "bad_options"),
        (f"{WHY}\nor sleep", "A.", "bad_options"), ("A. to train\nB. to rest", "A.", "empty_question"),
        ("Why? A. to train B. to rest", "A. to train", "too_few_options"), ("Why?", "to train", "too_few_options"),
    ],
)  # fmt: skip
def test_options_in_lines_and_gold_answers_in_any_spelling(question: str, gold: str, outcome: Any) -> None:
    (one,) = dialogues(dialogue(f"<image>\n{question}{LETTER}", gold))
    assert ((len(one.options), one.answer) if isinstance(one, Sample) else one.reason) == outcome


@pytest.mark.parametrize(
    ("question", "gold", "outcome"),
    [
        ("<image>\nWhat does she do?", "She stirs.", "free_form"), ("how many are there\n<image>", "3", "numerical"),
        ("<image>\nis he alone\nAnswer the question using a single word or phrase.", "No.", "yes_no"),
        ("<image>\nWhich number is on his shirt?", "07", "free_form"),
        ("<image>\nA.D. or B.C.?\nD.C. in the title?", "B.C. and D.C.", "free_form"),
        ("<image>\nWhat is seen?", "B.", "too_few_options"), ("<image>\nWhat is seen?", "B. a dog", "too_few_options"),
        ("<image>\nWhat is seen?", " ", "empty_answer"), ("<image>\nWhat?", "a </answer> tag", "no_answer_tag"),
        ("<image>\n", "a dog", "empty_question"), ("<image>\nIs <image> before?", "yes", "media_token_in_text"),
    ],
)  # fmt: skip
def test_open_questions_are_of_the_kind_that_grades_them_best_or_refused(
    question: str, gold: str, outcome: str
) -> None:
    (one,) = dialogues(dialogue(question, gold))
    assert (one.answer_kind if isinstance(one, Sample) else one.reason) == outcome
    assert isinstance(one, BadSample) or "<image>" not in one.question


def test_each_exchange_is_a_question_and_one_without_an_answer_costs_no_other() -> None:
    first = dialogue("<image>\nFirst?", "a dog")
    twice = [*first, {"from": "gpt", "value": "or a cat"}, *dialogue("Second?", "a bird")]
    found = dialogues([*first, *dialogue("Second?")], twice, [first[0]], [None, None], [{}, {}])
    assert [one.answer for one in found if isinstance(one, Sample)] == ["a dog", "a dog"]
    assert [one.reason for one in found if isinstance(one, BadSample)] == ["bad_dialogue"] * 6
    for odd in (None, [], {}, "text", 3, [first[0], {"from": "gpt", "value": 3}]):
        assert [one.reason for one in dialogues(odd) if isinstance(one, BadSample)] == ["wrong_type"]


def test_the_subset_of_a_row_is_the_folder_of_its_file_or_of_its_data_source(tmp_path: Path) -> None:
    folder = LLAVA_VIDEO_178K.forms[0].folder
    assert folder is not None
    row = {"data_source": "30_60_s_nextqa"}
    assert folder(row, tmp_path / "1_2_m_youtube_v0_1") == "1_2_m_youtube_v0_1"
    assert folder(row, tmp_path / "annotations") == "30_60_s_nextqa"
    for odd in ({"data_source": "../x"}, {"data_source": None}, {"data_source": "academic"}):
        assert folder(odd, tmp_path / "annotations") == "annotations"


def clocked(start: Any, end: Any, text: Any = "it") -> Row:
    return {"start": start, "end": end, "line": text}


def timed(start: Any, end: Any, text: Any = "it") -> Row:
    return {"timestamp": [start, end], "text": text}


@pytest.mark.parametrize(
    ("subtitle", "span"),
    [
        (clocked("00:16:41.500", "00:16:43"), (1.5, 3.0)),  # 1001.5 - 1000, 1003 - 1000
        (clocked("0:16:40.0", "0:16:50.0"), (0.0, 10.0)),
        (timed(1002, 1003.25), (2.0, 3.25)),
        (timed(999.0, 1000.5), (0.0, 0.5)),  # it began before the clip
        (timed(1059.0, 1070.0), (59.0, 70.0)),  # it goes on after it
        (timed(1030.0, None), (30.0, 60.0)),  # to the clip's end
        *((outside, None) for outside in (timed(900.0, 1000.0), timed(1060.0, 1061.0), timed(1061.0, None))),
        (clocked("00:00:01.000", "00:00:02.000"), None),
    ],
)
def test_times_of_subtitles_are_those_of_the_clip(subtitle: Row, span: tuple[float, float] | None) -> None:
    """Of a clip of one minute that begins 1,000 seconds into its video."""
    assert list(cues_of([subtitle], 1000.0, 60.0)) == ([] if span is None else [Cue(*span, "it")])


@pytest.mark.parametrize(
    "subtitle",
    [
        timed(2.0, 1.0), timed(None, 2.0), timed("1", 2.0), timed(True, 2.0), timed(1.0, float("nan")),
        timed(0, 10**400), timed(1.0, 2.0, None), clocked("1.5", "2.5"), clocked("00:00:02", "00:00:01"),
        clocked("00:00:01", "00:00:02", 7), clocked(1, 2), {"timestamp": [1.0], "text": "it"}, {}, None, "it",
    ],
)  # fmt: skip
def test_subtitles_of_another_form_are_refused(subtitle: Any) -> None:
    with pytest.raises(SampleError) as caught:
        list(cues_of([timed(0.0, 1.0), subtitle], 0.0, 60.0))
    assert caught.value.reason == "bad_subtitles"


@pytest.mark.parametrize(
    ("solution", "boxed"),
    [
        (r"first \boxed{1}, \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."), (r"\boxed {3}", "3"), (r"$\boxed 3$", "3"),
        (r"\fbox{4}", "4"), (r"\boxed{5", None), (r"\boxed{}", None), (r"\boxed", None), ("5", None),
    ],
)  # fmt: skip
def test_the_last_box_of_a_solution(solution: str, boxed: str | None) -> None:
    assert last_boxed(solution) == boxed


def test_the_last_boxes_of_the_real_solutions_are_the_answers(data_dir: Path) -> None:
    samples = kept(MATH, data_dir / "math500_test.jsonl")
    different = [one.answer for one in samples if (last_boxed(one.process) or "").strip() != one.answer]
    assert len(samples) == 500 and len({one.category for one in samples}) == 7
    assert len(different) < 5, "a few answers are written more simply than in the solution"


@pytest.mark.parametrize(
    ("gold", "kind"),
    [
        ("48", "numerical"), ("-1.5", "numerical"), ("1.06", "numerical"), ("1,249.24", "numerical"),
        ("3.429", "mathematics"), ("24/7", "mathematics"), ("Yes", "yes/no"), ("no", "yes/no"), ("A", "exact"),
        ("C. elegans", "exact"), ("84 g/mol", "exact"), ("['24/7', '3.429', '3.43]", "exact"), ("Yes, it is", "exact"),
        ("1e5", "exact"),
    ],
)  # fmt: skip
def test_open_answers_are_of_the_kind_that_grades_them_best(gold: str, kind: str) -> None:
    found = open_answer(f" {gold} ")
    assert found["problem_type"] == kind
    assert found["solution"] == f"<answer>{gold.lower() if kind == 'yes/no' else gold}</answer>"


def test_each_task_of_mvbench_has_its_folder_and_five_have_clips() -> None:
    clips = {"action_sequence", "action_prediction", "object_interaction", "action_localization", "episodic_reasoning"}
    assert len(FOLDERS) == 20
    for task, folder in FOLDERS.items():
        (sample,) = one_row(MVBENCH, ROWS["mvbench"] | {"task": task})
        assert isinstance(sample, Sample) and (sample.category, sample.details) == (task, {"task": task})
        clip = {"start": 10.2, "end": 24.8} if task in clips else {}
        rate = 3.0 if task == "episodic_reasoning" else None
        assert sample.media == (MediaRef("video", f"{folder}/ZS9XR.mp4", folder_fps=rate, **clip),)


@pytest.mark.parametrize("content", ['{"17": 3}', '["17"]', "{", '{"17": null}'])
def test_a_map_names_the_folders_of_nextqa_and_a_damaged_one_is_an_error(tmp_path: Path, content: str) -> None:
    rows = write_lines(tmp_path / "val.jsonl", [ROWS["nextqa"] | {"video": video} for video in (17, "18")])
    folders = tmp_path / "map_vid_vidorID.json"
    folders.write_text('{"17": "0101/17", "18": "1101/18"}')
    empty_files(tmp_path / "media", "0101/17.mp4")
    paths = [one.media[0].path for one in kept(NEXTQA, rows, root=tmp_path / "media")]
    assert paths == ["0101/17.mp4", "1101/18.mp4"]
    folders.write_text(content)
    with pytest.raises(ConfigError, match=r"map_vid_vidorID\.json' is no map of videos.*0101/2909445186.*remove it"):
        kept(NEXTQA, rows)


def cut_video(cut: Any, **metadata: Any) -> Sample | BadSample:
    row = ROWS["perception_test"]
    (one,) = one_row(PERCEPTION_TEST, row | {"cut": cut, "metadata": row["metadata"] | metadata})
    return one


@pytest.mark.parametrize(("rate", "cut"), [(30.0, 60), (29.97002997002997, 61), (25, 1), (15.0, 300)])
def test_no_frame_is_shown_from_the_cut_on_and_all_before_are(rate: float, cut: int) -> None:
    sample = cut_video(cut, frame_rate=rate)
    assert isinstance(sample, Sample) and sample.media[0].end is not None
    assert [frame for frame in range(400) if frame / rate <= sample.media[0].end] == list(range(cut))


@pytest.mark.parametrize(
    ("cut", "metadata", "outcome"),
    [
        (-1, {}, "B"), (300, {}, "B"), (300, {"num_frames": None}, "B"), (-1, {"frame_rate": None}, "B"),
        (None, {}, "unknown_cut"), (0, {}, "bad_cut"), (-2, {}, "bad_cut"), (301, {}, "bad_cut"), (30.5, {}, "bad_cut"),
        (True, {}, "bad_cut"), ([30], {}, "bad_cut"), (30, {"frame_rate": None}, "no_frame_rate"),
        (30, {"frame_rate": 0}, "no_frame_rate"), (30, {"frame_rate": "30"}, "no_frame_rate"),
    ],
)  # fmt: skip
def test_a_video_that_may_show_the_answer_is_refused(cut: Any, metadata: Row, outcome: str) -> None:
    one = cut_video(cut, **metadata)
    assert (one.answer if isinstance(one, Sample) else one.reason) == outcome


@pytest.mark.parametrize(
    ("maps", "split", "outcome"),
    [
        ({}, "valid", "no cut_frame_mapping_valid.json beside"),
        ({"train": {"video_1": -1}, "valid": {"video_2": -1}}, "valid", "no cut_frame_mapping_valid.json beside"),
        ({"train": {"video_1": 500}, "valid": {"video_1": -1}}, "valid", "B"),
        # Its metadata know better than the name of the file ("valid"), which says it where they do not.
        ({"train": {"video_1": -1}}, "train", "B"),
        ({"train": {"video_1": -1}}, "test", "no cut_frame_mapping_test.json beside"),
        ({"valid": {"video_1": -1}}, "validation", "B"),
        ({"valid": {"video_1": -1}}, None, "B"),
        ({"train": {"video_1": -1}}, None, "no cut_frame_mapping_valid.json beside"),
        ({"valid": {"video_1": -1}}, "odd", "neither metadata nor file name say the split"),
        ({"valid": {"video_1": -1}, "../valid": {"video_1": 60}}, "valid", "to be cut at -1 and 60"),
    ],
)
def test_a_video_is_cut_by_the_map_of_its_own_split(
    tmp_path: Path, maps: dict[str, Row], split: str | None, outcome: str
) -> None:
    question = {"metadata": {"split": split, "frame_rate": 30.0}, "mc_question": ROWS["perception_test"]["mc_question"]}
    path = write_json(tmp_path / "annotations" / "mc_question_valid.json", {"video_1": question})
    for name, cuts in maps.items():
        folder, _, own = name.rpartition("/")
        write_json(path.parent / folder / f"cut_frame_mapping_{own}.json", cuts)
    (one,) = outcomes(PERCEPTION_TEST, path)
    assert one.answer == outcome if isinstance(one, Sample) else outcome in one.message
    write_json(path.parent / "cut_frame_mapping_valid.json", ["video_1"])
    with pytest.raises(ConfigError, match=r"cut_frame_mapping_valid\.json"):
        outcomes(PERCEPTION_TEST, path)


def test_a_caption_is_judged_by_the_first_multi_choice_question_about_its_video_and_dimension(tmp_path: Path) -> None:
    question = {"question": "Caption it.\nGenerated Caption:", "answer": "A. up"}
    first, later = ({"question": f"{which}?\nA. up\nB. down", "answer": "A. up"} for which in ("Where", "Whither"))
    write_json(tmp_path / "multi-choice.json", {"1": {"direction": [first, later]}, "2": {"speed": [first]}})
    captions = {"1": {"direction": [question, question], "speed": [question]}, "2": {"order": [question]}}
    found = outcomes(TEMPCOMPASS, write_json(tmp_path / "captioning.json", captions))
    judged = {name: one.details["mc_question"] for name, one in samples_of(found).items()}
    assert judged == dict.fromkeys(("captioning_1_direction_1", "captioning_1_direction_2"), "Where?\nA. up\nB. down")
    assert reasons_of(found) == dict.fromkeys(("captioning_1_speed_1", "captioning_2_order_1"), "no_mc_question")


@pytest.mark.parametrize("folder", ["", "Video-MME/", "videomme/", None])
def test_a_record_names_the_subtitles_of_its_video_where_they_exist(folder: str | None, tmp_path: Path) -> None:
    path = f"{folder}subtitle/{mme.FIRST}.srt"
    empty_files(tmp_path, path if folder is not None else "subtitle/other.srt")
    reader = RowReader(VIDEO_MME, VIDEO_MME.forms[0], MediaFinder(tmp_path, VIDEO_MME))
    (sample,) = reader.samples(ROWS["video_mme"], "1", "1")
    assert isinstance(sample, Sample) and sample.media[0].subtitles == (path if folder is not None else "")


def test_subtitles_fetched_after_a_killed_run_are_taken_and_records_without_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else of the run is in doubt: all videos are there."""
    files = dict(mme.CASES["as the archives unpack"].files) | {mme.TABLE: mme.ROWS[:3]}
    path = f"subtitle/{mme.FIRST}.srt"
    lay_out(tmp_path / "raw", {name: content for name, content in files.items() if name != path})
    arguments = [str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--workers", "1"]
    killed(video_mme.main, arguments)
    lay_out(tmp_path / "raw", {path: files[path]})
    assert video_mme.main(arguments) == 0
    samples = open_records(Path(f"{tmp_path / 'out'}:eval"))[0]
    assert [one.media[0].subtitles for one in samples] == [path, path, ""]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["without_subtitles"] == 1
    assert "kept          1  of them have no subtitles" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["video_mmmu_adaptation.json", "Adaptation/test.json", "x/z.json"])
def test_the_name_of_the_file_or_its_folder_tells_the_track(tmp_path: Path, name: str) -> None:
    row = {key: value for key, value in ROWS["video_mmmu"].items() if key != "track"}
    (one,) = outcomes(VIDEO_MMMU, write_json(tmp_path / "x" / name, [row]))
    if name == "x/z.json":
        assert isinstance(one, BadSample) and "Files of Perception, Comprehension, Adaptation" in one.message
    else:
        assert isinstance(one, Sample)
        assert (one.sample_id, one.category) == ("Adaptation_validation_Math_2", "Adaptation")
