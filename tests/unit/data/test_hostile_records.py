"""Record files as they come: what cannot be read costs a record, not the run, and nothing takes time without bound."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.data.bad import BadSampleLog, line_of
from vlm_pg.data.records import parse_record, read_records, write_records
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.types import BadSample

GOOD = {
    "problem_id": 8,
    "problem": "What object is filmed?",
    "data_type": "video",
    "problem_type": "multiple choice",
    "options": ["A. a keyboard", "B. a piano"],
    "solution": "<answer>A</answer>",
    "path": "a.mp4",
}
HALF = "\ud83d"


def refusal(**changes: Any) -> SampleError:
    with pytest.raises(SampleError) as got:
        parse_record(GOOD | changes)
    return got.value


@pytest.mark.parametrize(
    "changes",
    [
        {"problem": f"What {HALF}?"},
        {"problem_id": f"x{HALF}"},
        {"options": ["A. a", f"B. {HALF}"]},
        {"problem_type": "free-form", "solution": f"<answer>{HALF}</answer>"},
        {"data_source": HALF},
        {"category": HALF},
    ],
)
def test_halves_of_characters_are_refused(changes: dict[str, Any]):
    error = refusal(**changes)
    assert error.reason == "not_unicode"
    assert r"holds half of a character (\ud83d, at " in str(error)
    assert "Whole Unicode characters is expected. Correct it, or remove the record." in str(error)
    str(error).encode()


def test_a_media_path_may_name_a_file_that_is_not_utf8(tmp_path: Path):
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
def test_options_that_cannot_be_told_apart(options: list[str], message: str):
    error = refusal(options=options)
    assert error.reason == "bad_options"
    with pytest.raises(SampleError, match=message):
        parse_record(GOOD | {"options": options})
    by_text = {"solution": "<answer>red</answer>"} if "red" in message else {}
    with pytest.raises(SampleError, match=message):
        parse_record(GOOD | {"options": options} | by_text)
    assert parse_record(GOOD | {"options": options, "problem_type": "free-form"}).answer == "A"


def test_wrong_options_may_be_equal():
    """The question can still be answered; data sets that are published hold such ones."""
    sample = parse_record(GOOD | {"options": ["red", "blue", "red"], "solution": "<answer>B</answer>"})
    assert sample.answer == "B"


def test_an_endless_number_costs_the_record_that_needs_it(tmp_path: Path):
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


def test_values_of_parquet_that_cannot_be_read(tmp_path: Path):
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


@pytest.mark.parametrize("name", ["x" * 300 + ".jsonl", "a\0.jsonl", "link.jsonl/a.jsonl"])
def test_names_that_cannot_be_looked_up(tmp_path: Path, name: str):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "link.jsonl")
    with pytest.raises(ConfigError, match=r"(cannot be read: .*Correct the path, or the rights|does not exist)"):
        read_records(tmp_path / name)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.jsonl").write_text("{}")

    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"a\.jsonl' cannot be read: Permission denied\. .* the rights of the file"):
        read_records(tmp_path / "a.jsonl")


def test_time_grows_with_the_length_alone(tmp_path: Path):
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
        ("<answer>A</answer><answer>A</answer><answer>a</answer>", "refused: ambiguous_answer"),
        ("<answer>A</answer><answer>B", "refused: no_answer_tag"),
        ("<answer></answer><answer>B</answer>", "refused: empty_answer"),
    ],
)
def test_several_answers_must_say_the_same(solution: str, answer: str):
    if answer.startswith("refused: "):
        assert refusal(solution=solution).reason == answer.removeprefix("refused: ")
    else:
        assert parse_record(GOOD | {"solution": solution}).answer == answer


def test_answers_that_disagree_are_named():
    assert "'solution' gives 'A', 'B'. One right answer is expected" in str(
        refusal(solution="<answer>A</answer> or <answer>B</answer>")
    )


def test_the_log_of_bad_samples_holds_what_is_no_unicode(tmp_path: Path):
    """And reads it back equal: the same fault is not written twice after a resume."""
    bad = BadSample(f"id{HALF}", "corrupt_media", f"caf\udce9{HALF}", f"{HALF}.jsonl:1", trace="Traceback ...")
    log = BadSampleLog(tmp_path / "bad.jsonl", 1, 1)
    assert log.record(bad)
    again = BadSampleLog(tmp_path / "bad.jsonl", 1, 1)
    assert not again.record(bad)
    (line,) = (tmp_path / "bad.jsonl").read_text(encoding="utf-8").splitlines()
    assert BadSample(**json.loads(line)) == bad
    assert "trace" not in line_of(BadSample("1", "reason", "why", "a:1"))


def test_a_bad_record_is_named_in_few_words(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD | {"problem_id": f"{HALF}\n" + "x" * 100_000, "problem": ""}))
    ((one),) = read_records(tmp_path / "a.jsonl")[1]
    assert len(one.sample_id) < 250 and one.sample_id.isprintable()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_two_values_under_one_name(tmp_path: Path, name: str):
    """Readers of JSON take the last one: a gold answer that nobody can see in the file."""
    other = json.dumps(GOOD)[:-1] + ', "solution": "<answer>B</answer>"}'
    same = json.dumps(GOOD | {"problem_id": 9})[:-1] + ', "path": "a.mp4", "extra": {"x": 1, "x": 2}}'
    (tmp_path / name).write_text(f"[{other},\n{same}]" if name == "a.json" else f"{other}\n{same}")
    samples, bad = read_records(tmp_path / name)
    assert [sample.sample_id for sample in samples] == ["9"]
    assert [(one.sample_id, one.reason, one.where) for one in bad] == [(f"{name}:1", "unreadable_value", f"{name}:1")]
    assert "the record is an object that gives 'solution' different values. An object with one value" in bad[0].message


@pytest.mark.parametrize(
    ("options", "gold"),
    [(["the", "a", "an"], "a"), (["A. the", "B. a"], "a"), (["C", "A", "B"], "A"), (["A. B. red", "B. red"], "B. red")],
)
def test_a_gold_answer_that_may_mean_two_options(options: list[str], gold: str):
    got = refusal(options=options, solution=f"<answer>{gold}</answer>")
    assert got.reason == "ambiguous_answer"
    assert f"the answer '{gold}' may mean each of the options A, B. A letter and the text of its option" in str(got)


@pytest.mark.parametrize(
    ("options", "gold", "answer"),
    [
        (["A. B", "B. A"], "A", "A"),
        (["the", "a", "an"], "B. a", "B"),
        (["the", "a", "an"], "an", "C"),
        (["A", "B"], "B", "B"),
    ],
)
def test_a_gold_answer_that_means_one_option(options: list[str], gold: str, answer: str):
    assert parse_record(GOOD | {"options": options, "solution": f"<answer>{gold}</answer>"}).answer == answer


def test_an_answer_inside_an_answer():
    """A response's own tags end its answer, so none could ever be equal to this one."""
    error = refusal(problem_type="free-form", solution="<answer><answer>red</answer></answer>")
    assert error.reason == "no_answer_tag"
    assert "the answer in 'solution' holds another '<answer>'. One answer in its tags is expected" in str(error)


def test_columns_of_one_name(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([GOOD])
    table = table.append_column("solution", pyarrow.array(["<answer>B</answer>"]))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"has several columns named solution\. Columns with different names are exp"):
        read_records(tmp_path / "a.parquet")


def test_damage_that_checksums_show(tmp_path: Path):
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


@pytest.mark.parametrize("name", ["folder.jsonl", "pipe.parquet", "zero.json"])
def test_what_is_no_file(tmp_path: Path, name: str):
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with pytest.raises(
        ConfigError, match=rf"{name}' is a folder, a pipe, a socket or a device\. A file of records is ex"
    ):
        read_records(tmp_path / name)


def test_an_odd_name_of_a_file_in_messages(tmp_path: Path):
    path = tmp_path / "a\x1b[31m\n.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"a\\x1b\[31m\\n\.jsonl' has no records"):
        read_records(path)
    path.write_text("{}")
    assert read_records(path)[1][0].where == r"a\x1b[31m\n.jsonl:1"
