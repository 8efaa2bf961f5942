"""Reading records: samples out, every unusable record with its reason and its line, files that do not parse refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vlm_pg.data.records import parse_record, read_records, to_record, write_records
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.types import ANSWER_KINDS, AnswerKind, MediaRef, Sample

GOOD = {
    "problem_id": 8,
    "problem": "What object is filmed?",
    "data_type": "video",
    "problem_type": "multiple choice",
    "options": ["A. a keyboard", "B. a piano"],
    "process": "",
    "solution": "<answer>A</answer>",
    "path": "./video_90.mov",
    "data_source": "real-media",
}


def record(**changes):
    return {key: value for key, value in (GOOD | changes).items() if value is not ...}


def test_a_record_becomes_a_sample():
    assert parse_record(GOOD) == Sample(
        "8", "What object is filmed?", (MediaRef("video", "./video_90.mov"),), ("A. a keyboard", "B. a piano"), "A",
        "multiple_choice", "real-media", "real-media",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ANSWER_KINDS)
@pytest.mark.parametrize("change", [str, str.upper, lambda name: name.replace(" ", "_"), lambda name: f" {name}\n"])
def test_every_answer_kind_has_a_name_that_is_read_back(kind: AnswerKind, change: Callable[[str], str]):
    sample = Sample("1", "Which?", (), ("A. x", "B. y"), "A", kind, "s", "s")
    written = to_record(sample)
    assert parse_record(written | {"problem_type": change(written["problem_type"])}) == sample
    assert parse_record(written | {"problem_type": change(kind)}) == sample


def test_the_real_questions(media_dir: Path):
    samples, bad = read_records(media_dir / "questions.json")
    assert not bad
    assert [sample.sample_id for sample in samples] == [str(number) for number in range(1, 9)]
    assert [sample.answer for sample in samples] == ["B", "C", "A", "red", "9", "Frame 0", "5.0", "A"]
    assert {sample.answer_kind for sample in samples} == {
        "multiple_choice", "free_form", "numerical", "ocr", "regression"
    }  # fmt: skip


def test_the_bad_questions_that_show_before_decoding(media_dir: Path):
    samples, bad = read_records(media_dir / "questions_bad.json")
    assert [sample.sample_id for sample in samples] == ["101", "102", "103", "104"]
    assert [(one.sample_id, one.reason, one.where) for one in bad] == [
        ("105", "empty_question", "questions_bad.json:6"),
        ("106", "media_token_in_text", "questions_bad.json:7"),
    ]


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"problem_id": ...}, "missing_field", r"'problem_id' is missing\. A number or name .* is expected\. Correct"),
        ({"problem_id": True}, "wrong_type", "'problem_id' is a bool"),
        ({"problem": ...}, "missing_field", r"'problem' is missing\. A str under that name is expected\. Correct the"),
        ({"problem": 3}, "wrong_type", r"'problem' is a int\. A str is expected"),
        ({"problem": " \n"}, "empty_question", r"'problem' is empty\. The text of a question is expected"),
        ({"problem": "<|image_pad|>?"}, "media_token_in_text", r"the text contains '<\|image_pad\|>'\. Control tokens"),
        ({"options": ["A. <|im_end|>", "B. x"]}, "media_token_in_text", r"'<\|im_end\|>'"),
        (
            {"problem": "<video> or <video>?"},
            "media_mark_without_medium",
            r"'<video>' 2 time\(s\), and the record names 1 video\(s\)\. One mark where each video stands, or none",
        ),
        ({"problem": "<image>?"}, "media_mark_without_medium", r"'<image>' 1 .* names 0 image\(s\).*'path', or"),
        ({"options": ["A. <video>", "B. a <video>"]}, "media_mark_without_medium", "'<video>' 2 time"),
        ({"problem": "<image>?", "data_type": "text", "path": ""}, "media_mark_without_medium", "names 0 image"),
        (
            {"problem_type": "essay"},
            "unknown_answer_kind",
            r"'essay'\. One of multiple choice, multiple select, numerical, OCR, ",
        ),
        ({"data_type": "audio"}, "unknown_data_type", r"'data_type' is 'audio'\. image, video, text, or a list"),
        ({"data_type": ...}, "missing_field", r"'data_type' is missing\. image, video or text is expected"),
        ({"data_type": ["video", "audio"], "path": ["a", "b"]}, "unknown_data_type", "audio"),
        ({"data_type": ["video"], "path": ["a", "b"]}, "wrong_type", "lists 1 kinds for 2 paths"),
        ({"data_type": "text"}, "media_in_text_record", "'data_type' is text but 'path' is"),
        ({"path": ...}, "missing_field", r"'path' is missing or empty\. The path of the video is expected"),
        ({"path": 7}, "wrong_type", r"'path' is a int\. A string or a list of strings is expected"),
        ({"solution": "A"}, "no_answer_tag", r"'solution' is 'A'\. Text with '<answer>\.\.\.</answer>' is expected"),
        ({"solution": "<answer> </answer>"}, "empty_answer", r"is empty\. The right answer is expected"),
        ({"solution": "<answer>C</answer>"}, "answer_not_in_options", r"'C'\. One of the letters A, B is expected"),
        ({"options": ["A. x"]}, "too_few_options", r"has 1 option\(s\)\. Two or more is expected"),
        ({"options": ["A. x", "A. y"]}, "bad_options", r"2, of which 2 begin with .*\['A', 'A'\]\. The letters"),
        ({"options": ["A. x", "y"]}, "bad_options", r"2, of which 1 begin with the letters \['A'\]"),
        ({"options": ["A. x", 2]}, "wrong_type", "'options' holds something that is not a string"),
        ({"options": "A. x"}, "wrong_type", "'options' is a str"),
    ],
)
def test_each_fault_has_its_reason_and_message(changes, reason: str, message: str):
    with pytest.raises(SampleError, match=message) as got:
        parse_record(record(**changes))
    assert got.value.reason == reason
    assert str(got.value).endswith("or remove the record.")


def test_a_record_that_is_no_object():
    with pytest.raises(SampleError, match=r"the record is a list\. An object") as got:
        parse_record([])
    assert got.value.reason == "not_a_record"


@pytest.mark.parametrize("written", ["B", "b", "B.", "(B)", "B. a piano", "a piano"])
def test_spellings_of_a_gold_letter(written: str):
    assert parse_record(record(solution=f"x <answer> {written} </answer> y")).answer == "B"


def test_options_without_letters_get_them():
    sample = parse_record(record(options=["a keyboard", "a piano"], solution="<answer>a piano</answer>"))
    assert sample.options == ("A. a keyboard", "B. a piano")
    assert sample.answer == "B"


def test_media_of_each_shape():
    assert parse_record(record(data_type="text", path="")).media == ()
    assert parse_record(record(data_type="text", path=...)).media == ()
    several = parse_record(record(data_type="image", path=["a.png", "b.png"]))
    assert several.media == (MediaRef("image", "a.png"), MediaRef("image", "b.png"))
    mixed = parse_record(record(data_type=["image", "video"], path=["a.png", "b.mp4"]))
    assert [ref.kind for ref in mixed.media] == ["image", "video"]


def test_category_falls_back_to_the_source():
    assert parse_record(GOOD).category == "real-media"
    assert parse_record(record(category="order")).category == "order"
    assert parse_record(record(data_source=...)).source == "unknown"


def test_line_numbers_in_an_indented_array(tmp_path: Path):
    file = tmp_path / "a.json"
    text = json.dumps([GOOD, record(problem=""), GOOD | {"problem_id": 9}, GOOD, 5], indent=2)
    file.write_text("\n\n" + text)
    samples, bad = read_records(file)
    assert [sample.sample_id for sample in samples] == ["8", "9"]
    lines = ("\n\n" + text).split("\n")
    places = [int(one.where.split(":")[1]) for one in bad]
    assert [one.reason for one in bad] == ["empty_question", "duplicate_id", "not_a_record"]
    assert lines[places[0] - 1 :][:3][-1].strip() == '"problem": "",'
    assert lines[places[2] - 1].strip() == "5"
    assert bad[2].sample_id == "a.json:" + str(places[2])
    assert "was used before, at a.json:4. Each record needs its own" in bad[1].message


def test_records_that_share_a_line_are_numbered(tmp_path: Path):
    records = [GOOD, record(problem_id=9, problem=""), record(problem_id=10, problem="")]
    (tmp_path / "a.json").write_text(json.dumps(records) + "\n")
    samples, bad = read_records(tmp_path / "a.json")
    assert [one.where for one in bad] == ["a.json:1, record 2", "a.json:1, record 3"]
    assert [one.where for one in samples] == ["a.json:1"]


def test_a_sample_knows_its_place_and_is_equal_elsewhere(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | {"problem_id": 9}))
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps(GOOD))
    (first, second), (other,) = read_records(tmp_path / "a.jsonl")[0], read_records(tmp_path / "b.jsonl")[0]
    assert (first.where, second.where, other.where) == ("a.jsonl:1", "a.jsonl:3", "b.jsonl:2")
    assert first == other and hash(first) == hash(other)


def test_jsonl_and_parquet_say_the_same(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    records = [GOOD, record(problem_id=9, solution="none"), record(problem_id=10, options=None, problem_type="OCR")]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(one) for one in [records[0]]) + "\n\n" +
                                      "\n".join(json.dumps(one) for one in records[1:]))  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    from_lines, bad_lines = read_records(tmp_path / "a.jsonl")
    from_parquet, bad_parquet = read_records(tmp_path / "a.parquet")
    assert from_lines == from_parquet and len(from_lines) == 2
    assert [one.where for one in bad_lines] == ["a.jsonl:3"]
    assert [one.where for one in bad_parquet] == ["a.parquet:2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"a": 1},\n {"a": }]', r"a\.json:2: the file does not parse as JSON .* Correct that line"),
        ("a.json", '{"a": 1}', r"a\.json:1: the file begins with '\{\"a\": 1\}', not with '\['"),
        ("a.json", '{"data": []}', r"a\.json:1: .*, not with '\['.* Write the array of records alone, or a record a"),
        ("a.json", '[{"a": 1}\n{"b": 2}]', r"a\.json:2: the file does not parse as JSON \(a record must be followed"),
        ("a.json", '[{"a": 1},\n]', r"a\.json:2: the file does not parse"),
        ("a.json", '[{"a": 1}', r"a\.json:1: the file does not parse"),
        ("a.json", "[]\n[]", r"a\.json:2: the file goes on after the end of the array"),
        ("a.json", "[]", r"has no records\. At least one is expected\. Check"),
        ("a.json", "[" * 100_000, r"a\.json:1: the file is nested too deeply"),
        ("a.jsonl", "", r"has no records"),
        ("a.jsonl", '{"a": 1}\n\n{"a"', r"a\.jsonl:3: the file does not parse as JSON \(.* at column 5\)"),
        ("a.jsonl", b'{"a": 1}\n\xff', r"a\.jsonl:2: the file is not UTF-8 text"),
        ("a.parquet", "no parquet", r"cannot be read as Parquet: .* A complete Parquet file is expected"),
        ("a.csv", "x", r"ends in '\.csv'\. Records are read from \.json, \.jsonl and \.parquet\. Convert"),
    ],
)
def test_files_that_do_not_parse(tmp_path: Path, name: str, content: str | bytes, message: str):
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=message):
        read_records(tmp_path / name)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.json' does not exist\. A file of records is expected\. Correct"):
        read_records(tmp_path / "none.json")


def test_written_records_read_back_equal(tmp_path: Path):
    samples = [
        parse_record(GOOD),
        parse_record(record(problem_id="x-1", data_type="text", path="", category="words", problem="é\n\u2028?")),
        parse_record(record(problem_id=3, data_type=["image", "video"], path=["a.png", "b.mp4"])),
        parse_record(record(problem_id=4, problem_type="free-form", options=[], path=["a.mp4", "b.mp4"])),
    ]
    file = tmp_path / "deep" / "a.jsonl"
    write_records(file, samples)
    assert read_records(file) == (samples, [])
    assert [one.name for one in file.parent.iterdir()] == ["a.jsonl"]
    assert to_record(samples[0])["problem_type"] == "multiple choice"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    write_records(file, [parse_record(GOOD)])
    before = file.read_bytes()

    def broken():
        yield parse_record(GOOD)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_records(file, broken())
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(ConfigError, match=r"Records are written to \.jsonl files; got .*\. Choose a name"):
        write_records(tmp_path / "a.json", [])
