"""Words as they are compared: "wiped", "wipes" and "wiping" are one word, and so are "three" and "3"."""

from __future__ import annotations

import re
from functools import lru_cache

from vlm_pg.answers.numbers import ONES, TENS

_WORD = re.compile(r"[^\W_]{1,60}(?:['’][^\W\d_]{1,3})?")
_NUMBERS = {word: str(number) for number, word in enumerate([*ONES, TENS[0]])}
_NUMBERS |= {"once": "1", "twice": "2", "thrice": "3"}
# Forms of verbs that no ending gives, the first one for all.
_IRREGULAR = {
    form: forms.split()[0]
    for forms in (
        "stand stood", "sit sat seated", "run ran", "throw threw thrown", "catch caught", "take took taken", "get got",
        "give gave given", "go went gone", "come came", "fall fell fallen", "fly flew flown", "hold held",
        "hit hitting",
        "make made", "put putting", "see saw seen", "draw drew drawn", "drive drove driven", "drink drank drunk",
        "eat ate eaten", "break broke broken", "build built", "buy bought", "bring brought", "choose chose chosen",
        "cut cutting", "do did done", "feel felt", "find found", "freeze froze frozen", "hide hid hidden", "keep kept",
        "lay laid", "lie lay lain lying", "lose lost", "meet met", "ride rode ridden", "rise rose risen",
        "sing sang sung",
        "sink sank sunk", "sleep slept asleep", "speak spoke spoken", "spin spun", "steal stole stolen", "sweep swept",
        "swim swam swum", "swing swung", "tear tore torn", "tell told", "think thought", "wear wore worn",
        "write wrote written", "blow blew blown", "shake shook shaken", "grow grew grown", "shoot shot", "fight fought",
        "push pushed", "child children", "man men", "woman women", "foot feet", "tooth teeth",
        "person people", "knife knives", "leave leaves leaf",
    )
    for form in forms.split()
}  # fmt: skip
_IRREGULAR |= {"fetch": "get", "fetched": "get", "fetches": "get", "fetching": "get", "beneath": "under"}
_DOUBLED = re.compile(r"([bdgmnprt])\1$")


def words_in(text: str) -> list[str]:
    """The stems of all words of ``text``, in order: words_in("He wiped 2 cups") -> ["he", "wip", "2", "cup"]."""
    return [stem(word) for word in _WORD.findall(text)]


@lru_cache(maxsize=4096)
def stem(word: str) -> str:
    """What is compared of a word; of the Latin script its inflection is left out."""
    word = word.casefold().replace("’", "'")
    word = word.removesuffix("'s").removesuffix("'")
    if word in _NUMBERS:
        return _NUMBERS[word]
    if word in _IRREGULAR:
        return _bare(_IRREGULAR[word])
    for ending in ("wards", "ward"):
        if word.endswith(ending) and len(word) - len(ending) >= 2:
            return word.removesuffix(ending)
    if len(word) < 4 or not word.isascii() or not word.isalpha():
        return word
    if word.endswith(("ied", "ies")):
        return word[:-3] + "i"
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return _bare(_DOUBLED.sub(r"\1", word.removesuffix(ending)))
    if word.endswith(("sses", "shes", "ches", "xes", "zes")):
        return _bare(word[:-2])
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return _bare(word[:-1])
    return _bare(word)


def _bare(word: str) -> str:
    if len(word) > 3 and word.endswith("e"):
        return word[:-1]
    return word[:-1] + "i" if len(word) > 2 and word.endswith("y") else word
