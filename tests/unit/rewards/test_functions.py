"""The user's own reward functions: what they may ask for and return, and that their errors cost no run."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.unit.answers.helpers import make_sample
from vlm_pg.errors import ConfigError
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.rewards.settings import CheckerSettings, FunctionSettings

RESPONSES = [Response(make_sample("exact", "a", ("A. a",)), "one", 7), Response(make_sample("exact", "b"), "three")]
SOURCE = """
    import asyncio, math, os

    def letters(response): return len(response)
    def everything(**given): return len(given)
    def some(response, answer, question, options, sample, num_tokens, extra=0):
        assert (response, answer, question) == ("one", "a", "Which?")
        assert options == ("A. a",) and sample.answer == answer and num_tokens == 7
        return True
    def batched(responses, answers, questions, samples, options, num_tokens):
        assert num_tokens == [7, None] and answers == ["a", "b"] and options == [("A. a",), ()]
        return [len(text) / 10 for text in responses]
    async def waits(response):
        await asyncio.sleep(0)
        return 0.25
    async def waits_batched(responses): return [0.5] * len(responses)
    def nothing(response): return None
    def raises(response): raise KeyError("lost " + response)
    def leaves(response): os._exit(3)
    def quits(response): raise SystemExit(1)
    def hangs(response):
        while True: pass
    def not_a_number(response): return math.nan
    def text(response): return "0.5"
    def too_few(responses): return [1.0]
    def not_a_list(responses): return 1.0
    def too_large(response): return 10**400
    def too_long(response): return 10**5000
    def generates(responses):
        for text in responses: yield int(text)
    def generates_well(responses):
        for text in responses: yield len(text)
    async def waits_and_quits(response): raise SystemExit(3)
    async def quits_for_some(response):
        if response == "one": raise SystemExit(3)
        return 1.0
    async def quits_batched(responses): raise SystemExit(3)
    async def is_cancelled(response): raise asyncio.CancelledError
    class Wordless(Exception):
        def __str__(self): raise ValueError
    def raises_wordless(response): raise Wordless
    def unknown(reply): return 1.0
    def mixed(response, answers): return 1.0
    def mixed_rest(responses, **rest): return 1.0
    def unasked(): return 1.0
    def by_place(response, /): return 1.0
    value = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


def make_rewarder(file: Path, function: str, shown: list[str] | None = None, **settings: Any) -> Rewarder:
    entry = FunctionSettings(function=f"{file}:{function}", **settings)
    checker = CheckerSettings(workers=1, timeout_seconds=2.0)
    return Rewarder(RewardSettings(functions=(entry,), checker=checker), (shown if shown is not None else []).append)


def values(file: Path, name: str) -> list[float | None]:
    with make_rewarder(file, name) as rewarder:
        rewards = rewarder.score(RESPONSES)
        assert rewarder.failures == {}
    return [reward.parts[name] for reward in rewards]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("letters", [3.0, 5.0]),
        ("everything", [6.0, 6.0]),
        ("batched", [0.3, 0.5]),
        ("waits", [0.25, 0.25]),
        ("waits_batched", [0.5, 0.5]),
        ("nothing", [None, None]),
        ("generates_well", [3.0, 5.0]),
    ],
)
def test_functions_get_what_they_ask_for(file: Path, name: str, expected: list[float | None]):
    assert values(file, name) == expected


def test_every_singular_parameter(file: Path):
    with make_rewarder(file, "some") as rewarder:
        assert rewarder.score(RESPONSES[:1])[0].parts["some"] == 1.0


def test_name_and_weight(file: Path):
    with make_rewarder(file, "letters", name="size", weight=0.5) as rewarder:
        [reward, _] = rewarder.score(RESPONSES)
    assert reward.parts["size"] == 3.0 and reward.total == 1.5  # no answer block, no format
    with make_rewarder(file, "nothing", weight=0.0) as rewarder:
        [reward, _] = rewarder.score(RESPONSES)
    assert reward.parts["nothing"] is None and reward.total == 0.0, "reported, not counted"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "KeyError: 'lost one'"),
        ("quits", "sys.exit(1)"),
        ("not_a_number", "returned 'nan' (float). A finite number"),
        ("text", "returned '0.5' (str)"),
        ("too_few", "returned list of 1 for 2 responses"),
        ("not_a_list", "returned float for 2 responses"),
        ("too_large", "returned '1000"),
        ("too_long", "returned '<no text: ValueError>' (int)"),
        ("generates", "ValueError: invalid literal for int"),
        ("waits_and_quits", "sys.exit(3)"),
        ("quits_batched", "sys.exit(3)"),
        ("is_cancelled", "it ended with CancelledError"),
        ("raises_wordless", "Wordless: <no text: ValueError>"),
    ],
)
def test_errors_are_no_value_shown_once_and_counted(file: Path, name: str, reason: str):
    shown: list[str] = []
    with make_rewarder(file, name, shown) as rewarder:
        for _ in range(2):
            rewards = rewarder.score(RESPONSES)
            assert [reward.total for reward in rewards] == [None, None]
            assert reason in rewards[0].notes[name]
        assert rewarder.failures == {name: 4}
    assert len(shown) == 1 and rewarder.first_errors == {name: shown[0]}
    assert f"The reward function '{name}'" in shown[0] and "sample 1 of test" in shown[0]
    if name == "raises":
        assert "Traceback" in shown[0] and 'raise KeyError("lost " + response)' in shown[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown", "asks for reply"),
        ("mixed", "mixes answers with response"),
        ("mixed_rest", "mixes responses with .*kwargs"),
        ("unasked", "asks for nothing"),
        ("by_place", "asks for response, which there is not .or not by name."),
        ("missing", "has no function 'missing'. It has "),
        ("value", "has no function 'value'"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_before_training(file: Path, name: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        make_rewarder(file, name)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no/such/file.py:f", "which does not exist"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("just_a_name", "is expected"),
        ("math:no_such", "has no function 'no_such'"),
        ("math:log", "does not say what its parameters are"),
    ],
)
def test_functions_that_cannot_be_found_are_refused(function: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        Rewarder(RewardSettings(functions=(FunctionSettings(function=function),)))


def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        make_rewarder(tmp_path / "broken.py", "f")


def test_isolated_functions_may_hang_crash_and_raise(file: Path):
    names = ("batched_length", "some", "hangs", "leaves", "raises")
    file.write_text(
        file.read_text()
        + "\ndef batched_length(responses):\n    assert len(responses) == 1\n    return [len(responses[0])]\n"
    )
    entries = tuple(FunctionSettings(function=f"{file}:{name}", isolated=True) for name in names)
    shown: list[str] = []
    checker = CheckerSettings(workers=1, timeout_seconds=2.0)
    with Rewarder(RewardSettings(functions=entries, checker=checker), shown.append) as rewarder:
        assert rewarder.pids == []
        [reward] = rewarder.score(RESPONSES[:1])
        assert len(rewarder.pids) == 1
    parts = {name: reward.parts[name] for name in names}
    assert parts == {"batched_length": 3.0, "some": 1.0, "hangs": None, "leaves": None, "raises": None}
    assert "deadline" in reward.notes["hangs"] and "exit code 3" in reward.notes["leaves"]
    assert rewarder.failures == {"raises": 1}
    assert len(shown) == 1 and 'raise KeyError("lost " + response)' in shown[0]


def test_one_coroutine_that_exits_costs_no_other(file: Path):
    with make_rewarder(file, "quits_for_some", []) as rewarder:
        assert [reward.parts["quits_for_some"] for reward in rewarder.score(RESPONSES)] == [None, 1.0]


def test_isolated_functions_see_sympy_as_it_is(tmp_path: Path):
    """Mathematics is checked in the same processes, with sympy's evaluating parser replaced."""
    path = tmp_path / "algebra.py"
    path.write_text(
        textwrap.dedent("""
        def same(response):
            from math_verify import parse, verify
            return float(verify(parse("1/2"), parse("0.5")))
        def parsed(response):
            from sympy.parsing.sympy_parser import parse_expr
            return float(parse_expr("1/2 + x").subs("x", 1))
        """)
    )
    entries = tuple(FunctionSettings(function=f"{path}:{name}", isolated=True) for name in ("same", "parsed"))
    checker = CheckerSettings(workers=1, timeout_seconds=60.0)
    with Rewarder(RewardSettings(functions=entries, checker=checker)) as rewarder:
        response = Response(make_sample("mathematics", "\\frac{1}{2}"), "<answer>0.5</answer>")
        for reward in rewarder.score([response] * 2):
            assert (reward.parts["accuracy"], reward.parts["same"], reward.parts["parsed"]) == (1.0, 1.0, 1.5)


def test_parts_that_are_too_large_to_add_up_are_no_value(tmp_path: Path):
    path = tmp_path / "large.py"
    path.write_text("def large(response): return 1e308")
    with make_rewarder(path, "large", weight=100.0) as rewarder:
        [reward] = rewarder.score(RESPONSES[:1])
    assert reward.total is None and reward.notes["total"] == "the parts add up to inf"


def test_numbers_of_other_libraries_are_numbers(tmp_path: Path):
    path = tmp_path / "arrays.py"
    path.write_text(
        "import numpy\ndef number(response): return numpy.float32(0.5)\ndef truth(response): return numpy.bool_(1)"
    )
    assert values(path, "number") == [0.5, 0.5]
    assert math.isclose(sum(values(path, "truth")), 2.0)
