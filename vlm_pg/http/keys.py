"""API keys: read from the environment, and masked in texts, whatever escapes a server has written them with.

Matching takes linear time: a character matches in one way only (atomic groups), and runs of backslashes are shortened
first.
"""

from __future__ import annotations

import html
import os
import re
from functools import lru_cache
from itertools import groupby

from vlm_pg.errors import ConfigError

# The usual variable. Many servers need no key.
USUAL_VARIABLE = "OPENAI_API_KEY"
HIDDEN = "[key]"
# Shorter keys ("EMPTY", "token") are no secret, and words that a model may use.
SECRET_CHARACTERS = 16
# Of a key that was cut off, so much must be left for it to be masked, up to the next space.
BEGINNING_CHARACTERS = 8
# JSON nested five times has as many before a quote.
LONGEST_RUN = 32


def read_key(section: str, variable: str) -> str | None:
    """The key in an environment variable, stripped; None if the usual variable is empty.

    Raises:
        ConfigError: another variable that is not set, or a key that no header can hold, which is not shown.
    """
    key = os.environ.get(variable, "").strip()
    if not key:
        if variable == USUAL_VARIABLE:
            return None
        raise ConfigError(
            f"{section}.api_key_variable is {variable}, which is empty or not set in the environment. Set it to the "
            f"server's key, or leave {section}.api_key_variable out for a server without one."
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"The environment variable {variable} holds something other than printable ASCII, which no key is. Set it "
            "to the server's key alone. (Its value is not shown.)"
        )
    return key


def without_key(text: str, key: str | None) -> str:
    """``text`` with the key masked: plain, behind backslashes, or in the escapes of JSON, URLs and HTML.

    With a key, runs of backslashes are shortened to ``LONGEST_RUN``.
    """
    if not key:
        return text
    text = _LONG_RUN.sub(lambda run: run[0][:LONGEST_RUN], text.replace(key, HIDDEN))
    for pattern in _spellings(key):
        text = pattern.sub(HIDDEN, text)
    return text


def holds_key(text: str, key: str | None) -> bool:
    """Whether a text that must not be changed repeats the key."""
    return key is not None and len(key) >= SECRET_CHARACTERS and key in text


_LONG_RUN = re.compile(rf"\\{{{LONGEST_RUN + 1},}}")


@lru_cache(maxsize=8)
def _spellings(key: str) -> tuple[re.Pattern[str], ...]:
    """Two patterns: a character that also begins an escape ("%", "u" after a backslash) is matched as either."""
    patterns = [_forms(key, own_first) for own_first in (True, False)]
    if len(key) > BEGINNING_CHARACTERS:
        beginnings = [_forms(key[:BEGINNING_CHARACTERS], own_first) for own_first in (True, False)]
        patterns = [rf"{whole}|{beginning}\S*" for whole, beginning in zip(patterns, beginnings, strict=True)]
    return tuple(map(re.compile, patterns))


def _forms(key: str, own_first: bool) -> str:
    """Pattern of all characters in order; runs of backslashes and spaces vary in length, and match together."""
    forms, behind_backslash = [], False
    for character, run in groupby(key):
        count = len(list(run))
        escapes = "|".join(_escapes(character, "*" if behind_backslash else "+"))
        # Hexadecimal digits in either case; the key's own letters as they are.
        escaped = f"(?i:{escapes})"
        if character == "\\":
            parts = [rf"\\{{{min(count, LONGEST_RUN)},}}", f"(?:{escaped}){{{count}}}"]
            repeat = 1
        elif character == " ":
            parts, repeat = [r"\s+", rf"(?:\\+ |\+|{escaped}){{{count}}}"], 1
        else:
            parts, repeat = [rf"\\*{re.escape(character)}", escaped], count
        # "%25" may be a percent sign or its escape: backtracking decides.
        group = "?:" if character == "%" else "?>"
        forms += [f"({group}{'|'.join(parts if own_first else reversed(parts))})"] * repeat
        behind_backslash = character == "\\"
    return "".join(forms)


def _escapes(character: str, backslashes: str) -> list[str]:
    code, named = ord(character), html.escape(character)
    return [
        rf"\\{backslashes}u00{code:02x}",
        rf"\\{backslashes}x{code:02x}",
        rf"%(?:25)*{code:02x}",
        rf"&(?:amp;)*#0*{code};",
        rf"&(?:amp;)*#x0*{code:x};",
        *([re.escape(named)] if named != character else []),
    ]
