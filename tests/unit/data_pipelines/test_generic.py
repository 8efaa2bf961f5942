"""A map of fields makes records of any rows: every conversion by example, wrong maps and odd rows refused."""

from __future__ import annotations

import csv
import io
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from data_pipelines import generic
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.hub import fetch
from data_pipelines.generic import dataset_of
from tests.support.pipeline_rows import check_odd_rows, example, one_row, outcomes, parted, write_lines
from vlm_pg.data.fields import Unreadable
from vlm_pg.errors import ConfigError
from vlm_pg.types import BadSample, MediaRef, Sample

NAN = float("nan")
OPTIONS = ("A. a car", "B. a dog")
ROW = {
    "question": "<image>\nWhat moves?\nAnswer with the letter.", "kind": "mc", "a0": "a car", "a1": "a dog", "label": 1,
    "video_id": 7, "metadata": {"task": "motion"}, "clip": {"start": "2.5"},
}  # fmt: skip
FIELDS: dict[str, Any] = {
    "problem": {"field": "question", "remove": ["<image>", "Answer with the letter."]},
    "data_type": {"constant": "video"},
    "problem_type": {"field": "kind", "names": {"mc": "multiple choice", "open": "free-form"}},
    "options": {"columns": ["a0", "a1"]},
    "answer": {"field": "label", "given_as": "index"},
    "path": {"field": "video_id", "prefix": "videos/", "suffix": ".mp4"},
}
QUESTION = {
    "problem": "q", "data_type": {"constant": "text"}, "problem_type": {"constant": "multiple choice"},
    "options": "options", "answer": "answer",
}  # fmt: skip


def mapped(folder: Path, fields: dict[str, Any], **beside: Any) -> DataSet:
    file = folder / "map.yaml"
    file.write_text(yaml.safe_dump({"name": "my_set", "fields": fields, **beside}))
    return dataset_of(file)


def answer_to(folder: Path, row: dict[str, Any], **changes: Any) -> str:
    """The gold answer, or why there is none."""
    (one,) = one_row(mapped(folder, QUESTION | changes), {"q": "Which?", **row})
    return one.answer if isinstance(one, Sample) else one.reason


def test_the_map_of_the_docstring_and_its_example(tmp_path: Path) -> None:
    text = (generic.__doc__ or "").partition("    name: my_set\n")[2].partition("\n\n")[0]
    (tmp_path / "map.yaml").write_text("    name: my_set\n" + text)
    (sample,) = one_row(dataset_of(tmp_path / "map.yaml"), ROW | {"a2": None, "a3": ""})
    video = MediaRef("video", "videos/7.mp4", start=2.5)
    expected = Sample("rows-1", "What moves?", (video,), OPTIONS, "B", "multiple_choice", "my_set", "motion")
    assert isinstance(sample, Sample) and replace(sample, where="") == expected
    (plain,) = one_row(mapped(tmp_path, FIELDS), ROW)
    assert isinstance(plain, Sample) and replace(plain, where="") == example(generic)


@pytest.mark.parametrize(
    ("question", "remove", "video", "kept"),
    [
        ("<video>\nWhat moves?", [], 7, "<video>\nWhat moves?"),
        ("What moves in <video>?", ["<image>"], 7, "What moves in <video>?"),
        ("<video>\nWhat moves?", ["<video>"], 7, "What moves?"),
        # another kind stays in the text, or more marks than media, or none of the media
        ("<image>\nWhat moves?", [], 7, "'<image>' 1 time(s), and the record names 0 image(s)"),
        ("<video><video>\nWhat moves?", [], 7, "'<video>' 2 time(s), and the record names 1 video(s)"),
        ("<image><image>\nWhat moves?", ["<image>"], 7, "2 mark(s) (<image> or <video>) are removed"),
        ("<image>\nIs <image> a car?", ["<image>"], 7, "'<image>' 1 time(s), and the record names 0 image(s)"),
        ("<image>\nWhat moves?", ["<image>"], None, "1 mark(s) (<image> or <video>) are removed"),
    ],
)
def test_marks_stay_as_many_as_the_media(
    tmp_path: Path, question: str, remove: list[str], video: int | None, kept: str
) -> None:
    problem = {"problem": {"field": "question", "remove": remove}}
    kind = {"data_type": {"constant": "text"}} if video is None else {}
    (one,) = one_row(mapped(tmp_path, FIELDS | problem | kind), ROW | {"question": question, "video_id": video})
    if isinstance(one, Sample):
        assert one.question == kept
    else:
        assert one.reason == "media_mark_without_medium" and kept in one.message


@pytest.mark.parametrize("given", [{"constant": 3}, "rate"])
def test_videos_that_are_folders_of_pictures(tmp_path: Path, given: Any) -> None:
    """A table may hold the rate as a text, as it may a time."""
    path = {"field": "video_id", "prefix": "frames/"}
    (sample,) = one_row(mapped(tmp_path, FIELDS | {"path": path, "folder_fps": given}), ROW | {"rate": "3.0"})
    assert isinstance(sample, Sample) and sample.media == (MediaRef("video", "frames/7", folder_fps=3.0),)


def forms_of(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """The same rows in every form."""
    flat = [{name: value for name, value in row.items() if not isinstance(value, dict)} for row in rows]
    paths = [
        folder / "rows.json",
        write_lines(folder / "rows.jsonl", flat),
        folder / "rows.csv",
        folder / "rows.parquet",
    ]
    paths[0].write_text(json.dumps(flat))
    with paths[2].open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), paths[3])
    datasets.Dataset.from_list(flat).save_to_disk(str(folder / "saved"))
    return [*paths, folder / "saved"]


def test_every_form_gives_the_same_records(tmp_path: Path) -> None:
    dataset = mapped(tmp_path, FIELDS)
    rows = [ROW, ROW | {"label": 2}, ROW | {"kind": "essay"}, ROW | {"kind": "open", "label": "it runs"}]
    rows = [{**row, "label": str(row["label"])} for row in rows]
    (tmp_path / "media" / "videos").mkdir(parents=True)
    (tmp_path / "media" / "videos" / "7.mp4").write_bytes(b"")
    for path in forms_of(tmp_path, rows):
        samples, refused = parted(dataset, path, root=tmp_path / "media")
        found = [(one.question, one.options, one.answer, one.answer_kind, one.media) for one in samples]
        media = (MediaRef("video", "videos/7.mp4"),)
        assert found == [
            ("What moves?", OPTIONS, "B", "multiple_choice", media),
            ("What moves?", OPTIONS, "it runs", "free_form", media),
        ], path
        assert [one.reason for one in refused] == ["answer_not_in_options", "unknown_value"], path


def test_an_object_of_rows_one_file_a_row_and_lists_of_questions(tmp_path: Path) -> None:
    fields = {**QUESTION, "problem_id": "video"}
    row = {"q": "Which?", "options": ["x", "y"], "answer": "y"}
    keyed = tmp_path / "keyed.json"
    keyed.write_text(json.dumps({"v1": row, "v2": {**row, "answer": "x"}, "v3": 3}))
    samples, refused = parted(mapped(tmp_path, fields, keyed_by="video"), keyed)
    assert [(one.sample_id, one.answer) for one in samples] == [("v1", "B"), ("v2", "A")]
    assert [one.reason for one in refused] == ["not_a_record"]
    one_file = tmp_path / "one.json"
    one_file.write_text(json.dumps(row))
    (sample,), _ = parted(mapped(tmp_path, QUESTION, file_is_row=True), one_file)
    assert (sample.sample_id, sample.answer) == ("one-1", "B")
    nested = write_lines(
        tmp_path / "nested.jsonl", [{"q": "not this", "items": [row, {**row, "answer": "x"}, 3]}, {"items": {}}]
    )
    samples, refused = parted(mapped(tmp_path, QUESTION, questions="items"), nested)
    assert [(one.sample_id, one.question, one.answer) for one in samples] == [
        ("nested-1-1", "Which?", "B"),
        ("nested-1-2", "Which?", "A"),
    ]
    assert [(one.sample_id, one.reason) for one in refused] == [
        ("nested-1-3", "not_a_record"),
        ("nested-2", "wrong_type"),
    ]


def test_lists_of_objects_that_a_table_holds_field_by_field(tmp_path: Path) -> None:
    row = {"q": "Which?", "options": ["x", "y"], "answer": "y"}
    nested = write_lines(tmp_path / "nested.jsonl", [{"items": {name: [value] * 2 for name, value in row.items()}}])
    samples, refused = parted(mapped(tmp_path, QUESTION, questions="items"), nested)
    assert not refused
    assert [(one.sample_id, one.answer) for one in samples] == [("nested-1-1", "B"), ("nested-1-2", "B")]
    dialogue = {"from": ["human", "gpt"], "value": ["Which?", "y"]}
    fields = {**QUESTION, "problem": "dialogue.0.value", "answer": "dialogue.1.value"}
    (sample,) = one_row(mapped(tmp_path, fields), {"dialogue": dialogue, "options": ["x", "y"]})
    assert isinstance(sample, Sample) and (sample.question, sample.answer) == ("Which?", "B")
    (sample,) = one_row(
        mapped(tmp_path, {**fields, "answer": "dialogue.value.1"}), {"dialogue": dialogue, "options": ["x", "y"]}
    )
    assert isinstance(sample, Sample) and sample.answer == "B"
    numbered = {**QUESTION, "problem": "dialogue.0.0"}
    (sample,) = one_row(mapped(tmp_path, numbered), {**row, "dialogue": {"0": ["Which?"], "1": ["y"]}})
    assert isinstance(sample, Sample) and sample.question == "Which?"


@pytest.mark.parametrize(
    ("given_as", "answer", "gold"),
    [
        ("letter", "B", "B"), ("letter", "(b)", "B"), ("letter", "B.", "B"), ("letter", "C", "answer_not_in_options"),
        ("letter", "B. y", "answer_not_in_options"), ("index", 1, "B"), ("index", "1", "B"), ("index", 1.0, "B"),
        ("index", 2, "answer_not_in_options"), ("index", -1, "answer_not_in_options"), ("index", True, "wrong_type"),
        ("index from 1", 1, "A"), ("index from 1", 0, "answer_not_in_options"), ("text", "y", "B"),
        ("text", "B", "answer_not_in_options"), ("written", "y", "B"), ("written", "B", "B"), ("written", "B. y", "B"),
        ("written", "z", "answer_not_in_options"), ("written", 1, "answer_not_in_options"),
        ("tagged", "so <answer>B</answer>", "B"), ("tagged", "<answer>B</answer>, yes, <answer> B</answer>", "B"),
        ("tagged", "<answer>A</answer>, no: <answer>B</answer>", "ambiguous_answer"), ("tagged", "B", "no_answer_tag"),
        ("tagged", "<answer>B", "no_answer_tag"), ("tagged", "B</answer>", "no_answer_tag"),
        ("tagged", "<answer>B</answer></answer>", "no_answer_tag"), ("tagged", "</answer>B<answer>", "no_answer_tag"),
        ("tagged", "<answer><answer>B</answer></answer>", "no_answer_tag"),
        ("letter", None, "no_gold_answer"), ("letter", ["B"], "wrong_type"),
    ],
)  # fmt: skip
def test_how_an_answer_names_its_option(tmp_path: Path, given_as: str, answer: Any, gold: str) -> None:
    source = {"field": "answer", "given_as": given_as}
    for options in (["x", "y"], ["A. x", "B. y"], ["(A) x", "(B) y"]):
        if options[0] != "x" and given_as == "written" and answer == "B. y":
            continue
        assert answer_to(tmp_path, {"options": options, "answer": answer}, answer=source) == gold


@pytest.mark.parametrize(
    ("options", "answer", "gold"),
    [
        (["1", "0"], "1", "ambiguous_answer"),
        ([3, 1, 2], 1, "ambiguous_answer"),
        ([30, 10], 10, "B"),
        (["B", "A"], "A", "ambiguous_answer"),
        (["x", "x"], "x", "bad_options"),
        (["x", "y", NAN], "y", "wrong_type"),
        (["x", "y", float("inf")], "y", "wrong_type"),
        ([1, 2.5], 2.5, "B"),
        (["B. x", "A. y"], "A", "bad_options"),
    ],
)
def test_an_answer_that_can_be_read_in_two_ways_is_refused(
    tmp_path: Path, options: list[Any], answer: Any, gold: str
) -> None:
    assert answer_to(tmp_path, {"options": options, "answer": answer}) == gold


@pytest.mark.parametrize(
    ("given_as", "answer", "gold"),
    [
        ("letter", ["C", "A"], "A, C"), ("letter", "C,A", "A, C"), ("index", [2, 0], "A, C"),
        ("text", ["z", "x"], "A, C"), ("letter", [], "no_gold_answer"), ("letter", ["D"], "answer_not_in_options"),
        ("index", [1, 1], "answer_not_in_options"), ("tagged", "so <answer>C, A</answer>", "A, C"),
    ],
)  # fmt: skip
def test_several_right_options(tmp_path: Path, given_as: str, answer: Any, gold: str) -> None:
    row = {"options": ["x", "y", "z"], "answer": answer}
    several = {"problem_type": {"constant": "multiple select"}, "answer": {"field": "answer", "given_as": given_as}}
    assert answer_to(tmp_path, row, **several) == gold


@pytest.mark.parametrize(
    ("options", "given_as", "answer", "gold"),
    [
        (["E. coli", "S. aureus", "B. subtilis"], "letter", "B", "B"),
        (["E. coli", "S. aureus", "B. subtilis"], "index", 2, "C"),
        (["E. coli", "S. aureus", "B. subtilis"], "text", "B. subtilis", "C"),
        (["E. coli", "yeast"], "index", 0, "A"),
        (["A.M.", "P.M."], "index", 1, "B"),
        (["A. x", "C. y"], "index", 1, "bad_options"),
        (["A. x", "C. y"], "letter", "C", "bad_options"),
        (["A. x", "C. y"], "written", "C", "bad_options"),
        (["A. x", "C. y"], "text", "y", "B"),
        (["A. x", "B. z", "D. y"], "written", "D. y", "C"),
        (["A. x", "B. z", "D. y"], "tagged", "<answer>y</answer>", "C"),
        (["A.U.S. Army", "B.NATO"], "text", "U.S. Army", "A"),
        (["A.U.S. Army", "B.NATO"], "letter", "A", "A"),
        (["A.U.S. Army", "B.NATO"], "index", 1, "B"),
        (["D. w", "A. x", "B. y", "C. z"], "index", 0, "D"),
        (["D. w", "A. x", "B. y", "C. z"], "text", "x", "A"),
        (["D. w", "A. x", "B. y", "C. z"], "letter", "C", "C"),
        (["C", "D"], "letter", "C", "answer_not_in_options"),
        (["B", "A"], "letter", "A", "A"),
        (["B", "A"], "index", 1, "B"),
        (["B", "A"], "text", "A", "B"),
        ([".5", "5", "50"], "text", "5", "B"),
        ([".5", "5", "50"], "text", ".5", "A"),
        (["A. .5", "B. 5"], "text", ".5", "A"),
        ([".5", ".25"], "text", "5", "answer_not_in_options"),
        (["(x)", ": y"], "text", ": y", "B"),
    ],
)
def test_letters_at_the_start_of_option_texts_are_not_labels(
    tmp_path: Path, options: list[str], given_as: str, answer: Any, gold: str
) -> None:
    source = {"field": "answer", "given_as": given_as}
    assert answer_to(tmp_path, {"options": options, "answer": answer}, answer=source) == gold


@pytest.mark.parametrize(
    ("columns", "answer", "gold"),
    [
        (("x", "y", "z", NAN), 0, "A"),
        (("x", "y", NAN, None), 1, "B"),
        (("x", "y", float("inf"), " "), 1, "B"),
        (("x", "y", "z", NAN), 3, "answer_not_in_options"),
        (("x", NAN, "z", "w"), 0, "wrong_type"),
        (("x", "nan", "None", "NA"), 3, "D"),
    ],
)
def test_a_column_without_a_number_holds_no_option(
    tmp_path: Path, columns: tuple[Any, ...], answer: int, gold: str
) -> None:
    """NaN is what json.dumps writes of an empty cell of a table."""
    names = ["a0", "a1", "a2", "a3"]
    source = {"options": {"columns": names}, "answer": {"field": "answer", "given_as": "index"}}
    row = dict(zip(names, columns, strict=True))
    assert answer_to(tmp_path, {**row, "answer": answer}, **source) == gold


@pytest.mark.parametrize("answer", ["use </answer> then more", "<answer>x</answer>", "x</answer> or <answer>y"])
def test_an_answer_that_holds_tags_is_refused_not_cut(tmp_path: Path, answer: str) -> None:
    row = {"options": [], "answer": answer}
    assert answer_to(tmp_path, row, problem_type={"constant": "free-form"}) == "no_answer_tag"


@pytest.mark.parametrize(("first", "given_as"), [(0, "index"), (1, "index from 1")])
def test_the_refusal_shows_the_number_that_was_given(tmp_path: Path, first: int, given_as: str) -> None:
    dataset = mapped(tmp_path, QUESTION | {"answer": {"field": "answer", "given_as": given_as}})
    (one,) = one_row(dataset, {"q": "Which?", "options": ["x", "y"], "answer": 3})
    expected = f"the answer is '3'. The number of an option, {first} to {first + 1}, is expected"
    assert isinstance(one, BadSample) and one.message.startswith(expected)


@pytest.mark.parametrize(
    ("value", "name"),
    [(1.0, "1"), (2, "2"), (" 3 ", "3"), (0, "0"), (-1.0, "-1"), (1.5, "wrong_type"), (NAN, "wrong_type")],
)
def test_whole_numbers_are_names(tmp_path: Path, value: Any, name: str) -> None:
    row = {"q": "Which?", "options": ["x", "y"], "answer": "y", "id": "7", "kind": "k"}
    (one,) = one_row(mapped(tmp_path, QUESTION | {"problem_id": "id"}), row | {"id": value})
    assert (one.sample_id.strip() if isinstance(one, Sample) else one.reason) == name
    (one,) = one_row(mapped(tmp_path, QUESTION | {"category": "kind"}), row | {"kind": value})
    assert (one.category.strip() if isinstance(one, Sample) else one.reason) == name


def test_empty_values_spaces_and_names_with_points(tmp_path: Path) -> None:
    kinds = {"problem_type": {"field": "kind"}, "data_source": "source", "category": "metadata.task"}
    dataset = mapped(tmp_path, QUESTION | kinds)
    row = {"q": "Which?", "options": [" x", "y "], "answer": " y", "kind": "multiple choice", "source": None}
    (sample,) = one_row(dataset, row | {"metadata.task": "colour"})
    assert isinstance(sample, Sample) and (sample.options, sample.answer) == (("A. x", "B. y"), "B")
    assert (sample.source, sample.category) == ("my_set", "colour")
    for options in (None, "", []):
        (sample,) = one_row(
            dataset, row | {"metadata": {"task": "t"}, "options": options, "kind": "exact", "source": "s"}
        )
        assert isinstance(sample, Sample) and (sample.options, sample.source, sample.category) == ((), "s", "t")
    assert answer_to(tmp_path, {"options": ["x", "y"]}, answer={"constant": 0, "given_as": "index"}) == "A"


def test_values_that_cannot_be_read_are_refused_as_such(tmp_path: Path) -> None:
    for name in ("question", "a0", "label", "video_id", "kind"):
        (one,) = one_row(mapped(tmp_path, FIELDS), ROW | {name: Unreadable("a text that is not UTF-8")})
        assert isinstance(one, BadSample) and one.reason == "unreadable_value", name


def test_options_as_one_text_in_the_question_and_constant(tmp_path: Path) -> None:
    assert answer_to(tmp_path, {"o": "x|y", "answer": "y"}, options={"field": "o", "separator": "|"}) == "B"
    assert answer_to(tmp_path, {"answer": "no"}, options={"constant": ["yes", "no"]}) == "B"
    in_question = mapped(tmp_path, QUESTION | {"options": {"in_question": True}})
    (sample,) = one_row(in_question, {"q": "Which?\nOptions:\n(A) x\n(B) y", "answer": "B"})
    assert isinstance(sample, Sample)
    assert (sample.question, sample.options, sample.answer) == ("Which?", ("A. x", "B. y"), "B")
    for question in (
        "Which?\nA. x\nC. y",
        "Which?\nA. x\nand\nB. y",
        "Which?\nOptions:\nnone",
        "Options:\nA. x\nor\nB. y",
    ):
        (refused,) = one_row(in_question, {"q": question, "answer": "B"})
        assert isinstance(refused, BadSample) and refused.reason == "bad_options"


def test_values_of_other_types_are_named(tmp_path: Path) -> None:
    fields = {
        "problem": "q", "data_type": {"constant": "text"}, "problem_type": {"constant": "yes/no"},
        "answer": "word", "category": {"field": "hard", "names": {True: "hard", False: "easy"}},
    }  # fmt: skip
    dataset = mapped(tmp_path, fields)
    found = [one_row(dataset, {"q": "Is it?", "word": "yes", "hard": hard})[0] for hard in (True, False, None, "True")]
    assert [one.category if isinstance(one, Sample) else one.reason for one in found] == [
        "hard", "easy", "unknown_value", "hard",
    ]  # fmt: skip


def test_several_media_a_clip_and_conversations(tmp_path: Path) -> None:
    fields = {
        "problem": "turns.0.value", "data_type": "kinds", "problem_type": {"constant": "numerical"},
        "answer": "turns.1.value", "path": {"field": "files", "prefix": "media/"}, "start": "from", "end": "to",
    }  # fmt: skip
    row = {
        "turns": [{"value": "How many?"}, {"value": 3}], "kinds": ["video", "image"], "files": ["a.mp4", "b.jpg"],
        "from": [1, None], "to": [2.5, None],
    }  # fmt: skip
    (sample,) = one_row(mapped(tmp_path, fields), row)
    assert isinstance(sample, Sample) and (sample.question, sample.answer) == ("How many?", "3")
    assert sample.media == (MediaRef("video", "media/a.mp4", 1.0, 2.5), MediaRef("image", "media/b.jpg"))
    (refused,) = one_row(mapped(tmp_path, fields), row | {"turns": [{"value": "How many?"}]})
    assert isinstance(refused, BadSample) and refused.reason == "missing_field" and "turns.1.value" in refused.message


def test_odd_rows_are_refused(tmp_path: Path) -> None:
    refused = dict(check_odd_rows(mapped(tmp_path, FIELDS | {"start": "clip.start", "category": "metadata.task"}), ROW))
    assert {f"without {name}" for name in ROW} <= set(refused), "no field that the map names may be left out"
    assert refused["a0=[]"].reason == refused["video_id=True"].reason == "wrong_type"
    dataset = mapped(tmp_path, QUESTION, questions="items")
    check_odd_rows(dataset, {"items": [{"q": "Which?", "options": ["x", "y"], "answer": "y"}]})
    check_odd_rows(mapped(tmp_path, QUESTION), {"q": "Which?", "options": ["x", "y"], "answer": "y"})
    check_odd_rows(
        mapped(tmp_path, QUESTION | {"options": {"in_question": True}}), {"q": "Which?\nA. x\nB. y", "answer": "B"}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": {**QUESTION, "anwser": "a"}}, r"fields\.anwser is not a known key\. Did you mean fields\.answer"),
        ({"feilds": {}}, r"feilds is not a known key\. Did you mean fields\?"),
        ({"fields": {**QUESTION, "answer": {"field": "a", "given": "index"}}}, r"given is not a known key.*given_as\?"),
        ({"fields": {**QUESTION, "answer": {"field": "a", "given_as": "number"}}}, r"given_as is 'number'.*'letter'"),
        ({"fields": {**QUESTION, "problem_type": {"constant": "essay"}}}, r"'essay'\. One of multiple choice,.*/no"),
        ({"fields": {**QUESTION, "problem_type": {"field": "k", "names": {"m": "essay"}}}}, r"'essay'\. One of"),
        ({"fields": {**QUESTION, "answer": {"field": "a", "constant": "b"}}}, r"give one of field, constant"),
        ({"fields": {**QUESTION, "options": {"separator": ","}}}, r"no source; give one of field, constant, col"),
        ({"fields": {"problem": "q"}}, r"has no problem_type, answer; give problem, problem_type and answer, prob"),
        ({"files": {"test": ["a"]}}, r"files\.test.*'train' or 'eval'"),
        ({"name": "a/b"}, r"name is 'a/b'"),
        ({"keyed_by": "v", "file_is_row": True}, r"gives file_is_row and keyed_by.*Leave one out"),
    ],
)  # fmt: skip
def test_wrong_maps_are_clear_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "map.yaml"
    file.write_text(yaml.safe_dump({"name": "my_set", "fields": QUESTION} | changes))
    with pytest.raises(ConfigError, match=message):
        dataset_of(file)


def test_a_map_is_read_by_the_safe_loader(tmp_path: Path) -> None:
    file = tmp_path / "map.yaml"
    file.write_text("name: !!python/object/apply:os.getcwd []\nfields: {}\n")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        dataset_of(file)


def test_a_file_without_the_fields_of_the_map_is_a_clear_error(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"question": "q"}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: the row has no q, answer, options"):
        parted(mapped(tmp_path, QUESTION), rows)


def test_the_description_can_go_to_other_processes_and_names_its_map(tmp_path: Path) -> None:
    dataset = mapped(tmp_path, FIELDS, media_folders=["clips"])
    assert dataset.described_in == (tmp_path / "map.yaml",) and dataset.media == ("clips",)
    (form,) = pickle.loads(pickle.dumps(dataset)).forms
    assert form.to_record({**ROW, "label": "0"})["solution"] == "<answer>A</answer>"
    assert mapped(tmp_path, QUESTION).media is None
    assert dataset.forms[0].files["train"][:2] == (".:train", "train.json")


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), "red").save(file, "png")
    return file.getvalue()


def test_a_data_set_that_the_package_loads_is_copied_and_read(tmp_path: Path) -> None:
    """A local data set of an image folder stands for one of the hub: the package loads both."""
    source = tmp_path / "source" / "train"
    source.mkdir(parents=True)
    rows = [{"file_name": f"{name}.png", "q": f"Which {name}?", "answer": "red"} for name in ("one", "two")]
    for row in rows:
        (source / row["file_name"]).write_bytes(png())
    write_lines(source / "metadata.jsonl", rows)
    split = fetch(str(tmp_path / "source"), None, "train", tmp_path / "raw")
    assert split == tmp_path / "raw:train"
    fields = {
        "problem": "q", "data_type": {"constant": "image"}, "problem_type": {"constant": "exact"}, "answer": "answer",
        "path": "image",
    }  # fmt: skip
    samples, refused = parted(mapped(tmp_path, fields), split, root=tmp_path / "media")
    assert [one.question for one in samples] == ["Which one?", "Which two?"] and not refused
    (path,) = {one.media[0].path for one in samples}
    assert path.startswith("unpacked/") and (tmp_path / "media" / path).read_bytes() == png()
    shard = tmp_path / "raw" / "train-00000-of-00001.parquet"
    before = shard.stat().st_mtime_ns
    fetch(str(tmp_path / "source"), None, "train", tmp_path / "raw")
    assert shard.stat().st_mtime_ns == before, "what is there is not fetched again"
    with pytest.raises(ConfigError, match=r"Split 'test' of data set .*cannot be fetched.*Correct --hub"):
        fetch(str(tmp_path / "source"), None, "test", tmp_path / "raw")
    assert [path.name for path in (tmp_path / "raw").iterdir() if not path.name.startswith(".")] == [shard.name]


def test_rows_without_media_are_copied_as_they_are(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "source" / "train.jsonl", [{"q": "Which?", "options": ["x", "y"], "answer": "y", "n": {"a": [1]}}]
    )
    samples, _ = parted(mapped(tmp_path, QUESTION), fetch(str(tmp_path / "source"), None, "train", tmp_path / "raw"))
    assert [(one.options, one.answer) for one in samples] == [(("A. x", "B. y"), "B")]


def prepared_with(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command is called with."""
    calls: list[Any] = []
    monkeypatch.setattr(generic, "prepare", lambda dataset, _, argv, *__: calls.append((dataset.name, list(argv))) or 0)
    return calls


def test_arguments_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = prepared_with(monkeypatch)
    mapped(tmp_path, QUESTION)
    map_file = str(tmp_path / "map.yaml")
    assert generic.main(["--map", map_file, "--train", "a.csv", "--out", "o"]) == 0
    write_lines(tmp_path / "source" / "train.jsonl", [{"q": "Which?"}])
    hub = ["--hub", str(tmp_path / "source"), "--hub-folder", str(tmp_path / "raw")]
    with pytest.raises(ConfigError, match=r"downloads a data set\. --allow-hub"):
        generic.main(["--map", map_file, *hub, "--out", "o"])
    assert not (tmp_path / "raw").exists(), "nothing is fetched without leave"
    assert generic.main(["--map", map_file, *hub, "--allow-hub", "--out", "o"]) == 0
    assert calls == [("my_set", ["--train", "a.csv", "--out", "o"]), ("my_set", [str(tmp_path / "raw"), "--out", "o"])]
    with pytest.raises(ConfigError, match=r"--map is missing.*--help"):
        generic.main(["--out", "o"])
    assert generic.main(["--help"]) == 0 and calls[-1] == ("generic", ["--help"])


@pytest.mark.parametrize(
    ("given_as", "kind", "found"),
    [
        ("index", "multiple choice", ["A", "B", "no_gold_answer"]),
        ("index from 1", "multiple choice", ["answer_not_in_options", "A", "no_gold_answer"]),
        ("text", "multiple choice", ["B", "A", "no_gold_answer"]),
        ("written", "exact", ["dog", "cat", "no_gold_answer"]),
    ],
)
def test_a_class_is_its_name_but_where_the_map_asks_for_its_number(
    tmp_path: Path, given_as: str, kind: str, found: list[str]
) -> None:
    features = datasets.Features(
        {
            "q": datasets.Value("string"),
            "options": datasets.List(datasets.Value("string")),
            "answer": datasets.ClassLabel(names=["dog", "cat"]),
        }
    )
    options = ["cat", "dog"] if kind == "multiple choice" else []
    rows = [{"q": "Which?", "options": options, "answer": number} for number in (0, 1, -1)]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    answer = {"field": "answer", "given_as": given_as}
    dataset = mapped(tmp_path, QUESTION | {"problem_type": {"constant": kind}, "answer": answer})
    outcomes_found = outcomes(dataset, tmp_path / "saved")
    assert [one.answer if isinstance(one, Sample) else one.reason for one in outcomes_found] == found


MEDIA_FIELDS: dict[str, Any] = {
    "problem": "q", "problem_type": {"constant": "free-form"}, "answer": "a",
    "video": {"field": "clip", "suffix": ".mp4"}, "image": "pictures", "start": "from",
}  # fmt: skip


def test_rows_of_images_and_rows_of_videos_in_one_file(tmp_path: Path) -> None:
    """JSON lines have only what a row has: an image neither a video's field nor a time in it."""
    rows = [
        {"q": "Who?", "a": "Ann", "clip": 7, "from": 2.5},
        {"q": "What?", "a": "a dog", "pictures": "a.png"},
        {"q": "Which?", "a": "both", "pictures": ["a.png", "b.png"], "clip": None},
        {"q": "Where?", "a": "here", "pictures": "a.png", "clip": "8", "from": [1, None]},
        {"q": "Who?", "a": "Bob", "clip": 9},
        {"q": "What?", "a": "a cat", "pictures": []},
        {"q": "What?", "a": "a cat"},
    ]
    samples, refused = parted(mapped(tmp_path, MEDIA_FIELDS), write_lines(tmp_path / "rows.jsonl", rows))
    image = MediaRef("image", "a.png")
    assert [one.media for one in samples] == [
        (MediaRef("video", "7.mp4", start=2.5),),
        (image,),
        (image, MediaRef("image", "b.png")),
        (MediaRef("video", "8.mp4", start=1.0), image),
    ]
    assert [(one.sample_id, one.reason) for one in refused] == [
        (f"rows-{row}", "missing_field") for row in (5, 6, 7)
    ]  # a video without the time that the map names, and rows that may have lost their media
    assert "the row has no 'from', which the map names" in refused[0].message
    assert "nothing under 'clip' or 'pictures'" in refused[1].message


def test_rows_of_several_types_lack_what_their_type_has_not(tmp_path: Path) -> None:
    fields = {**FIELDS, "data_type": "type", "path": "path", "end": "clip.end", "subtitles": "subtitles"}
    row = {key: ROW[key] for key in ("question", "kind", "a0", "a1", "label")} | {"question": "What moves?"}
    rows = [
        {**row, "type": "video", "path": "a.mp4", "clip": {"end": 3}, "subtitles": "a.srt"},
        {**row, "type": "image", "path": "a.png"},
        {**row, "type": "text"},
        {**row, "type": "video", "path": "a.mp4", "subtitles": "a.srt"},
        {**row, "type": "image"},
        {**row, "type": "image", "path": "a.png", "clip": {"end": 3}},
    ]
    samples, refused = parted(mapped(tmp_path, fields), write_lines(tmp_path / "rows.jsonl", rows))
    assert [one.media for one in samples] == [
        (MediaRef("video", "a.mp4", end=3.0, subtitles="a.srt"),), (MediaRef("image", "a.png"),), ()
    ]  # fmt: skip
    assert [one.reason for one in refused] == ["missing_field", "missing_field", "bad_clip"]


def test_a_cell_of_csv_holds_a_list_as_json(tmp_path: Path) -> None:
    rows = [
        {
            "q": "[1, 2] or [3]?", "type": '["video", "image"]', "kind": "multiple select", "answer": '["A", "B"]',
            "options": '["red", "blue"]', "path": '["a.mp4", "b.png"]', "clip": '{"start": [1.5, null]}',
        },
        {
            "q": "When?", "type": "video", "kind": "time span", "options": "", "answer": "[1.0, 2.5]",
            "path": "[a].mp4", "clip": '{"start": 2}',
        },
    ]  # fmt: skip
    names = ("q", "type", "kind", "options", "answer", "path", "clip")
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    fields = {"problem": "q", "data_type": "type", "problem_type": {"field": "kind", "names": KINDS}} | {
        name: name for name in ("options", "answer", "path")
    }
    samples, refused = parted(mapped(tmp_path, {**fields, "start": "clip.start"}), tmp_path / "rows.csv")
    assert [(one.question, one.options, one.answer, one.media) for one in samples] == [
        ("[1, 2] or [3]?", ("A. red", "B. blue"), "A, B",
         (MediaRef("video", "a.mp4", start=1.5), MediaRef("image", "b.png"))),
        ("When?", (), "[1.0, 2.5]", (MediaRef("video", "[a].mp4", start=2.0),)),
    ]  # fmt: skip
    assert not refused


KINDS = {"multiple select": "multiple select", "time span": "time span"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "p"}, "has video or image beside path or data_type; give video and image, or path and data_type"),
        ({"data_type": "t"}, "has video or image beside path or data_type"),
        ({"video": None, "image": None}, "has no data_type; give it, or video and image for the paths of each"),
    ],
)
def test_media_have_one_source(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mapped(tmp_path, MEDIA_FIELDS | fields)
