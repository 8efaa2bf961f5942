"""API keys: read from the environment, and masked in texts of servers."""

from __future__ import annotations

import os
import re
from functools import lru_cache

from vlm_pg.errors import ConfigError

# The usual variable. Many servers need no key.
USUAL_VARIABLE = "OPENAI_API_KEY"
HIDDEN = "[key]"
# Shorter keys ("EMPTY", "token") are no secret, and words that a model may use.
SECRET_CHARACTERS = 16
# Of a key that was cut off, so much must be left for it to be masked, up to the next space.
BEGINNING_CHARACTERS = 8
# A bearer token (RFC 6750): hardly any of its characters changes in JSON, a URL or HTML.
_BEARER_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


def read_key(section: str, variable: str) -> str | None:
    """The key in an environment variable, stripped; None if the usual variable is empty.

    Raises:
        ConfigError: another variable that is not set, or something that is no bearer token, which is not shown.
    """
    key = os.environ.get(variable, "").strip()
    if not key:
        if variable == USUAL_VARIABLE:
            return None
        raise ConfigError(
            f"{section}.api_key_variable is {variable}, which is empty or not set in the environment. Set it to the "
            f"server's key, or leave {section}.api_key_variable out for a server without one."
        )
    if not _BEARER_TOKEN.fullmatch(key):
        raise ConfigError(
            f"The environment variable {variable} holds no bearer token: letters, digits and - . _ ~ + / of ASCII, "
            "and = at the end. Set it to the server's key alone. (Its value is not shown.)"
        )
    return key


def without_key(text: str, key: str | None) -> str:
    """``text`` with the key masked: plain, or in the escapes of JSON, URLs and HTML."""
    return _written(key).sub(HIDDEN, text) if key else text


def holds_key(text: str, key: str | None) -> bool:
    """Whether a text that must not be changed repeats the key."""
    return key is not None and len(key) >= SECRET_CHARACTERS and key in text


@lru_cache(maxsize=8)
def _written(key: str) -> re.Pattern[str]:
    """The key, or its beginning and what follows up to the next space."""
    forms = [_forms(character) for character in key]
    beginning, rest = "".join(forms[:BEGINNING_CHARACTERS]), "".join(forms[BEGINNING_CHARACTERS:])
    return re.compile(rf"{beginning}(?:{rest}|\S*)")


def _forms(character: str) -> str:
    r"""A character as it is; those that some servers escape also as in ``\/``, ``\u002b``, ``%2B`` or ``&#43;``.

    JSON in JSON doubles backslashes, a URL in a URL writes "%" as "%25".
    """
    if character not in "~+/=":
        return re.escape(character)
    code = f"(?i:{ord(character):02x})"
    return rf"(?:\\{{0,32}}{re.escape(character)}|\\{{1,32}}u00{code}|%(?:25)*{code}|&#(?:x{code}|{ord(character)});)"
