"""Which option a statement names by its text, in whole or in words that belong to that option alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from vlm_pg.answers.clauses import clauses
from vlm_pg.answers.options import Choices, folded
from vlm_pg.eval.reading.events import is_in_other_order, is_of_another, is_undone
from vlm_pg.eval.reading.option_masks import PLACEHOLDER, OptionMasks, placeholders, without_placeholders
from vlm_pg.eval.reading.option_orders import OptionOrders
from vlm_pg.eval.reading.option_sentences import StatingParts
from vlm_pg.eval.reading.option_words import PLACE_OPPOSITES, STOP, is_done_to, is_opposed, is_substituted, option_words
from vlm_pg.eval.reading.phrasing import gives_up
from vlm_pg.eval.reading.stems import stem
from vlm_pg.eval.reading.symbols import SymbolicOptions, is_symbolic, numbers_in

_DISCOURAGED = re.compile(
    r"\b(?:warn|advis|argu|decid|recommend|caution|vot)\w{0,4}\s(?:\w{1,12}\s){0,2}(?:against|off|of)\b|"
    r"\b(?:discourag|avoid)\w{0,4}\b",
    re.IGNORECASE,
)
_NEARLY = re.compile(
    r"\b(?:nearly|almost)\s(?!certainly|surely|definitely|all\b|every|always|exactly|the\ssame|entirely|completely|"
    r"identical)\w",
    re.IGNORECASE,
)
_GRANTED = re.compile(r"\W{0,4}(?:although|though|while|whereas|unlike|even though)\b", re.IGNORECASE)
_TURN = re.compile(r"\b(?:but|however)\b", re.IGNORECASE)
_NEXT_WORD = re.compile(rf"\b{PLACEHOLDER}([A-Z])\s{{1,3}}([^\W\d_]{{2,30}})")
_CURVE = re.compile(r"\b([A-Za-z]{4,20})(?:\s(?:curve|line|axis))", re.IGNORECASE)
_SO = re.compile(r"\b(?:so|therefore|thus|hence)\b", re.IGNORECASE)
_ATTRIBUTE = re.compile(
    rf"\b(?:the|an?)\s{{1,3}}{PLACEHOLDER}[A-Z]\s{{1,3}}"
    r"(?!(?:one|ones|is|was|at|in|on|and|or|because|since|as|from|to|with|of|for|by|that|which|who|when|while|into)\b)[a-z]{2,20}\s[a-z]",
    re.IGNORECASE,
)
_ARTICLE = re.compile(r"(?:an?|the)\s(?=\S)", re.IGNORECASE)
_ALL_OF_THEM = re.compile(
    r"(?:all\s(?:of\s)?(?:the\s)?(?:above|them|these)|all\sof\sthe\s(?:options|statements))", re.IGNORECASE
)
_LETTERS = r"(?:(?:options?|choices?|statements?)\s)?([A-Z](?:(?:,\s?(?:and\s)?|\sand\s|\s?&\s?)[A-Z]){1,8})"
_ALL_LISTED = re.compile(
    rf"\W{{0,4}}(?:(?i:all\sof)\s{_LETTERS}|{_LETTERS}\sare\sall\s(?:true|correct|right|shown|mentioned|seen))\W{{0,3}}"
)
# "I would pick the hallway" decides between two that were named before.
_PICKS = re.compile(
    r"\b(?:I|we)(?:['’](?:d|ll)|\swould|\swill|\sshould)?\s(?:rather\s|still\s)?(?:pick|choose|select|go\swith|say|opt\sfor|"
    r"guess|settle\son)\b",
    re.IGNORECASE,
)
_HEDGED = re.compile(r"\bor\b|\b(?:both|either)\b", re.IGNORECASE)
_LONGEST_TEXT = 300
_MOST_OTHERS = 2


@dataclass(frozen=True)
class Named:
    """The letters that a statement names by their texts. ``is_whole``: the whole text, or all words that tell it."""

    letters: frozenset[str]
    is_whole: bool


class OptionTexts:
    """The texts of a question's options, prepared for comparison."""

    def __init__(self, choices: Choices, question: str) -> None:
        self.choices = dict(choices)
        self._symbolic = SymbolicOptions(choices)
        worded = {letter: text for letter, text in choices if letter not in self._symbolic.letters}
        self._folded = {letter: folded(text) for letter, text in worded.items()}
        self._all = {letter: frozenset(option_words(worded.get(letter, ""))) for letter, _ in choices}
        together: frozenset[str] = frozenset().union(*self._all.values())
        counted = {word for pair in PLACE_OPPOSITES if set(pair) <= together for word in pair}
        asked = frozenset(option_words(question))
        counted |= {word for word in ("only", "first") if word in together and word not in asked}
        stop = STOP - counted
        common = frozenset.intersection(*(self._all[one] for one in worded)) if len(worded) > 1 else frozenset()
        telling = {letter: words - stop - common for letter, words in self._all.items()}
        # What the question says tells nothing, unless it lists the options.
        without_asked = {letter: words - asked for letter, words in telling.items()}
        is_listed = sum(not without_asked[letter] for letter in worded) * 2 > len(worded)
        self._telling = telling if is_listed else without_asked
        self._orders = OptionOrders(worded, STOP | (asked if not is_listed else frozenset()))
        # Where the options are letters themselves: "point A" is a text, "A" is a letter.
        self.has_letters = all(len(text) == 1 and text.isalpha() for _, text in choices)
        self.has_labels = any(len(text) == 1 and text.isalpha() for _, text in choices)
        self._has_loose = not self.has_labels
        symbols = {word for text in self.choices.values() for word in re.findall(r"\b[A-Z]\b", text)}
        self._symbols = {word[0].upper(): word for word in asked if word[0].upper() in symbols and len(word) > 3}
        self._asked = asked
        self._question, self._told = question, " ".join([question, *self.choices.values()])
        self._is_told_of_undone = is_undone(self._told)
        self._stating = StatingParts(question, asked)
        self._masks = OptionMasks(choices, asked, self._symbolic)
        self.masked, self.unmasked = self._masks.masked, self._masks.unmasked
        self.num_asked_in = self._stating.num_asked_in
        self._denials = [pattern for pattern in (_DISCOURAGED, _NEARLY) if not pattern.search(self._told)]

    def named(self, sentence: str) -> Named | None:
        """What ``sentence`` affirms by options' texts; None if it names no option. No letters: not clear which.

        Whole texts are masked in ``sentence``. What is rejected, granted or told of before does not count.
        """
        plain = self.unmasked(sentence)
        if is_in_other_order(plain, self._question) or is_of_another(plain, self._told):
            return None
        sentence = self._stating.of(sentence)
        parts, reasons, rejected = self._parts(sentence)
        whole = frozenset(letter for part in parts for letter in placeholders(part)) - rejected
        if len(whole) == 1 and self._is_aside(sentence):
            return None
        if any(self._is_part_of_name(part) for part in parts):
            return Named(frozenset(), True)
        if len(whole) > 1 and (turn := _TURN.split(sentence)) and len(turn) > 1:
            last = frozenset(placeholders(turn[-1])) - rejected
            whole = last if len(last) == 1 else whole
        if len(whole) > 1 and _PICKS.search(parts[-1]) and not _HEDGED.search(parts[-1]):
            picked = placeholders(parts[-1]) - rejected
            whole = picked if len(picked) == 1 else whole
        if whole:
            other = (
                self._loose(", ".join(parts), whole | rejected) if len(whole) == 1 and self._is_joined(parts) else None
            )
            return Named(whole | (other.letters if other and other.is_whole else frozenset()), True)
        told = ", ".join(parts)
        return self._loose(told, rejected) or self._by_reasons(reasons, rejected)

    def named_loosely(self, text: str) -> frozenset[str]:
        """The options that words of ``text`` belong to, whatever it says of them."""
        named = self._loose(text, frozenset())
        return named.letters if named else frozenset()

    def all_listed(self, text: str) -> str | None:
        """The option that says "all of the above", where ``text`` only lists all those above it.

        "" for a list of others, None for any other text.
        """
        listed = _ALL_LISTED.fullmatch(text)
        if listed is None:
            return None
        letters = re.findall(r"\b[A-Z]\b", listed[1] or listed[2])
        for place, (letter, option) in enumerate(self.choices.items()):
            if _ALL_OF_THEM.fullmatch(option.strip(" .")):
                return letter if sorted(letters) == sorted(self.choices)[:place] else ""
        return ""

    def says_undecidable(self, sentence: str) -> bool:
        """Whether ``sentence`` gives up by naming an option that does: "Cannot be determined"."""
        named = placeholders(sentence)
        return len(named) == 1 and gives_up(self.choices[min(named)]) and not gives_up(without_placeholders(sentence))

    def _is_aside(self, sentence: str) -> bool:
        """Whether an option is only an attribute in a sentence that says little of what was asked: "a red light"."""
        asked = self._asked - STOP
        told = asked & set(option_words(sentence))
        is_attribute = _ATTRIBUTE.search(sentence) is not None and _SO.search(sentence) is None
        return is_attribute and len(told) * 2 < len(asked)

    def _parts(self, sentence: str) -> tuple[list[str], list[str], frozenset[str]]:
        """The clauses of a sentence that state, those that give reasons, and the options that others reject."""
        parts: list[str] = []
        reasons: list[str] = []
        rejected: frozenset[str] = frozenset()
        for clause in clauses(sentence):
            if clause.is_affirmed and _GRANTED.match(clause.text):
                continue
            if clause.is_affirmed and self._is_denied(clause.text):
                rejected |= placeholders(clause.text)
                continue
            if clause.is_affirmed:
                (reasons if clause.is_reason else parts).append(clause.text)
            elif letters := placeholders(clause.text):
                rejected |= letters
            elif (loose := self._loose(clause.text, frozenset())) and len(loose.letters) == 1:
                rejected |= loose.letters
        return parts, reasons, rejected

    def _is_joined(self, parts: list[str]) -> bool:
        """Whether something is said beside an option's text in the same breath: "she sings and he dances"."""
        return any(re.search(rf"\b{PLACEHOLDER}[A-Z]\s{{1,3}}(?:and\s(?!then\b)|after\s)", part) for part in parts)

    def _is_denied(self, clause: str) -> bool:
        """Whether a clause tells of what is advised against or only nearly happens, where no option does."""
        is_left_undone = not self._is_told_of_undone and is_undone(self.unmasked(clause))
        return is_left_undone or any(pattern.search(clause) for pattern in self._denials)

    def _by_reasons(self, reasons: list[str], rejected: frozenset[str]) -> Named | None:
        whole = frozenset(letter for part in reasons for letter in placeholders(part)) - rejected
        return Named(whole, True) if whole else self._loose(", ".join(reasons), rejected)

    def _is_part_of_name(self, clause: str) -> bool:
        """Whether a word of another option follows an option's text at once: "a car park" is neither."""
        for found in _NEXT_WORD.finditer(clause):
            others = [words for letter, words in self._telling.items() if letter != found[1]]
            if any(stem(found[2]) in words for words in others) and stem(found[2]) not in self._all.get(found[1], ()):
                return True
        return False

    def named_by_order(self, text: str) -> str | None:
        """The option whose steps are all that ``text`` tells of, in the same order."""
        return self._orders.named(text)

    def is_whole_text(self, text: str) -> str | None:
        """The letter of the option whose text ``text`` is, an article before it aside; None without one, or several."""
        if is_symbolic(text):
            return self._symbolic.named(text)
        short = folded(text)
        same = [letter for letter, own in self._folded.items() if own and own == short]
        if not same and len(short) <= _LONGEST_TEXT and (bare := option_words(_ARTICLE.sub("", short))):
            same = [letter for letter, own in self._folded.items() if option_words(_ARTICLE.sub("", own)) == bare]
        return same[0] if len(same) == 1 else None

    def _loose(self, text: str, rejected: frozenset[str]) -> Named | None:
        """The option that words of ``text`` belong to, where they belong to no other."""
        text = without_placeholders(text)
        if ordered := self._orders.named(text):
            return Named(frozenset({ordered}), True)
        if not self._has_loose:
            return None
        text = _CURVE.sub(self._symbol, text)
        left = [letter for letter in self.choices if letter not in rejected]
        telling: frozenset[str] = frozenset().union(*(self._telling[letter] for letter in left))
        told = frozenset(option_words(text)) & telling
        if not told:
            return None
        fitting = [letter for letter in left if told <= self._all[letter]]
        full = [letter for letter in left if self._telling[letter] and self._telling[letter] <= told]
        if len(fitting) > 1:
            fitting = [letter for letter in fitting if letter in full] or fitting
        if len(fitting) == 1 and numbers_in(self.choices[fitting[0]]) not in ([], numbers_in(text)):
            return None
        if len(fitting) == 1 and (
            is_opposed(self._all[fitting[0]], frozenset(option_words(text)))
            or is_substituted(option_words(self.choices[fitting[0]]), option_words(text))
            or is_done_to(self.choices[fitting[0]], text)
        ):
            return None
        if len(fitting) == 1 and fitting[0] not in self._orders.letters:
            is_full = fitting[0] in full
            # One of two words in a sentence about something else names nothing: "the phone rings and he looks up".
            others = frozenset(option_words(text)) - told - self._all[fitting[0]] - self._asked - STOP
            is_enough = is_full or len(told) * 2 > len(self._telling[fitting[0]]) or len(others) <= _MOST_OTHERS
            return Named(frozenset(fitting), is_full) if is_enough else None
        if not fitting and len(full) == 1 and len(self._telling[full[0]]) > 1:
            return Named(frozenset(full), True)
        return Named(frozenset(full if len(full) > 1 else ()), bool(full))

    def _symbol(self, found: re.Match[str]) -> str:
        """A curve by the symbol that the options have for it: "the supply curve" -> "S"."""
        word = found[1].casefold()
        return word[0].upper() if self._symbols.get(word[0].upper()) == stem(word) else found[0]


@lru_cache(maxsize=512)
def option_texts(choices: Choices, question: str) -> OptionTexts:
    """The texts of ``choices``, prepared; remembered, since many outputs are read with the same ones."""
    return OptionTexts(choices, question)
