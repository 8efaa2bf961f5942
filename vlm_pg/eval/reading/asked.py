"""What a question asks a number of: the unit of its answer and the name of what is counted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vlm_pg.answers.clauses import affirmed
from vlm_pg.answers.numbers import read_quantity
from vlm_pg.answers.units import Unit, parse_unit
from vlm_pg.eval.reading.clock import asks_length_of_time, is_of_video
from vlm_pg.eval.reading.names import names_in, tells_of_another
from vlm_pg.eval.reading.opposites import STATES, says_opposite
from vlm_pg.eval.reading.persons import are_things
from vlm_pg.eval.reading.quantities import unit_named
from vlm_pg.eval.reading.stems import words_in
from vlm_pg.types import Sample

_PERCENT = re.compile(r"\bpercent(?:age)?\b|\bper\s{1,3}cent\b|百分", re.IGNORECASE)
_ASKING = re.compile(
    r"[^.!?。？\n]{0,400}[?？]|(?:find|compute|calculate|determine|evaluate|求)\b[^.!?。？\n]{0,400}", re.I
)
_HOW_MANY = re.compile(r"\bhow\s{1,3}many\s{1,3}((?:[A-Za-z'-]{1,24}(?:\(\w{1,2}\))?\s{0,3}){1,6})", re.IGNORECASE)
_NAMED_UNIT = re.compile(
    r"\(?\bunit\s{0,3}(?:is|:|=)\s{0,3}(?P<said>[^\s)]{1,20})|"
    r"\b(?:in|measured\s{1,3}in)\s{1,3}(?P<within>(?:(?:square|cubic)\s{1,3})?[^\s.,?()]{1,20})",
    re.IGNORECASE,
)
# What a number measures, by the words that say so; what is asked for is not what another of them measures.
_DIMENSIONS = {
    "height": r"heights?|high|tall",
    "width": r"widths?|wide",
    "length": r"lengths?|long",
    "depth": r"depths?|deep",
    "thickness": r"thickness|thick",
    "distance": r"distances?|apart|away|far|gap",
    "area": r"areas?|sizes?",
    "perimeter": r"perimeters?|circumferences?",
    "volume": r"volumes?",
    "weight": r"weights?|weighs?|heavy",
    "radius": r"radius|radii",
    "diameter": r"diameters?",
}
_DIMENSION = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in _DIMENSIONS.items()}
_METRE, _SQUARE_METRE = parse_unit("m"), parse_unit("m^2")
# What ends the name of what is counted: "how many red chairs | are there".
_NAME_END = frozenset(
    [
        "are",
        "is",
        "was",
        "were",
        "do",
        "does",
        "did",
        "can",
        "could",
        "will",
        "would",
        "have",
        "has",
        "had",
        "in",
        "on",
        "of",
        "at",
        "to",
        "from",
        "with",
        "that",
        "which",
        "who",
        "there",
        "be",
        "pass",
        "passes",
        "fit",
        "stand",
        "remain",
        "left",
        "appear",
        "need",
        "needs",
        "wear",
        "wears",
        "enter",
        "hold",
        "carry",
        "sit",
        "walk",
        "cross",
        "jump",
        "take",
        "takes",
        "took",
        "participate",
        "participated",
        "attend",
        "attended",
        "make",
        "makes",
        "made",
        "come",
        "comes",
        "came",
        "buy",
        "bought",
        "go",
        "goes",
        "went",
        "get",
        "gets",
        "got",
    ]
)
_SYMBOL = re.compile(
    r"\bfind\s{1,3}(?:the\s{1,3}value\s{1,3}of\s{1,3})?\$?\s?([^$.?]{1,40}?)\s?(?:\$|[.?]|$)", re.IGNORECASE
)
_LEFT = re.compile(r"\b(?:left|remain\w{0,3})\b", re.IGNORECASE)
_STATES_LEFT = re.compile(
    r"\b(?:left|remain\w{0,3}|over|still|now|übrig|verbleib\w{0,3}|bleib\w{0,3}|rest\w{0,4}|"
    r"quedan?|restam?|restano)\b|剩|残|остал|남",
    re.IGNORECASE,
)
_AT_START = re.compile(
    r"\b(?:at\s(?:the\s)?(?:very\s)?(?:beginning|start|outset)|at\sfirst|initially|originally|to\sbegin\swith)\b",
    re.IGNORECASE,
)
_AFTERWARDS = re.compile(
    r"\b(?:left|remain\w{0,3}|still|now|afterwards?|later|eventually|finally|at\s(?:the\s)?(?:very\s)?end)\b",
    re.IGNORECASE,
)
_PIECE = re.compile(r"(?<=[,;])\s|\s(?=(?:so|and|but|while)\s)")
_FROM_THING = re.compile(
    r"\s{0,3}(?:away\s|apart\s|far\s)?(?:from|to)\s(?:the|an?|its|your)\s((?:[\w-]{1,20}\s?){1,6})", re.IGNORECASE
)
_PLACE = re.compile(r"\bin\s(?:the|this)\s(?:\w{1,15}\s)?(\w{3,20})\b", re.IGNORECASE)
# What says where without naming another place.
_NEUTRAL = (
    "room scene video clip frame image picture shot footage photo view background foreground middle center centre "
    "corner front back end beginning start total question sentence group chart graph table figure line row"
)
_ANY_PLACE = frozenset(_NEUTRAL.split())
_SAME_PLURAL = ("people", "person", "sheep", "fish", "deer", "police", "staff", "aircraft")
_THINGS = re.compile(
    r"\s(?:[a-z-]{2,20}\s)?(?:people|persons?|men|women|children|adults|seats|cushions|pillows|chairs)\b", re.I
)
_DIMENSION_AFTER = re.compile(
    r"\s(?:in\s)?(?:long|wide|deep|high|tall|thick|length|width|depth|height|thickness)\b", re.I
)
_OF_WHOLE = re.compile(r"\s(?:out\s)?of\s([0-9]{1,6})\b")
_YEAR = re.compile(r"(?<![\d.,])(?:1[89]|20)\d\d(?![\d%]|[.,]\d)")


@dataclass(frozen=True)
class Asked:
    """``unit``: of the number that is asked for, None if none is named; ``is_percent``: a percentage is.

    ``noun``: stem of the name of what is counted ("chair"), "" if nothing is. ``symbol``: the variable or term asked
    for, without blanks ("m+n"). ``is_left``: what is left over is asked for. ``words``: those of
    the asking sentence. ``modifiers``: the words before the noun ("red"). ``dimensions``: those
    that the question names, of a length or an area ("height"). ``is_at_start``: what there is at the beginning is asked
    for. ``year``: the one year that the question names, "" without one. ``stems``: of all words of the asking sentence.
    ``places``: where things are counted ("kitchen"). ``is_length``: how long something takes is asked for.
    ``is_video``: how long a video is. ``names``: of persons and things that are asked about, as
    ``names_in`` has them.
    """

    unit: Unit | None = None
    is_percent: bool = False
    noun: str = ""
    symbol: str = ""
    is_left: bool = False
    words: frozenset[str] = frozenset()
    modifiers: frozenset[str] = frozenset()
    dimensions: frozenset[str] = frozenset()
    is_at_start: bool = False
    year: str = ""
    stems: frozenset[str] = frozenset()
    places: frozenset[str] = frozenset()
    is_length: bool = False
    is_video: bool = False
    names: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, sample: Sample) -> Asked:
        """What ``sample`` asks; the unit is ``details["unit"]``, else the one its question or gold answer names."""
        question = sample.question
        given = str(sample.details.get("unit") or "").strip()
        asking = " ".join(match[0] for match in _ASKING.finditer(question[:4000])) or question[:400]
        is_percent = given.lower() in ("percent", "%", "percentage") or (not given and bool(_PERCENT.search(asking)))
        unit = None if is_percent else _given_unit(given) or (_question_unit(asking, question) if not given else None)
        if unit is None and not is_percent:
            unit = read_quantity(sample.answer)[1]
        counted = _HOW_MANY.search(asking)
        name = _counted_name(counted[1]) if counted else ""
        symbol = _SYMBOL.search(question)
        words = frozenset(word for word in re.findall(r"[a-z]{4,20}", asking.lower()))
        return cls(
            unit,
            is_percent,
            "" if unit_named(name) else stem(name),
            re.sub(r"\s", "", symbol[1]) if symbol else "",
            bool(_LEFT.search(asking)),
            words,
            frozenset(_modifiers(counted[1]) if counted else ()),
            _dimensions(asking) if unit and _is_spatial(unit) else frozenset(),
            _AT_START.search(asking) is not None and not _AFTERWARDS.search(asking),
            years[0] if len(years := sorted(set(_YEAR.findall(asking)))) == 1 else "",
            frozenset(words_in(asking)),
            frozenset(stem(one) for one in _PLACE.findall(asking)) - _ANY_PLACE,
            asks_length_of_time(question[:4000]),
            is_of_video(question[:4000]),
            names_in(asking),
        )

    def is_counted(self, text: str) -> bool:
        """Whether ``text`` begins with the name of what is counted, at most two words before it."""
        if not self.noun:
            return False
        words = re.findall(r"[^\W\d_]{1,30}|[.,;:]", text[:80])[:3]
        for word in words:
            if word in ".,;:" or word.lower() in ("and", "or"):
                return False
            if stem(word) == self.noun:
                return True
        return False

    def is_modified(self, text: str) -> bool:
        """Whether one of the first words of ``text`` is one that tells what is counted from others: "red" chairs."""
        return bool(self.modifiers & set(re.findall(r"[a-z]{1,24}", text[:60].lower())[:3]))

    def is_of_another_kind(self, text: str) -> bool:
        """Whether ``text`` names another dimension than the question does: a width where a distance is asked for."""
        named = _dimensions(text) if self.dimensions else frozenset()
        return bool(named) and not named & self.dimensions

    def is_opposed(self, text: str) -> bool:
        """Whether ``text`` tells of the opposite of what is asked: who failed, where those who passed are counted."""
        return says_opposite(words_in(text), self.stems, STATES)

    def is_of_another_name(self, text: str) -> bool:
        """Whether ``text`` tells of another person or thing than the one that the question names."""
        return bool(self.names) and tells_of_another(text, self.names, anyhow=self.is_percent)

    def is_part(self, text: str) -> bool:
        """Whether ``text``, which follows a count, says that it is a part of more than the question names: "3 of 5"."""
        whole = _OF_WHOLE.match(text)
        return whole is not None and whole[1] not in self.stems

    def is_attribute(self, text: str) -> bool:
        """Whether ``text``, which follows a count, has what is counted as an attribute only: "4 dog bowls"."""
        is_one = self.noun and self.noun not in _SAME_PLURAL and not self.noun.endswith("s")
        attribute = rf"\s{{1,3}}(?:[a-z-]{{2,20}}\s){{0,2}}{re.escape(self.noun)}\s[a-z]{{2,20}}(?<![su])(?<!i)s\b"
        return bool(is_one) and re.match(attribute, text, re.IGNORECASE) is not None

    def is_no_length(self, text: str) -> bool:
        """Whether a length or an area is asked for, and ``text``, which follows a bare number, names things."""
        return bool(self.dimensions) and _THINGS.match(text) is not None

    def is_of_dimension(self, text: str) -> bool | None:
        """Whether ``text``, which follows a number, says of which dimension it is, and that is asked for; None: no."""
        said = _DIMENSION_AFTER.match(text)
        return bool(_dimensions(said[0]) & self.dimensions) if said else None

    def is_of_no_person(self, text: str) -> bool:
        """Whether ``text``, which follows a count, names other things than people, where people are asked for."""
        return are_things(text, self.noun)

    def is_from_elsewhere(self, text: str) -> bool:
        """Whether ``text``, which follows a distance, measures it from a thing that the question does not name."""
        end = _FROM_THING.match(text) if "distance" in self.dimensions else None
        return end is not None and not self.stems & set(words_in(end[1]))

    def is_elsewhere(self, text: str) -> bool:
        """Whether ``text``, which follows a count, names another place than the question does."""
        places = {stem(one) for one in _PLACE.findall(text)}
        return (
            bool(self.places and places)
            and not places & (self.places | _ANY_PLACE)
            and not self.places & set(words_in(text))
        )

    def at_start(self, text: str) -> str:
        """``text`` without what it tells of afterwards, where the beginning is asked for."""
        if not self.is_at_start:
            return text
        pieces = _PIECE.split(text)
        return " ".join(one for one in pieces if _AT_START.search(one) or not _AFTERWARDS.search(one))

    def of_year(self, text: str) -> str:
        """What ``text``, which tells of several years, says of the one asked for; all of it where that is not clear.

        of "In 2010 it was 130 and in 2015 it was 145", asked for 2015, " it was 145"
        """
        if not self.year or len(set(_YEAR.findall(text))) < 2 or affirmed(text) != text:
            return text
        value = rf"(\S{{1,20}}(?:\s(?!and|but|or)[^\W\d_]{{1,12}})?)\s(?:in|by|for)\s{self.year}\b"
        before = re.search(value, text)
        if before and re.search(r"\d", before[1]) and not _YEAR.search(before[1]):
            return before[1]
        pieces = [one for one in _PIECE.split(text) if self.year in one]
        if len(pieces) != 1 or len(set(_YEAR.findall(pieces[0]))) != 1:
            return text
        return re.sub(rf"\b(?:in\s)?{self.year}\b", " ", pieces[0], flags=re.IGNORECASE)

    def states_left(self, text: str) -> bool:
        """Whether ``text`` says what is left, where that is asked."""
        return not self.is_left or _STATES_LEFT.search(text) is not None


def stem(word: str) -> str:
    """An English noun without its plural: "boxes" -> "box", "chair(s)" -> "chair"."""
    word = re.sub(r"\(\w{1,2}\)", "", word.lower().strip())
    for ending, left in (("ies", "y"), ("shes", "sh"), ("ches", "ch"), ("xes", "x"), ("sses", "ss"), ("s", "")):
        if word.endswith(ending) and len(word) > len(ending) + 2 and not word.endswith("ss"):
            return word[: -len(ending)] + left
    return word


def _dimensions(text: str) -> frozenset[str]:
    return frozenset(name for name, pattern in _DIMENSION.items() if pattern.search(text))


def _is_spatial(unit: Unit) -> bool:
    return any(known is not None and unit.factor_to(known) is not None for known in (_METRE, _SQUARE_METRE))


def _counted_name(words: str) -> str:
    """The last word of a name: "green spheres are left" -> "spheres"."""
    name = ""
    for word in words.split():
        if word.lower() in _NAME_END:
            break
        name = word
    return name


def _modifiers(words: str) -> list[str]:
    """The words of a name before its last: "red balls are" -> ["red"]."""
    name: list[str] = []
    for word in words.lower().split():
        if word in _NAME_END:
            break
        name.append(word)
    return name[:-1]


def _given_unit(given: str) -> Unit | None:
    return (parse_unit(given) or unit_named(given)) if given else None


def _question_unit(asking: str, question: str) -> Unit | None:
    counted = _HOW_MANY.search(asking)
    if counted and (unit := unit_named(_counted_name(counted[1]))):
        return unit
    for text in (asking, question[:4000]):
        for match in _NAMED_UNIT.finditer(text):
            written = match["said"] or match["within"]
            if unit := parse_unit(written) or (unit_named(written) if len(written) > 2 else None):
                return unit
    return None
