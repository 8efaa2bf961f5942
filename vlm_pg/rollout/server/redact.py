"""A key taken out of what people get to see, however a server has written it."""

from __future__ import annotations

import html
import re
from functools import lru_cache

HIDDEN = "[key]"
# Where a text was cut within the key, what begins like it is hidden with all that follows up to the next space.
BEGINNING_CHARACTERS = 8


def without_key(text: str, key: str | None) -> str:
    """``text`` with the key replaced: as it is, behind backslashes, or in the escapes of JSON, URLs and HTML."""
    return _spellings(key).sub(HIDDEN, text) if key else text


@lru_cache(maxsize=8)
def _spellings(key: str) -> re.Pattern[str]:
    forms = [_spellings_of_one(character) for character in key]
    whole, beginning = "".join(forms), "".join(forms[:BEGINNING_CHARACTERS])
    return re.compile(whole if len(key) <= BEGINNING_CHARACTERS else rf"{whole}|{beginning}\S*")


def _spellings_of_one(character: str) -> str:
    code = ord(character)
    forms = [
        rf"\\*{re.escape(character)}",
        rf"\\+u00{code:02x}",
        rf"\\+x{code:02x}",
        rf"%(?:25)*{code:02x}",
        rf"&(?:amp;)*#0*{code};",
        rf"&(?:amp;)*#x0*{code:x};",
        re.escape(html.escape(character)),
        *(["\\s+", r"\+"] if character == " " else []),
    ]
    # Of hexadecimal digits either case; of the key's own letters only theirs.
    own, *escapes = forms
    return f"(?:{own}|(?i:{'|'.join(escapes)}))"
