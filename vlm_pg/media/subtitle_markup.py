"""Plain words of a subtitle: the markup that its format knows is taken away, and nothing else."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

# SubRip has five tags, players know line breaks too; "<laughs>" and "a <b and c> d" are words.
_SRT_TAGS = re.compile(r"</?[bius]\s*>|</?font(?:\s[^<>]*)?>", re.IGNORECASE)
# W3C WebVTT, 6.4: tags with classes (<c.yellow>), those with a name (<lang en>), timestamps (<00:01.500>)
_VTT_TAGS = re.compile(
    r"</?(?:[cibu]|ruby|rt|lang|v)(?:\.[^\s<>]*)?\s*>|<lang(?:\.[^\s<>]*)?\s[^<>]*>|<(?:\d+:)?\d\d:\d\d\.\d{3}>",
    re.IGNORECASE | re.ASCII,
)
_SPEAKER = re.compile(r"<v(?:\.[^\s<>]*)?\s([^<>]*)>", re.IGNORECASE)
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
# {\an8}, which SubRip files have from another format
_OVERRIDES = re.compile(r"\{\\[^{}]*\}")


def plain_srt(text: str) -> str:
    """The words of a text in SubRip, on one line."""
    return _words(_SRT_TAGS.sub("", text))


def plain_vtt(text: str) -> str:
    """The words of a text in WebVTT, on one line. Who says them stands before them: ``Roger: Hello.``"""
    text = _SRT_TAGS.sub("", _VTT_TAGS.sub("", text))
    said = _words(_SPEAKER.sub("", text), html.unescape)
    return said and _words(_SPEAKER.sub(_name, text), html.unescape)


def _name(match: re.Match[str]) -> str:
    return f" {match[1].strip()}: " if match[1].strip() else ""


def _words(text: str, decode: Callable[[str], str] = str) -> str:
    return " ".join(decode(_OVERRIDES.sub("", _BREAK.sub(" ", text))).split())
