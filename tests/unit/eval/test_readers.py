"""The choice of a set's reader; readers and aggregations of the user's own are found by path and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_pg.answers.whole import WholeReader
from vlm_pg.errors import ConfigError
from vlm_pg.eval.aggregation import aggregate
from vlm_pg.eval.contracts import Answered, Output, Reading
from vlm_pg.eval.protocols.protocol import Protocol
from vlm_pg.eval.readers import own_aggregation, own_reader, own_sources, reader_name, reader_of
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample

SAMPLE = Sample("q1", "Where?", (), (), "kitchen", "free_form", "mine", "c", details={"room": "big"})
CODE = """
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.measures import figure_of
from vlm_pg.eval.tables import Table

def last_line(sample, output, truncated):
    last = output.splitlines()[-1] if output else None
    return Reading(last, float(last == sample.answer and not truncated))

class Counting:
    def __init__(self):
        self.calls = 0
    def __call__(self, sample, output, truncated):
        self.calls += 1
        return Reading(str(self.calls), 1.0)

def by_room(answered):
    "Mean over questions, by room."
    table = Table("mean", {"mean": figure_of(answered)})
    table.group_by(answered, "room")
    return table

def raises(sample, output, truncated):
    raise KeyError("room")

def number(sample, output, truncated):
    return 1.0

def too_much(sample, output, truncated):
    return Reading("x", 1.5)

def two_parameters(sample, output):
    return Reading("x", 1.0)

def no_main(answered):
    return Table("mean")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path / "mine.py"


def protocol(**changes: str) -> Protocol:
    return Protocol.model_validate(
        {"name": "mine", "source": "s", "templates": {"*": "{question}"}, "max_new_tokens": 8} | changes
    )


def test_a_function_reads_and_a_class_is_made_once(file: Path) -> None:
    read = own_reader(f"{file}:last_line")
    assert read(SAMPLE, "I look.\nkitchen", False) == Reading("kitchen", 1.0)
    assert read(SAMPLE, "I look.\nkitchen", True) == Reading("kitchen", 0.0)
    assert read(SAMPLE, "", False) == Reading(None, 0.0)
    counting = own_reader(f"{file}:Counting")
    assert [counting(SAMPLE, "", False).answer for _ in range(2)] == ["1", "2"]


def test_a_protocol_s_own_reader_reads_unless_another_is_chosen(file: Path) -> None:
    """A published rule reads only where it is chosen; without a protocol training's reader does."""
    mine = protocol(reader=f"{file}:last_line", answer_prefix="I: (", read_prefix="(")
    names = [reader_name(chosen, mine) for chosen in (None, "published", "ours", "strict")]
    assert names == [f"{file}:last_line"] * 2 + ["ours", "strict"]
    published = protocol(reader="gsm8k/lmms_strict")
    assert [reader_name(chosen, published) for chosen in (None, "published")] == ["ours", "gsm8k/lmms_strict"]
    assert [reader_name(chosen, None) for chosen in (None, "strict", "ours")] == ["strict", "strict", "ours"]
    with WholeReader(RewardSettings()) as whole:
        reader = reader_of(names[0], mine, whole)
        assert reader is not None and reader(SAMPLE, "kitchen", False).answer == "(kitchen"
        assert reader_of("strict", mine, whole) is None


def test_an_aggregation_makes_the_figures(file: Path) -> None:
    answered = [Answered.of(SAMPLE, (Output("kitchen", Reading("kitchen", 1.0)),))]
    figures = aggregate(f"{file}:by_room", answered)
    assert (figures.rule, figures.main, figures.headline.value) == ("Mean over questions, by room", "mean", 1.0)
    assert figures.groups["room"]["big"].n == 1


def test_another_text_of_the_file_is_another_source(file: Path) -> None:
    name = f"{file}:last_line"
    before = own_sources(["ours", name])
    assert list(before) == [name] and len(before[name]) == 64
    assert list(own_sources(["vlm_pg.eval.readers:own_reader"])) == ["vlm_pg.eval.readers:own_reader"]
    file.write_text(f"{CODE}\n# changed\n")
    assert own_sources([name]) != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"'.*mine.py' has no function 'nowhere'. It has .*last_line"),
        ("two_parameters", r"two_parameters', cannot be called: .*\(sample, output, truncated\)"),
        ("raises", r"raises', raises KeyError: 'room' for question 'q1'.* A vlm_pg.eval.contracts.Reading is expected"),
        ("number", r"number', gave 1.0 \(float\) for question 'q1'.* A vlm_pg.eval.contracts.Reading is expected"),
        ("too_much", r"too_much', gave Reading\(answer='x', score=1.5.* A vlm_pg.eval.contracts.Reading is expected"),
    ],
)
def test_readers_that_cannot_be_used(file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        own_reader(f"{file}:{name}")(SAMPLE, "kitchen", False)


@pytest.mark.parametrize(("name", "message"), [("no_main", "Table is expected"), ("Table", "cannot be called")])
def test_aggregations_that_cannot_be_used(file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"aggregation of a protocol.*{message}"):
        own_aggregation(f"{file}:{name}")[1]([])
