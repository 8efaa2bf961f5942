"""How likely each option is, where that is all that is said: "A: 10%, B: 70%, C: 20%" chooses B."""

from __future__ import annotations

import re
from collections.abc import Collection

_SHARE = re.compile(
    r"(?:option\s)?\(?([A-Z])\)?\s{0,3}[:=–-]?\s{0,3}\(?([0-9]{1,3}(?:\.[0-9]{1,3})?)\s?%\)?", re.IGNORECASE
)
_BETWEEN = re.compile(r"[\s,;|/*•-]{0,12}(?:and\s{1,3})?")
_WHOLE = 100


def is_shares(text: str, letters: Collection[str]) -> bool:
    """Whether ``text`` is nothing but options' letters, at least two, each with a share."""
    return len(_shares(text, letters)) > 1


def likeliest(text: str, letters: Collection[str]) -> str | None:
    """Of shares that are all that ``text`` says the letter with the largest one.

    None where several are, or where the shares are more than the whole: then they are something else than how likely
    each option is.
    """
    shares = _shares(text, letters)
    if len(shares) < 2 or sum(shares.values()) > _WHOLE:
        return None
    most = max(shares.values())
    best = [letter for letter, share in shares.items() if share == most]
    return best[0] if len(best) == 1 else None


def _shares(text: str, letters: Collection[str]) -> dict[str, float]:
    found = list(_SHARE.finditer(text))
    rest = _SHARE.sub("\0", text).strip(" .\n").split("\0")
    is_all = bool(found) and all(_BETWEEN.fullmatch(one) for one in rest)
    shares = {one[1].upper(): float(one[2]) for one in found}
    is_told_once = len(shares) == len(found) and set(shares) <= set(letters)
    return shares if is_all and is_told_once else {}
