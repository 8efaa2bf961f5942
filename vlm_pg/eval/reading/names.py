"""Names by their capital letters, and the word before each: who is meant where a question and an output differ."""

from __future__ import annotations

import re

from vlm_pg.eval.reading.stems import stem

_NAMED = re.compile(r"\b([a-z]{2,20})\s(?!(?:Celsius|Fahrenheit|Kelvin)\b)([A-Z][a-z]{1,20})\b(?!['’]s)")


def names_in(text: str) -> frozenset[tuple[str, str]]:
    """Each name within a sentence of ``text``, behind the stem of the word before it.

    names_in("What percentage of voters chose Kim?") -> {("chos", "Kim")}
    """
    return frozenset((stem(word), name) for word, name in _NAMED.findall(text))


def tells_of_another(text: str, asked: frozenset[tuple[str, str]], *, anyhow: bool = False) -> bool:
    """Whether ``text`` has another name behind a word that the question has a name behind, and no name of its.

    ``anyhow``: whatever word it is behind.

    tells_of_another("40% chose Lee", names_in("What percentage of voters chose Kim?")) -> True
    """
    told = names_in(text)
    words, names = {word for word, _ in asked}, {name for _, name in asked}
    is_named = any(re.search(rf"\b{name}\b", text) for name in names)
    return not is_named and any(anyhow or word in words for word, _ in told)
