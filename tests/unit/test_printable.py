"""What reaches a log is one line of printable characters, and no longer than a page."""

from __future__ import annotations

import pytest

from vlm_pg.errors import MESSAGE_LIMIT, SampleError, printable
from vlm_pg.types import BadSample


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢字 🎉", "plain é 漢字 🎉"),
        ("no-break\u00a0space", "no-break\u00a0space"),
        ("new\nline\ttab", r"new\nline\ttab"),
        ("\x1b[31mred\0", r"\x1b[31mred\x00"),
        ("half \ud83d", r"half \ud83d"),
        ("turned \u202e round", r"turned \u202e round"),
    ],
)
def test_one_line(text: str, shown: str):
    assert printable(text) == shown
    assert str(SampleError("reason", text)) == shown


def test_no_longer_than_a_page():
    message = str(SampleError("reason", "begin" + "x" * 1_000_000 + "end"))
    assert len(message) <= MESSAGE_LIMIT + 5
    assert message.startswith("begin") and message.endswith("end")


def test_a_bad_sample_in_the_log_is_one_short_line():
    line = str(BadSample("id\n\ud83d" + "x" * 10_000, "reason", "a\nb", "file\x1b[0m.jsonl:3"))
    assert line.isprintable() and len(line) < 500
