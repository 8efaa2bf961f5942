"""Records as they come: samples out, each unusable record with its reason and line, unreadable files refused.

A value that cannot be read costs its record, not the run, and no input takes time without bound.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_sets import write_shards
from vlm_pg.data.fields import LONGEST_DETAILS
from vlm_pg.data.prepared import to_row
from vlm_pg.data.records import parse_record, read_records, to_record, write_records
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.types import ANSWER_KINDS, AnswerKind, MediaRef, Sample

GOOD: dict[str, Any] = {
    "problem_id": 8,
    "problem": "What object is filmed?",
    "data_type": "video",
    "problem_type": "multiple choice",
    "options": ["A. a keyboard", "B. a piano"],
    "process": "<think>keys</think>",
    "solution": "<answer>A</answer>",
    "path": "./video_90.mov",
    "data_source": "real-media",
}
HALF = "\ud83d"
HALF_CHARACTER = r"half of a character \(\\ud83d, at .* Whole Unicode characters is expected"


def record(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (GOOD | changes).items() if value is not ...}


def refusal(**changes: Any) -> SampleError:
    with pytest.raises(SampleError) as got:
        parse_record(GOOD | changes)
    return got.value


def test_a_record_becomes_a_sample() -> None:
    assert parse_record(GOOD) == Sample(
        "8", "What object is filmed?", (MediaRef("video", "./video_90.mov"),), ("A. a keyboard", "B. a piano"), "A",
        "multiple_choice", "real-media", "real-media", process="<think>keys</think>",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_every_answer_kind_has_a_name_that_is_read_back(kind: AnswerKind) -> None:
    sample = Sample("1", "Which?", (), ("A. x", "B. y"), "A", kind, "s", "s")
    written = to_record(sample)
    for name in (written["problem_type"], kind):
        for spelled in (name, name.upper(), name.replace(" ", "_"), f" {name}\n"):
            assert parse_record(written | {"problem_type": spelled}) == sample


def test_the_real_questions(media_dir: Path) -> None:
    samples, bad = read_records(media_dir / "questions.json")
    assert not bad
    assert [sample.answer for sample in samples] == ["B", "C", "A", "red", "9", "Frame 0", "5.0", "A"]
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
        (
            {"problem_type": "essay"},
            "unknown_answer_kind",
            r"'essay'\. One of multiple choice, multiple select, numerical, OCR, ",
        ),
        ({"data_type": "audio"}, "unknown_data_type", r"'data_type' is 'audio'\. image, video, text, or a list"),
        ({"data_type": ...}, "missing_field", r"'data_type' is missing\. image, video or text is expected"),
        ({"data_type": ["video"], "path": ["a", "b"]}, "wrong_type", "lists 1 kinds for 2 paths"),
        ({"data_type": "text"}, "media_in_text_record", "'data_type' is text but 'path' is"),
        ({"path": ...}, "missing_field", r"'path' is missing or empty\. The path of the video is expected"),
        ({"path": 7}, "wrong_type", r"'path' is a int\. A string or a list of strings is expected"),
        ({"solution": "A"}, "no_answer_tag", r"'solution' is 'A'\. Text with '<answer>\.\.\.</answer>' is expected"),
        ({"solution": "<answer> </answer>"}, "empty_answer", r"is empty\. The right answer is expected"),
        ({"solution": "<answer>C</answer>"}, "answer_not_in_options", r"'C'\. One of the letters A, B is expected"),
        ({"options": ["A. x"]}, "too_few_options", r"has 1 option\(s\)\. Two or more is expected"),
        ({"options": ["A. x", "y"]}, "bad_options", r"2, of which 1 begin with the letters \['A'\]"),
        ({"options": ["A. x", 2]}, "wrong_type", "'options' holds something that is not a string"),
        ({"options": "A. x"}, "wrong_type", "'options' is a str"),
        ({"problem": f"What {HALF}?"}, "not_unicode", HALF_CHARACTER),
        ({"problem_id": f"x{HALF}"}, "not_unicode", HALF_CHARACTER),
        ({"options": ["A. a", f"B. {HALF}"]}, "not_unicode", HALF_CHARACTER),
        ({"problem_type": "free-form", "solution": f"<answer>{HALF}</answer>"}, "not_unicode", HALF_CHARACTER),
        ({"data_source": HALF}, "not_unicode", HALF_CHARACTER),
        ({"category": HALF}, "not_unicode", HALF_CHARACTER),
        (
            {"problem_type": "free-form", "solution": "<answer><answer>red</answer></answer>"},
            "no_answer_tag",
            "the answer in 'solution' holds another '<answer>'. One answer in its tags is expected",
        ),
        ({"start": -1}, "bad_clip", r"'start' holds -1\.0\. Seconds from 0 on"),
        ({"start": 10**400}, "bad_clip", "'start' holds inf"),
        ({"start": float("nan")}, "bad_clip", "'start' holds nan"),
        ({"start": True}, "wrong_type", "'start' holds True"),
        ({"start": 3, "end": 3}, "bad_clip", r"begins at 3 s and ends at 3 s\. A later end"),
        ({"times": [1, 1]}, "bad_clip", "each later than the one before"),
        ({"times": [1, None]}, "bad_clip", "each later"),
        ({"times": 3}, "wrong_type", "'times' is 3"),
        ({"times": [1], "end": 2}, "bad_clip", "'times' stand beside 'start' or 'end'"),
        ({"subtitles": 7}, "wrong_type", "'subtitles' is 7"),
        (
            {"path": ["a.mp4", "b.mp4"], "start": 2.0},
            "wrong_type",
            r"'start' is 2.0 beside a 'path' that lists 2 media",
        ),
        ({"path": ["a.mp4", "b.mp4"], "end": [2.0]}, "wrong_type", "a 'path' that lists 2 media"),
        ({"data_type": "image", "path": "a.jpg", "end": 2.0}, "bad_clip", "an image has 'end'"),
        ({"data_type": "image", "path": "a", "folder_fps": 2.0}, "bad_clip", "an image has 'folder_fps'"),
        ({"folder_fps": 0}, "bad_clip", "'folder_fps' is 0. A number of pictures a second, above 0 and up to 1000,"),
        ({"folder_fps": 1001}, "bad_clip", "'folder_fps' is 1001"),
        ({"folder_fps": True}, "wrong_type", "'folder_fps' is True"),
        ({"details": [1]}, "wrong_type", "'details' is a list. An object, or its JSON is expected"),
        ({"details": "{"}, "wrong_type", "a text that is no JSON"),
        ({"details": "[1]"}, "wrong_type", "'details' is a list"),
        ({"details": {"x": float("nan")}}, "wrong_type", "a value that JSON does not have"),
        ({"details": {"x": "a" * LONGEST_DETAILS}}, "details_too_long", "At most 20,000 is expected"),
        ({"details": "x" * (LONGEST_DETAILS + 1)}, "details_too_long", "At most 20,000 is expected"),
        ({"details": {"x": "\ud800"}}, "not_unicode", "half of a character"),
    ],
)
def test_each_fault_has_its_reason_and_message(changes, reason: str, message: str) -> None:
    with pytest.raises(SampleError, match=message) as got:
        parse_record(record(**changes))
    assert got.value.reason == reason
    assert str(got.value).endswith("or remove the record.")
    str(got.value).encode()
    with pytest.raises(SampleError, match=r"the record is a list\. An object"):
        parse_record([])


def test_media_of_each_shape() -> None:
    assert parse_record(record(data_type="text", path="")).media == ()
    assert parse_record(record(data_type="text", path=...)).media == ()
    several = parse_record(record(data_type="image", path=["a.png", "b.png"]))
    assert several.media == (MediaRef("image", "a.png"), MediaRef("image", "b.png"))
    mixed = parse_record(record(data_type=["image", "video"], path=["a.png", "b.mp4"]))
    assert [ref.kind for ref in mixed.media] == ["image", "video"]


def test_category_falls_back_to_the_source() -> None:
    assert parse_record(GOOD).category == "real-media"
    assert parse_record(record(category="order")).category == "order"
    assert parse_record(record(data_source=...)).source == "unknown"


def test_line_numbers_in_an_indented_array(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    text = json.dumps([GOOD, record(problem=""), GOOD | {"problem_id": 9}, GOOD, 5], indent=2)
    file.write_text("\n\n" + text)
    samples, bad = read_records(file)
    assert [sample.sample_id for sample in samples] == ["8", "9"]
    lines = ("\n\n" + text).split("\n")
    found_lines = [int(one.where.split(":")[1]) for one in bad]
    assert [one.reason for one in bad] == ["empty_question", "duplicate_id", "not_a_record"]
    assert lines[found_lines[0] - 1 :][:3][-1].strip() == '"problem": "",'
    assert lines[found_lines[2] - 1].strip() == "5"
    assert bad[2].sample_id == "a.json:" + str(found_lines[2])
    assert "was used before, at a.json:4. Each record needs its own" in bad[1].message


def test_records_that_share_a_line_are_numbered(tmp_path: Path) -> None:
    records = [GOOD, record(problem_id=9, problem=""), record(problem_id=10, problem="")]
    (tmp_path / "a.json").write_text(json.dumps(records) + "\n")
    samples, bad = read_records(tmp_path / "a.json")
    assert [one.where for one in bad] == ["a.json:1, record 2", "a.json:1, record 3"]
    assert [one.where for one in samples] == ["a.json:1"]


def test_a_sample_has_its_location_and_is_equal_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | {"problem_id": 9}))
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps(GOOD))
    (first, second), (other,) = read_records(tmp_path / "a.jsonl")[0], read_records(tmp_path / "b.jsonl")[0]
    assert (first.where, second.where, other.where) == ("a.jsonl:1", "a.jsonl:3", "b.jsonl:2")
    assert first == other and hash(first) == hash(other)


def test_jsonl_and_parquet_say_the_same(tmp_path: Path) -> None:
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
        ("a.json", '{"data": []}', r"a\.json:1: .*, not with '\['.* Write the array of records alone, or a record a"),
        ("a.json", "[]", r"has no records\. At least one is expected\. Check"),
        ("a.json", "[" * 100_000, r"a\.json:1: the file is nested too deeply"),
        ("a.jsonl", "", r"has no records"),
        ("a.jsonl", '{"a": 1}\n\n{"a"', r"a\.jsonl:3: the file does not parse as JSON \(.* at column 5\)"),
        ("a.parquet", "no parquet", r"cannot be read as Parquet: .* A complete Parquet file is expected"),
        ("a.csv", "x", r"ends in '\.csv'\. Records are read from \.json, \.jsonl and \.parquet\. Convert"),
    ],
)
def test_files_that_do_not_parse(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_records(tmp_path / name)
    with pytest.raises(ConfigError, match=r"none\.json' does not exist\. A file of records is expected\. Correct"):
        read_records(tmp_path / "none.json")


def test_written_records_read_back_equal(tmp_path: Path) -> None:
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


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
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


def test_a_media_path_may_name_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    sample = parse_record(GOOD | {"path": "caf\udce9.mp4"})
    write_records(tmp_path / "a.jsonl", [sample])
    assert read_records(tmp_path / "a.jsonl") == ([sample], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["A. red", "B. red"], r"holds the right one, 'red', more than once\. A text that no other option has is exp"),
        (["A. red", "B.  red "], "holds the right one, 'red', more than once"),
        (["red", "blue", "red"], "holds the right one, 'red', more than once"),
        (["A. red", "B. "], r"holds an option without text\. A text for each"),
        (["", ""], "holds an option without text"),
    ],
)
def test_options_that_cannot_be_told_apart(options: list[str], message: str) -> None:
    assert refusal(options=options).reason == "bad_options"
    by_text = {"solution": "<answer>red</answer>"} if "red" in message else {}
    with pytest.raises(SampleError, match=message):
        parse_record(GOOD | {"options": options} | by_text)
    assert parse_record(GOOD | {"options": options, "problem_type": "free-form"}).answer == "A"


def test_an_endless_number_costs_the_record_that_needs_it(tmp_path: Path) -> None:
    digits = "9" * 5000
    lines = [
        json.dumps(GOOD),
        json.dumps(GOOD | {"problem_id": "X"}).replace('"X"', digits),
        json.dumps(GOOD | {"problem_id": 9, "views": "X"}).replace('"X"', digits),
        json.dumps(GOOD | {"problem_id": 10, "problem": "X"}).replace('"X"', digits),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.json").write_text("[" + ",\n".join(lines) + "]")
    for name in ("a.jsonl", "a.json"):
        samples, bad = read_records(tmp_path / name)
        assert [sample.sample_id for sample in samples] == ["8", "9"]
        assert [(one.reason, one.where) for one in bad] == [("unreadable_value", f"{name}:{line}") for line in (2, 4)]
        assert "'problem' is a whole number of 5000 digits. A str that can be read is expected" in bad[1].message


def test_values_of_parquet_that_cannot_be_read(tmp_path: Path) -> None:
    """Strings that are not UTF-8, dates beyond the year 9999: the records that need them are lost, the others not."""
    import pyarrow
    import pyarrow.parquet

    rows = [GOOD | {"problem_id": str(number)} for number in range(4)]
    table = pyarrow.Table.from_pylist(rows)
    text = [b"What?", b"caf\xe9", b"Where?", b"When?"]
    offsets = [0]
    for part in text:
        offsets.append(offsets[-1] + len(part))
    broken = pyarrow.StringArray.from_buffers(
        4, pyarrow.array(offsets, pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"".join(text))
    )
    dates = pyarrow.array([0, 0, 2**40, 1], pyarrow.int64()).cast(pyarrow.timestamp("s"))
    table = table.set_column(table.schema.get_field_index("problem"), "problem", broken).append_column("taken", dates)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    samples, bad = read_records(tmp_path / "a.parquet")
    assert [sample.sample_id for sample in samples] == ["0", "2", "3"]
    assert [(one.sample_id, one.reason, one.where) for one in bad] == [("1", "unreadable_value", "a.parquet:2")]
    assert "'problem' is a string that cannot be read (UnicodeDecodeError)" in bad[0].message


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("{}")

    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"a\.jsonl' cannot be read: Permission denied\. .* the rights of the file"):
        read_records(tmp_path / "a.jsonl")


def test_time_grows_with_the_length_alone(tmp_path: Path) -> None:
    """Searches whose time grows with its square would not end here."""
    assert refusal(solution="<answer>" * 200_000).reason == "no_answer_tag"
    assert parse_record(GOOD | {"solution": "<answer>A</answer>" * 100_000}).answer == "A"
    (tmp_path / "a.json").write_text(" " * 20_000_000 + "[" + " " * 20_000_000 + json.dumps(GOOD) + "]")
    assert len(read_records(tmp_path / "a.json")[0]) == 1


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("<answer>A</answer>", "A"),
        ("</answer><answer>B</answer>", "B"),
        ("x<answer>\nA\n</answer>y", "A"),
        ("First <answer>A</answer>, so <answer> A\n</answer>.", "A"),
        ("<answer>A</answer></answer>", "A"),
        ("<answer>A</answer><answer>B</answer>", "refused: ambiguous_answer"),
        ("<answer>A</answer><answer></answer>", "refused: ambiguous_answer"),
        ("<answer>A</answer><answer>B", "refused: no_answer_tag"),
        ("<answer></answer><answer>B</answer>", "refused: empty_answer"),
    ],
)
def test_several_answers_must_say_the_same(solution: str, answer: str) -> None:
    if answer.startswith("refused: "):
        error = refusal(solution=solution)
        assert error.reason == answer.removeprefix("refused: ")
        assert error.reason != "ambiguous_answer" or "One right answer is expected" in str(error)
    else:
        assert parse_record(GOOD | {"solution": solution}).answer == answer


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_two_values_under_one_name(tmp_path: Path, name: str) -> None:
    """Readers of JSON take the last one: a gold answer that is not visible in the file."""
    other = json.dumps(GOOD)[:-1] + ', "solution": "<answer>B</answer>"}'
    same = json.dumps(GOOD | {"problem_id": 9})[:-1] + ', "path": "./video_90.mov", "extra": {"x": 1, "x": 2}}'
    (tmp_path / name).write_text(f"[{other},\n{same}]" if name == "a.json" else f"{other}\n{same}")
    samples, bad = read_records(tmp_path / name)
    assert [sample.sample_id for sample in samples] == ["9"]
    assert [(one.sample_id, one.reason, one.where) for one in bad] == [(f"{name}:1", "unreadable_value", f"{name}:1")]
    assert "the record is an object that gives 'solution' different values. An object with one value" in bad[0].message


@pytest.mark.parametrize(
    ("options", "gold"),
    [(["the", "a", "an"], "a"), (["A. the", "B. a"], "a"), (["C", "A", "B"], "A"), (["A. B. red", "B. red"], "B. red")],
)
def test_a_gold_answer_that_may_mean_two_options(options: list[str], gold: str) -> None:
    got = refusal(options=options, solution=f"<answer>{gold}</answer>")
    assert got.reason == "ambiguous_answer"
    assert f"the answer '{gold}' may mean each of the options A, B. A letter and the text of its option" in str(got)


@pytest.mark.parametrize(
    ("options", "gold", "answer"),
    [
        (["A. B", "B. A"], "A", "A"),
        (["the", "a", "an"], "B. a", "B"),
        (["the", "a", "an"], "an", "C"),
        (["red", "blue", "red"], "B", "B"),  # wrong options may be equal
        *((["A. x", "B. a piano"], spelled, "B") for spelled in ("b", "B.", "(B)", "B. a piano", " a piano ")),
        (["A", "B"], "B", "B"),
    ],
)
def test_a_gold_answer_that_means_one_option(options: list[str], gold: str, answer: str) -> None:
    assert parse_record(GOOD | {"options": options, "solution": f"<answer>{gold}</answer>"}).answer == answer


def test_columns_of_one_name(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([GOOD])
    table = table.append_column("solution", pyarrow.array(["<answer>B</answer>"]))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"has several columns named solution\. Columns with different names are exp"):
        read_records(tmp_path / "a.parquet")


def test_damage_that_checksums_show(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([GOOD])
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", write_page_checksum=True, **options)
    data = (tmp_path / "a.parquet").read_bytes()
    assert data.count(b"<answer>A</answer>") == 1
    (tmp_path / "a.parquet").write_bytes(data.replace(b"<answer>A</answer>", b"<answer>B</answer>"))
    with pytest.raises(ConfigError, match=r"cannot be read as Parquet: .*(?i:crc|checksum)"):
        read_records(tmp_path / "a.parquet")


# ---- parts of media, several right options, details ----

EXACT = GOOD | {"data_type": "text", "problem_type": "exact", "solution": "<answer>a piano</answer>", "path": ""}


@pytest.mark.parametrize(
    "parts",
    [
        {"start": 1.5},
        {"end": 4.0},
        {"start": 1.5, "end": 4.0, "subtitles": "a.srt"},
        {"times": [0.0, 2.5, 3.0]},
        {"path": ["a.mp4", "b.mp4"], "start": [None, 2.0], "end": [1.0, 3.0], "subtitles": ["", "b.vtt"]},
        {"path": ["a.mp4", "b.mp4"], "times": [[1.0, 2.0], []]},
        {"path": ["a.jpg", "b.mp4"], "data_type": ["image", "video"], "end": [None, 3.0]},
        {"path": "frames/a", "folder_fps": 3, "start": 1.5},
        {"path": ["a.mp4", "frames/b"], "folder_fps": [None, 29.97]},
    ],
)
def test_parts_of_media_are_read_and_written(parts: dict[str, object]) -> None:
    record = GOOD | parts
    sample = parse_record(record)
    again = parse_record(json.loads(json.dumps(to_record(sample))))
    assert again == sample
    for name, value in parts.items():
        read = [getattr(ref, name) for ref in sample.media] if name in ("start", "end", "folder_fps") else None
        assert read is None or read == (value if isinstance(value, list) else [value])


def select(options: list[str], solution: str) -> dict[str, Any]:
    return EXACT | {"problem_type": "multiple select", "options": options, "solution": f"<answer>{solution}</answer>"}


@pytest.mark.parametrize(
    ("solution", "answer"), [("C,A", "A, C"), ("B", "B"), ("None", "none"), ("A, B, C", "A, B, C")]
)
def test_several_right_options_are_a_list_of_letters(solution: str, answer: str) -> None:
    options = ["red", "blue", "green"]
    record = select(options, solution)
    assert parse_record(record).answer == answer
    assert parse_record(to_record(parse_record(record))).answer == answer


@pytest.mark.parametrize(
    ("options", "solution", "reason"),
    [
        (["red", "blue"], "C", "answer_not_in_options"),
        (["red", "blue"], "A, A", "answer_not_in_options"),
        (["red", "blue"], "A and B", "answer_not_in_options"),
        ([], "none", "too_few_options"),
        (["red", "red"], "A", "bad_options"),
        (["red", ""], "A", "bad_options"),
    ],
)
def test_gold_answers_that_select_nothing_known_are_refused(options: list[str], solution: str, reason: str) -> None:
    with pytest.raises(SampleError) as caught:
        parse_record(select(options, solution))
    assert caught.value.reason == reason


DETAILS = {"task": "FAQ", "skills": ["a", "é"], "precision": 2, "unit": None, "nested": {"x": 1.5, "y": True}}
SAMPLE = Sample("1", "How many?", (), (), "3", "numerical", "s", "c", details=DETAILS)


def test_details_come_back_from_every_form(tmp_path: Path) -> None:
    assert parse_record(to_record(SAMPLE)) == SAMPLE
    assert parse_record(to_row(SAMPLE)) == SAMPLE
    write_records(tmp_path / "one.jsonl", [SAMPLE])
    (tmp_path / "set").mkdir()
    write_shards(tmp_path / "set", "eval", [SAMPLE])
    for path in (tmp_path / "one.jsonl", next((tmp_path / "set").iterdir())):
        assert read_records(path) == ([SAMPLE], [])


def test_without_details_a_record_has_no_such_field() -> None:
    bare = Sample("1", "How many?", (), (), "3", "numerical", "s", "c")
    assert "details" not in to_record(bare)
    assert parse_record(to_record(bare)).details == {} and hash(bare) == hash(SAMPLE)
