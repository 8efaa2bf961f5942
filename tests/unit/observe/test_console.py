"""What is printed: one line a step with units, plain text without a terminal, nothing on other ranks."""

from __future__ import annotations

import io
import re

import pytest

from tests.unit.observe.builders import make_group
from vlm_pg.observe.console import Console
from vlm_pg.observe.step_line import format_step, saved_tokens

VALUES = {
    "reward": 0.61,
    "reward/accuracy": 0.52,
    "reward/format": 0.9,
    "kl": 0.012,
    "entropy": 0.41,
    "response_tokens_mean": 14.6,
    "tokens_per_second": 5120.0,
    "step_seconds": 0.28,
    "tokens_computed": 2352,
    "tokens_repeated": 7168,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_step_line_has_every_number_with_its_unit() -> None:
    assert format_step(12, 300, VALUES) == (
        "step  12/300 | reward 0.61 (accuracy 0.52, format 0.90) | kl 0.012 | entropy 0.41 nat | response 14.6 tok | "
        "5,120 tok/s | 0.28 s | shared prefix saved 4,816 of 7,168 tok (3.0x fewer)"
    )


def test_what_has_no_value_is_left_out_but_a_missing_reward_is_said() -> None:
    assert format_step(1, 9, {"reward": None, "reward/accuracy": None, "kl": None}) == (
        "step 1/9 | reward n/a (accuracy n/a)"
    )
    assert saved_tokens({"tokens_computed": 5, "tokens_repeated": 0}) is None


def test_trouble_is_said_when_there_is_some() -> None:
    line = format_step(1, 9, {"reward": 1.0, "truncated_share": 0.25, "no_value_share": 0.125})
    assert line.endswith("| 25 % cut off at the length limit | 12 % without a reward value")
    assert "%" not in format_step(1, 9, {"reward": 1.0, "truncated_share": 0.001, "no_value_share": 0.0})


def test_without_a_terminal_everything_is_plain_lines() -> None:
    stream = io.StringIO()
    console = Console(True, stream, seconds_between_lines=0.0)
    with console.progress("evaluating", 4) as bar:
        for _ in range(4):
            bar.advance(note="half of it is right")
    console.step_line(1, 10, VALUES)
    console.rollout_table([make_group(texts=("\x1b[31mred\r<answer>B</answer>", "x"))])
    console.warn("odd")
    lines = stream.getvalue().splitlines()
    for line, start in zip(lines, ("1/4 (25 %)", "2/4 (50 %)", "3/4 (75 %)"), strict=False):
        assert re.fullmatch(rf"evaluating: {re.escape(start)}, \d+ s left, half of it is right", line)
    assert lines[3].startswith("evaluating: done, 4/4 in ")
    assert not re.search("[\x1b\r]", stream.getvalue())
    assert "    response: ␛[31mred␍<answer>B</answer>" in lines
    assert lines[-1] == "warning: odd"


def test_plain_progress_is_sparing() -> None:
    stream = io.StringIO()
    with Console(True, stream).progress("decoding", 1000) as bar:
        for _ in range(1000):
            bar.advance()
    assert len(stream.getvalue().splitlines()) == 1


def test_interrupted_work_is_not_called_done() -> None:
    stream = io.StringIO()

    def work() -> None:
        with Console(True, stream).progress("decoding", 3) as bar:
            bar.advance()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert stream.getvalue().startswith("decoding: stopped, 1/3 in ")


def test_other_ranks_print_nothing() -> None:
    stream = io.StringIO()
    console = Console(False, stream)
    console.info("x")
    console.warn("x")
    console.step_line(1, 2, VALUES)
    console.rollout_table([make_group()])
    with console.progress("x", 1) as bar:
        bar.advance()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_live_bar_and_nesting_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console = Console(True, stream)
    with console.progress("training", 2) as outer:
        for _ in range(2):
            with console.progress("evaluating", 1) as inner:
                inner.advance()
            console.step_line(1, 2, VALUES)
            outer.advance()
    for shown in ("training", "evaluating", "2/2", "5,120 tok/s"):
        assert shown in stream.getvalue()
    with console.progress("another", 1) as bar:  # a bar can be opened again after the last one was closed
        bar.advance()
    assert "another" in stream.getvalue()


def test_a_terminal_shows_markup_and_escapes_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    Console(True, stream).rollout_table([make_group(texts=("[red]x[/red] \x1b]0;title\x07", "y"))])
    assert "[red]x[/red] ␛]0;title␇" in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_that_is_printed_moves_the_cursor(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Sample ids, names of servers and of sets come from elsewhere."""
    monkeypatch.setenv("TERM", "xterm")
    hostile = "\x1b[2J\x07\u202e\x9b1m\r"
    stream = Terminal() if terminal else io.StringIO()
    console = Console(enabled=True, stream=stream)
    console.info(f"sample {hostile!s} info")
    console.warn(f"server {hostile!s} warn")
    with console.progress(f"set {hostile!s}", 1) as bar:
        bar.advance()
    printed = stream.getvalue()
    assert "\u241b[2J\u2407\ufffd\ufffd1m\u240d info" in printed
    assert not any(character in printed for character in "\x07\u202e\x9b") and "\x1b[2J" not in printed


def test_a_stream_that_is_not_utf8_gets_escapes_instead_of_an_error() -> None:
    raw = io.BytesIO()
    console = Console(True, io.TextIOWrapper(raw, encoding="ascii"))
    console.info("größe 中")
    assert raw.getvalue() == b"gr\\xf6\\xdfe \\u4e2d\n"


def test_the_table_shows_the_best_and_the_worst_of_a_group_up_to_the_limit() -> None:
    stream = io.StringIO()
    console = Console(True, stream)
    group = make_group(texts=("good", "middle", "bad"), totals=(1.1, 0.5, None))
    console.rollout_table([group, group], limit=3)
    text = stream.getvalue()
    assert [text.count(f"response: {name}") for name in ("good", "middle", "bad")] == [2, 0, 1]
    assert "reward: no value (accuracy n/a, format 1.00)" in text
    assert "advantage: +0.70" in text
