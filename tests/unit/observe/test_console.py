"""What is printed: one line a step with units, plain text without a terminal, nothing on other ranks."""

from __future__ import annotations

import io
import re
from contextlib import suppress

import pytest

from tests.unit.observe.builders import make_group
from vlm_pg.observe.console import Console, format_step, generation_line, sharing_line

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
SHARING = {
    "groups": 16.0,
    "tokens_computed": 52480.0,
    "tokens_repeated": 310272.0,
    "sharing_ratio": 310272 / 52480,
    "sharing_ratio_bound": 310272 / 52480,
    "questions_sharing": 0.0,
    "tokens_shared_across_questions": 0.0,
    "groups_chunked": 0.0,
    "prompt_tokens_mean": 2300.0,
    "response_tokens_mean": 122.0,
    "generations_mean": 8.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            VALUES,
            "reward 0.61 (accuracy 0.52, format 0.90) | kl 0.012 | entropy 0.41 nat | response 14.6 tok | 5,120 tok/s"
            " | 0.28 s | shared prefix saved 4,816 of 7,168 tok (3.0x fewer)",
        ),
        ({"reward": None, "reward/accuracy": None, "kl": None}, "reward n/a (accuracy n/a)"),
        ({"reward": 1.0, "tokens_computed": 5, "tokens_repeated": 0}, "reward 1.00"),
        (
            {"reward": 1.0, "no_value_share": 0.125, "truncated_share": 0.25, "pruned_share": 0.5, "filled_groups": 3},
            "reward 1.00 | 50 % of the rollouts pruned | 3 questions in their place | 25 % cut off at the length limit"
            " | 12 % without a reward value",
        ),
        ({"reward": 1.0, "truncated_share": 0.001, "no_value_share": 0.0, "resampled_groups": 0.0}, "reward 1.00"),
    ],
)
def test_the_step_line_has_every_value_with_its_unit(values: dict[str, float | None], line: str) -> None:
    assert format_step(12, 300, values) == f"step  12/300 | {line}"


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


def test_plain_progress_is_sparing_and_interrupted_work_is_not_called_done() -> None:
    stream = io.StringIO()
    with suppress(RuntimeError), Console(True, stream).progress("decoding", 1000) as bar:
        for _ in range(999):
            bar.advance()
        raise RuntimeError
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("decoding: stopped, 999/1000 in ")


def test_other_ranks_print_nothing() -> None:
    stream = io.StringIO()
    console = Console(False, stream)
    console.warn("x")
    console.step_line(1, 2, VALUES)
    console.rollout_table([make_group()])
    with console.progress("x", 1) as bar:
        bar.advance()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_live_bar_and_nesting_works(terminal: Terminal) -> None:
    console = Console(True, terminal)
    with console.progress("training", 2) as outer:
        for _ in range(2):
            with console.progress("evaluating", 1) as inner:
                inner.advance()
            console.step_line(1, 2, VALUES)
            outer.advance()
    for shown in ("training", "evaluating", "2/2", "5,120 tok/s"):
        assert shown in terminal.getvalue()
    with console.progress("another", 1) as bar:  # a bar can be opened again after the last one was closed
        bar.advance()
    assert "another" in terminal.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_printed_text_moves_the_cursor_or_is_markup(terminal: Terminal, is_terminal: bool) -> None:
    """Sample ids, names of servers and of sets come from elsewhere."""
    hostile = "[red]\x1b[2J\x07\u202e\x9b1m\r"
    stream = terminal if is_terminal else io.StringIO()
    console = Console(enabled=True, stream=stream)
    console.info(f"sample {hostile!s} info")
    console.warn(f"server {hostile!s} warn")
    console.rollout_table([make_group(texts=(f"response {hostile}", "y"))])
    with console.progress(f"set {hostile!s}", 1) as bar:
        bar.advance()
    printed = stream.getvalue()
    shown = "[red]\u241b[2J\u2407\ufffd\ufffd1m\u240d"
    assert f"{shown} info" in printed and f"response {shown}" in printed
    assert not any(character in printed for character in "\x07\u202e\x9b") and "\x1b[2J" not in printed


def test_a_stream_that_is_not_utf8_gets_escapes_instead_of_an_error() -> None:
    raw = io.BytesIO()
    console = Console(True, io.TextIOWrapper(raw, encoding="ascii"))
    console.info("größe 中")
    assert raw.getvalue() == b"gr\\xf6\\xdfe \\u4e2d\n"


def test_the_table_shows_the_best_and_the_worst_of_a_group_up_to_the_limit() -> None:
    stream = io.StringIO()
    group = make_group(texts=("good", "middle", "bad"), totals=(1.1, 0.5, None))
    Console(True, stream).rollout_table([group, group], limit=3)
    text = stream.getvalue()
    assert [text.count(f"response: {name}") for name in ("good", "middle", "bad")] == [2, 0, 1]
    assert "reward: no value (accuracy n/a, format 1.00)" in text
    assert "advantage: +0.70" in text


def test_what_sharing_saved() -> None:
    assert sharing_line(SHARING) == (
        "sharing is on: 16 groups, 52,480 tokens computed instead of 310,272 repeated "
        "(5.9x fewer through every linear layer)"
    )
    more = {"questions_sharing": 3.0, "tokens_shared_across_questions": 8192.0, "groups_chunked": 2.0}
    line = sharing_line(SHARING | more | {"sharing_ratio_bound": 7.0})
    assert (
        "(5.9x fewer through every linear layer, 7.0x if training.micro_batch_tokens held all groups at once)" in line
    )
    assert "; 3 questions begin like another one of their micro-batch (8,192 tokens more saved)" in line
    assert "; 2 groups are larger than training.micro_batch_tokens: their prompts run once" in line


@pytest.mark.parametrize(
    ("changed", "reason", "change"),
    [
        (
            {"prompt_tokens_mean": 90.0, "response_tokens_mean": 800.0},
            "prompts of 90 tokens are short against responses of 800.",
            "media.max_frames, media.max_pixels",
        ),
        ({"generations_mean": 2.0}, "only 2 rollouts share a prompt.", "a higher rollout.num_generations"),
        (
            {"generations_mean": 1.0},
            "each prompt has one response, and few of a step's questions are on one video.",
            "several questions on each video, and a higher training.prompts_per_step",
        ),
        ({}, "few rollouts stand behind the long prompts.", "a higher rollout.num_generations"),
    ],
)
def test_little_gain_says_why_and_what_helps(changed: dict[str, float], reason: str, change: str) -> None:
    line = sharing_line(SHARING | {"sharing_ratio": 1.29} | changed)
    assert f"That is little: {reason} What helps:" in line
    assert change in line
    assert "That is little" not in sharing_line(SHARING | {"sharing_ratio": 1.3} | changed)


def test_generation_says_what_it_prefilled() -> None:
    values = {"prompt_tokens": 2288.0, "prefill_tokens": 2048.0, "tokens_per_second": 412.4, "peak_gib": 0.0132}
    named = {f"generation/{name}": value for name, value in values.items()}
    assert generation_line(named) == (
        "generation: 2,288 prompt tokens prefilled once for all rollouts, 2,048 after what prompts share; "
        "412 new tokens/s; KV cache: at most 0.013 GiB"
    )
    assert "share" not in generation_line(named | {"generation/prefill_tokens": 2288.0})
    divided = "; keys and values of 3 prompts divided over the sequence ranks (without CUDA graphs)"
    assert generation_line(named | {"generation/prompts_divided": 3.0}).endswith(f"GiB{divided}")
