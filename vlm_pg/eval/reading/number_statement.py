"""One statement: the number that it says is the one asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from vlm_pg.answers.clauses import affirmed
from vlm_pg.answers.numbers import in_unit_of
from vlm_pg.eval.reading.asked import Asked, stem
from vlm_pg.eval.reading.clock import with_length_in_units
from vlm_pg.eval.reading.quantities import Quantity, quantities_in
from vlm_pg.eval.reading.statements import without_reason
from vlm_pg.eval.reading.subjects import about_the_asked

MAX_STATEMENT_CHARACTERS = 2000

_CUE = re.compile(
    r"\b(?:so|therefore|thus|hence|consequently|i\.e\.,?|that\s{1,3}is|in\s{1,3}total|altogether|overall|"
    r"a\s{1,3}total\s{1,3}of|which\s{1,3}(?:is|means|gives|makes|leaves|equals|comes\s{1,3}to)|(?:makes|leaves|leaving|"
    r"gives|giving|totals?|totall?ing|yields|comes\s{1,3}to|amounts\s{1,3}to|"
    r"equals|results\s{1,3}in|making|brings)|we\s{1,3}(?:get|have|obtain)|finally|daher|somit|"
    r"folglich|insgesamt|ergibt|d\.h\.,?|macht|"
    r"donc|ainsi|au\s{1,3}total|soit|por\s{1,3}(?:lo\s{1,3})?tanto|así\s{1,3}que|en\s{1,3}total|"
    r"portanto|no\s{1,3}total|ou\s{1,3}seja|quindi|dunque|in\s{1,3}totale|"
    r"dus|в\s{1,3}итоге|поэтому|значит|итого|следовательно|получаем|получается|т\.е\.,?|dans|"
    r"also(?=\s{1,3}[a-zäöü]{0,12}\s{0,3}[0-9]))(?!\w)|∴|"
    r"所以|因此|即|也就是|一共|总共|共有?|合计|剩下|还剩|得到|等于|つまり|したがって|よって|だから|合計|全部で|残り|따라서|그래서|모두|총",
    re.IGNORECASE,
)
_ENGLISH_ALSO = re.compile(r"^also$", re.IGNORECASE)
_CONTEST_LETTER = re.compile(r"^\W{0,6}\(?\s{0,3}[A-J]\s{0,3}\)\s{1,6}(?=\S)")
_MODULUS = re.compile(
    r"\(\s{0,3}mod\s[^()]{1,20}\)|\bmod(?:ulo)?\s{1,3}[0-9]{1,9}|\bp?mod\s?\(?[0-9]{1,9}\)?", re.IGNORECASE
)
_BRACKETED = re.compile(r"(?<![\w°+*/^=×·÷-])(?<![+*/^=×·÷-]\s)\([^()]{0,300}\)|（[^（）]{0,300}）")
_EQUALS = re.compile(r"(?<![<>!≤≥=])=(?![=>])|≈|≡|≅")
_BOUNDARY = re.compile(r"[,;:](?![0-9])|\s(?:and|und|et|y|so|where|with|therefore)\s|[。，；：]")
_RELATION = re.compile(r"[<>≤≥≠]")
_OR = re.compile(r"\s(?:or|oder|ou|o|или|eller|veya|albo|either)\s|或者?|または|또는|أو|\s/\s(?=[0-9$])", re.IGNORECASE)
_COPULA = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|measures?|contains?|has|have|becomes?|gets|beträgt|ist|"
    r"sind|war|kostete|est|sont|es|son|é|são|è|sono|era|равн\w|составляет|это)\b|[:：=≈]|是|为|有|は|"
    r"は約|는|은)"
    r"\s{0,3}(?:(?:about|approximately|approx|roughly|around|nearly|exactly|only|just|circa|ca|"
    r"etwa|ungefähr|rund|environ|unos|aproximadamente|cerca\s{1,3}(?:de|di)|около|примерно|大约|约|"
    r"約|≈|~|now|at)\s{0,3}){0,2}$",
    re.IGNORECASE,
)
_NONE_LEFT = re.compile(
    r"\b(?:none|nothing|nichts|rien|nada|keine?|"
    r"aucune?s?)\b(?!\s{1,3}(?:of\s{1,3}the\s{1,3}(?:above|options|answers|choices)|other|more|else))"
    r"(?=[\s\w]{0,24}\b(?:left|remain\w{0,3}|at\s{1,3}all|übrig|in\s{1,3}(?:the|this)|visible)\b)|^\W{0,9}none\W{0,9}$",
    re.IGNORECASE,
)
_TOTAL_AFTER = re.compile(
    r"\s{0,3}(?:[a-z]{1,20}\s{1,3})?(?:in\s{1,3}total|altogether|overall|in\s{1,3}all|insgesamt|au\s{1,3}total|en\s{1,3}total)\b",
    re.IGNORECASE,
)
_CANNOT_TELL = re.compile(
    r"\b(?:can(?:no|['’])t|can\snot|could\s?n[o'’]t|unable\sto|impossible\sto|hard\sto|do(?:es)?\s?n['’]t|do(?:es)?\snot)\s"
    r"(?:\w{1,12}\s){0,2}(?:tell|say|determine|know|see|make\sout|show)\s(?:\w{1,12}\s){0,1}(?:how|what|which|whether)\b|"
    r"(?:无法|不能|看不)[^。0-9]{0,8}(?:多少|几)",
    re.IGNORECASE,
)
_OTHERWISE = re.compile(r"^\W{0,4}(?:otherwise|else|if\snot)\b|否则", re.IGNORECASE)
_FRACTION_WORD = re.compile(r"\s{1,3}(?:halves|thirds|quarters|fourths|fifths|sixths|eighths|tenths)\b", re.IGNORECASE)
_OF_THEM = re.compile(r"\s{1,3}of\s(?:them|these|those)\b", re.IGNORECASE)
_OF_WHOM = re.compile(r"\bof\s(?:them|these|those|whom|which),?\s(?:only\s|just\s|exactly\s|about\s)?$", re.IGNORECASE)
_NOBODY = re.compile(r"\b(?:nobody|no\s?one)\b(?!\s(?:knows?|can|could|else|but|except)\b)", re.IGNORECASE)
_ORPHAN = re.compile(r"\bones?\b", re.IGNORECASE)
_NEARLY = re.compile(
    r"(?:\b(?:nearly|almost|not\squite|close\sto|fast|presque|casi|quasi)\s|将近|接近)$", re.IGNORECASE
)
_NO_COUNT = re.compile(r"\s{0,3}(?:times\s(?:as|more)\b|o['’]clock\b)", re.IGNORECASE)
_OF_A_GROUP = re.compile(r"(?<![\w.,-])(one|[0-9]{1,6})\sof\s(?:the|these|those|all)\s$", re.IGNORECASE)
_PART_OF_WHOLE = re.compile(
    r",\s(?:of\s(?:whom|which|these|them)\s[^,.;]{1,80}|(?:[0-9]{1,9}\s|some\s|most\s)of\s(?:whom|which)\s[^,.;]{1,80}|"
    r"including\s[0-9][^,.;]{1,60}),\s",
    re.IGNORECASE,
)
_NEGATED = re.compile(r"\b(?:no|not|none|never|without)\b|n['’]t\b", re.IGNORECASE)
# Of no direction but its number's: "it drops by 10" is another thing.
_CHANGED_BY = re.compile(r"\b(changes|changed|change)\sby\s(?=[-−+]?[0-9])", re.IGNORECASE)
State = Literal["nothing", "one", "unclear"]


@dataclass(frozen=True)
class Found:
    """What a statement says: no number, one, or several or something that is not clear.

    ``has_cue``: it says that it concludes ("so", "="). ``is_weak``: its number counts something else by name.
    """

    state: State
    quantity: Quantity | None = None
    has_cue: bool = False
    is_weak: bool = False


def read_statement(statement: str, asked: Asked) -> Found:
    """The number that one sentence, line or box states as what is asked for.

    read_statement("3 trays are empty, so 18 rolls are left", Asked(noun="roll")) finds 18.
    """
    text = _CONTEST_LETTER.sub("", statement[:MAX_STATEMENT_CHARACTERS])
    if asked.is_length:
        text = with_length_in_units(text, asked.unit, is_video=asked.is_video)
    text = _without_part_of_whole(text, asked)
    if "chang" in asked.stems:
        text = _CHANGED_BY.sub(r"\1 is ", text)
    text = asked.of_year(asked.at_start(text))
    text = about_the_asked(text, asked.stems, lambda part: len(quantities_in(part)) == 1 and " than " not in part)
    text = re.sub(r"(?<![aA]t )\bleast\b", "smallest", _zeros(text, asked))
    found_in = quantities_in(text)
    if not found_in:
        return Found("nothing")
    if asked.is_elsewhere(re.split(r"[,.;]", text[found_in[-1].end :], maxsplit=1)[0]):
        return Found("unclear")
    if _OTHERWISE.match(text) or _FRACTION_WORD.match(text, found_in[-1].end):
        return Found("unclear")
    if (untold := _CANNOT_TELL.search(text)) and untold.start() > found_in[-1].start:
        return Found("unclear")
    if asked.is_of_another_name(text):
        return Found("unclear")
    if asked.is_of_another_kind(text) or any(asked.is_from_elsewhere(text[one.end :]) for one in found_in):
        return Found("unclear", is_weak=True)
    kept = _without_asides(affirmed(text))
    if not quantities_in(kept):
        return Found("unclear")
    concluded = _concluded(without_reason(kept))
    has_cue = concluded != without_reason(kept)
    if asked.is_opposed(concluded):
        return Found("unclear")
    found = _from_equation(concluded, asked) or _from_quantities(concluded, asked)
    if found.state == "nothing":
        found = Found("unclear")
    return replace(found, has_cue=found.has_cue or has_cue, is_weak=found.is_weak and not (found.has_cue or has_cue))


def _without_part_of_whole(text: str, asked: Asked) -> str:
    """``text`` without "of whom 70 are women" behind what is counted, where nobody asks about those."""

    def kept(aside: re.Match[str]) -> str:
        before = quantities_in(text[: aside.start()])
        is_of_counted = bool(before) and asked.is_counted(text[before[-1].end : aside.start()])
        return " " if is_of_counted and not _long_words(aside[0]) & {stem(word) for word in asked.words} else aside[0]

    return _PART_OF_WHOLE.sub(kept, text) if asked.noun else text


def _zeros(text: str, asked: Asked) -> str:
    """``text`` with 0 where it says that there is none of what is counted."""
    if asked.noun:
        noun = rf"((?:[a-z]{{1,20}}\s{{1,3}}){{0,2}}{re.escape(asked.noun)}\w{{0,3}}\b)"
        text = re.sub(
            rf"\b(?:no|not\s{{1,3}}any|zero)\s{{1,3}}(?!other|more|additional|further){noun}", r"0 \1", text, flags=re.I
        )
        text = re.sub(rf"(?:n't|n’t)\s{{1,3}}any\s{{1,3}}{noun}", r" 0 \1", text, flags=re.I)
        text = _NONE_LEFT.sub("0", text)
        if asked.noun in ("people", "person"):
            text = _NOBODY.sub("0 people", text)
    return text


def _without_asides(text: str) -> str:
    """``text`` without a modulus, and without what is in brackets unless that holds its only number."""
    text = _MODULUS.sub(" ", text)
    shorter = _BRACKETED.sub(" ", text)
    return shorter if quantities_in(shorter) else text


def _concluded(text: str) -> str:
    """What follows the last word of conclusion that a number follows; all of ``text`` without one."""
    clean = [quantity.start for quantity in quantities_in(text) if quantity.aside not in ("part", "bound")]
    start = 0
    for cue in _CUE.finditer(text):
        if _ENGLISH_ALSO.match(cue[0]) and re.search(r"\b(?:the|is|are|there)\b", text):
            continue
        if clean and clean[-1] >= cue.end() and not re.match(r"\s?[:.]", text[cue.end() :]):
            start = cue.end()
    return text[start:]


def _from_equation(text: str, asked: Asked) -> Found | None:
    """The value of the equation in ``text``; None if there is none."""
    chains, rest = _chains(text)
    if not chains:
        return None
    behind = [one for one in quantities_in(rest) if not one.aside]
    if behind and _COPULA.search(rest[: behind[-1].start]):
        return _from_quantities(rest, asked)
    clean = [one for one in quantities_in(text) if not one.aside]
    if len({_key(one, asked) for one in clean}) > 1 and _OR.search(text.replace(" / ", "/")):
        return Found("unclear")
    values = [(left, _value_of(sides)) for left, sides in chains]
    asked_for = [value for left, value in values if asked.symbol and re.sub(r"\s", "", left).endswith(asked.symbol)]
    if asked_for:
        value = asked_for[-1]
        return Found("unclear") if value is None else Found("one", value, has_cue=True)
    distinct = {None if value is None else _key(value, asked) for _, value in values}
    last_left, last = values[-1]
    if last is None:
        return Found("unclear")
    # "m = 8 and n = 17" gives two things their values; a sum worked out at the end is a result.
    if len(distinct) > 1 and not _is_computation(last_left):
        return Found("unclear")
    return Found("one", last, has_cue=True)


def _chains(text: str) -> tuple[list[tuple[str, list[str]]], str]:
    """Equations, each as its left side and all sides, and the text behind: "a = 2 + 3 = 5 and b = 1" has two."""
    chains: list[tuple[str, list[str]]] = []
    begin, rest = 0, 0
    for piece in [*_BOUNDARY.finditer(text), None]:
        part = text[begin : piece.start() if piece else len(text)]
        sides = _EQUALS.split(part)
        if len(sides) > 1:
            chains.append((sides[0], sides))
            rest = piece.end() if piece else len(text)
        begin = piece.end() if piece else len(text)
    return chains, text[rest:]


def _value_of(sides: list[str]) -> Quantity | None:
    """The number an equation comes to: its last side that is one, from the right, nothing worked out."""
    last = _lone(sides[-1])
    if last is not None:
        return last
    return _lone(sides[0], at_end=True) if len(sides) == 2 and _is_computation(sides[1]) else None


def _lone(side: str, *, at_end: bool = False) -> Quantity | None:
    found = quantities_in(side)
    if at_end:
        return found[0] if len(found) == 1 and not found[0].aside and not side[found[0].end :].strip() else None
    if not found or found[0].aside or side[: found[0].start].strip(" ~≈"):
        return None
    others = [one for one in found[1:] if not one.aside]
    return found[0] if not others or not _OR.search(side) else None


def _is_computation(side: str) -> bool:
    return re.search(r"[0-9a-zA-Z)²]\s?[-+×÷*·/^]\s?[0-9a-zA-Z(√]", side) is not None


def _from_quantities(text: str, asked: Asked) -> Found:
    if _RELATION.search(text) and not _EQUALS.search(text):
        return Found("unclear")
    if asked.noun and (part := _of_them(text, asked) or _of_a_group(text, asked)):
        return Found("one", part)
    clean = [one for one in quantities_in(text) if not one.aside]
    if asked.noun and asked.unit is None:
        clean = [one for one in clean if not _is_less_or_part(text, one, asked)]
    clean = [one for one in clean if one.unit is not None or not asked.is_no_length(text[one.end :])]
    clean = _of_dimension(text, clean, asked)
    clean = _of_the_kind([one for one in clean if not _is_no_count(text, one, asked)], asked)
    if not clean:
        is_part = any(one.aside in ("part",) for one in quantities_in(text))
        return Found("unclear", is_weak=is_part)
    if _are_of_different_things(text, clean, asked):
        return Found("unclear")
    if len({_key(one, asked) for one in clean}) == 1:
        return Found("one", clean[-1], is_weak=_is_of_something_else(text, clean[-1], asked))
    if any(_OR.search(text[one.end : other.start]) for one, other in pairwise(clean)):
        return Found("unclear")
    counted = [one for one in clean if asked.is_counted(text[one.end :]) or _ORPHAN.match(text[one.end :].lstrip())]
    counted = [one for one in counted if asked.is_modified(text[one.end :])] or counted
    if counted and len({_key(one, asked) for one in counted}) == 1 and asked.states_left(text):
        return Found("one", counted[-1])
    total = [one for one in clean if _TOTAL_AFTER.match(text[one.end :])]
    if len(total) == 1:
        return Found("one", total[0], has_cue=True)
    stated = [one for one in clean if _COPULA.search(text[max(0, one.start - 60) : one.start])]
    if len(stated) == 1 and stated[0] is clean[-1] and not text[stated[0].end :].strip(" .!。"):
        return Found("one", stated[0])
    return Found("unclear")


def _of_dimension(text: str, found: list[Quantity], asked: Asked) -> list[Quantity]:
    """Of numbers that each name their dimension the one of the dimension asked for: "2 m long and 1 m wide"."""
    told = [asked.is_of_dimension(text[one.end :]) for one in found]
    if not asked.dimensions or len(found) < 2 or None in told or told.count(True) != 1:
        return found
    return [found[told.index(True)]]


def _of_the_kind(found: list[Quantity], asked: Asked) -> list[Quantity]:
    """Those in a unit of the kind asked for, if there are any; else all."""
    if asked.is_percent:
        fitting = [one for one in found if one.number.is_percent]
    elif asked.unit is not None:
        fitting = [one for one in found if one.unit and one.unit.factor_to(asked.unit) is not None]
    else:
        fitting = []
    return fitting or found


def _of_them(text: str, asked: Asked) -> Quantity | None:
    """Of those counted the number that the question asks for: "6 people, and 4 of them wear a hat"."""
    found = quantities_in(text)
    counted = [one for one in found if asked.is_counted(text[one.end :])]
    parts = [
        one
        for one in found
        if counted
        and one.start > counted[-1].end
        and (_OF_THEM.match(text, one.end) or _OF_WHOM.search(text[: one.start]))
    ]
    if len(parts) != 1 or len(counted) != 1:
        return None
    said = _long_words(text[parts[0].end :]) - _long_words(text[: parts[0].start])
    return replace(parts[0], aside="") if said & {stem(word) for word in asked.words} else None


def _of_a_group(text: str, asked: Asked) -> Quantity | None:
    """How many of a counted group the question asks for: "one of the 4 people wears a hat"."""
    counted = [one for one in quantities_in(text) if asked.is_counted(text[one.end :])]
    if len(counted) != 1 or not (part := _OF_A_GROUP.search(text[: counted[0].start])):
        return None
    rest = text[counted[0].end :]
    said = _long_words(rest) - {asked.noun}
    if _NEGATED.search(text) or not said & {stem(word) for word in asked.words}:
        return None
    digits = "1" if part[1].lower() == "one" else part[1]
    return replace(quantities_in(digits)[0], start=part.start(1), end=part.end(1))


def _long_words(text: str) -> set[str]:
    return {stem(word) for word in re.findall(r"[a-z]{4,20}", text.lower())}


def _are_of_different_things(text: str, found: list[Quantity], asked: Asked) -> bool:
    """Whether equal numbers count things by two names, neither of them the one asked for: "2 men and 2 women"."""
    if not asked.noun or len(found) < 2 or any(asked.is_counted(text[one.end :]) for one in found):
        return False
    names = [re.match(r"\s{1,3}([a-z]{3,20})\b", text[one.end :]) for one in found]
    joined = all(re.search(r"\band\b|,", text[one.end : other.start]) for one, other in pairwise(found))
    return joined and all(names) and len({name[1] for name in names if name}) == len(found)


def _is_no_count(text: str, quantity: Quantity, asked: Asked) -> bool:
    """Whether things are asked for, and a quantity is a percentage, a multiple or a time of day."""
    is_counting = bool(asked.noun) and asked.unit is None and not asked.is_percent
    return is_counting and (quantity.number.is_percent or _NO_COUNT.match(text, quantity.end) is not None)


def _is_less_or_part(text: str, quantity: Quantity, asked: Asked) -> bool:
    """Whether a count is of what is nearly so many, of a part of more, or of things where people are asked for."""
    if quantity.unit is not None:
        return False
    rest = text[quantity.end :]
    is_of_things = asked.is_of_no_person(rest) or (quantity.number.value != 1 and asked.is_attribute(rest))
    return _NEARLY.search(text[: quantity.start]) is not None or asked.is_part(rest) or is_of_things


def _is_of_something_else(text: str, quantity: Quantity, asked: Asked) -> bool:
    """Whether a number counts something by a name other than the one asked for: "2 tables"."""
    if not asked.noun or quantity.unit is not None:
        return False
    name = re.match(r"\s{1,3}([a-z]{3,20})\b", text[quantity.end :])
    return bool(name) and not asked.is_counted(text[quantity.end :])


def _key(quantity: Quantity, asked: Asked) -> tuple[float, str]:
    number = in_unit_of(quantity.number, quantity.unit, asked.unit)
    if number is None:
        return quantity.number.value, quantity.unit.name if quantity.unit else ""
    return round(number.value, 9), "%" if number.is_percent and not asked.is_percent else ""
