"""Multiple choice and multiple select: which option an output chooses."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass, field

from vlm_pg.answers.clauses import clauses, without_lead_in
from vlm_pg.answers.multiple_choice import letters_in
from vlm_pg.answers.options import Choices, choices_of, same_text, split_options
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.checklist import ticked
from vlm_pg.eval.reading.exceptions import Exceptions, asks_for_exception
from vlm_pg.eval.reading.option_labels import named_by_label
from vlm_pg.eval.reading.option_letters import stated_in
from vlm_pg.eval.reading.option_masks import placeholders, without_placeholders
from vlm_pg.eval.reading.option_numbers import NumericOptions, numeric_options
from vlm_pg.eval.reading.option_shares import is_shares, likeliest
from vlm_pg.eval.reading.option_texts import OptionTexts, option_texts
from vlm_pg.eval.reading.phrasing import (
    concludes,
    contrasts,
    corrects,
    gives_up,
    is_hypothetical,
    is_of_others,
    is_question,
    is_second_best,
    points_to_rest,
    rephrased,
    sentences,
    surveys,
    turns,
)
from vlm_pg.eval.reading.said import field_of_object, plain_said
from vlm_pg.eval.reading.thinking import Said
from vlm_pg.eval.reading.thoughts import with_decisions_named
from vlm_pg.eval.reading.yes_no import side_of
from vlm_pg.types import NONE_RIGHT, Sample, right_letters

_LABEL_LINE = re.compile(
    r"\W{0,8}(?:(?:caption|option|sentence|description|choice|statement)\s{1,2})?[(\[]?([A-Z])(?:[)\].:、]|"
    r"\s{1,2}[(|:–-])",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"\b(?:option|caption|sentence|description|choice)\s1\s?[:.)]", re.IGNORECASE)
_BY_NUMBER = re.compile(r"(?<=s\s)([1-9])(?=\W{0,3}$)")
_PAIR = re.compile(r"\b([A-Z])[).:]\s{1,3}optxt")
_ASKED_AND_DENIED = re.compile(r"[^?？(]{0,200}[?？]\s{0,3}(?:(?:no|nope|wrong|nein|non|нет)\b|不)", re.IGNORECASE)
_AROUND = " \t\r\n()[]{}.,:;!*\"'“”‘’`$"
_LATIN = {"А": "A", "В": "B", "С": "C", "Е": "E"}  # Cyrillic letters of the same shape and, but for one, place
_HOMOGLYPH = re.compile(r"(?<!\w)[АВСЕ](?!\w)")
# Where options are letters themselves, what says that an option's letter is meant.
_NAMES_OPTION = re.compile(
    r"\b(?:answer|option|choice|choose|select|pick)\b|答案|选|^\W{0,4}[A-Z]\W{0,4}$", re.IGNORECASE
)
_CONDITION = re.compile(r"\W{0,4}if\s(?!(?:i|we|you)\b|forced|asked)", re.IGNORECASE)
_ALSO = re.compile(
    r"(?<![\w'’])\(?([A-Z])\)?\s(?:is|could\sbe|may\sbe|might\sbe|seems|fits|works)\s(?:also|equally|possible|plausible|too)\b|"
    r"\b(?:might|may|could|can)\s(?:just\s)?(?:as\swell|equally|also)(?:\swell)?\sbe\s\(?([A-Z])(?![\w'’])"
)
_OTHERWISE = re.compile(r"\W{0,4}(?:otherwise|if\snot|else)\b", re.IGNORECASE)
_EXPLAINS = re.compile(r"\W{0,4}(?:explanation|reason|reasoning|rationale|justification)\W{0,4}:", re.IGNORECASE)
_LETTER = re.compile(r"(?<![\w'’])[A-Z](?![\w'’])")
_ENDS_IN_TEXT = re.compile(r"\boptxt([A-Z])\W{0,3}$")
_FEWEST_BESIDE = 1
_FEWEST_TOLD = 3
_SHORTEST_STATEMENT = 4
_LONGEST_LOOSE = 25
_SELECTS = re.compile(
    r"[^\n]{0,80}\b(?:answers?|options?|choices?|statements?|letters?)\s{1,3}(?:is|are)\b\s{0,3}:?|"
    r"[^\n]{0,40}答案(?:是|为|:)",
    re.IGNORECASE,
)
_LIST = re.compile(
    r"\(?[A-Za-z]\)?\.?(?:\s{0,3}(?:,|;|、|，|&|\+|/|\band\b|\s)\s{0,3}(?:and\s{1,3})?\(?[A-Za-z]\)?\.?){0,25}",
    re.IGNORECASE,
)
_LONGEST_LIST = 200
_LISTED = re.compile(r'"([A-Za-z])"')
_LETTER_NAMES = re.compile(r"\b(?:options?|choices?|letters?|answers?)\s{1,3}(?=\(?[A-Z]\b)", re.IGNORECASE)
_NONE = re.compile(r"(?i:none(?: of (?:the|these|those) (?:options|choices|above)| of them| is right| are right)?)")


def _choices_of(sample: Sample) -> Choices:
    """The sample's options, texts normalized like the output they are compared with."""
    texts = dict(split_options(sample.options))
    return tuple((letter, plain_said(texts.get(letter, text))) for letter, text in choices_of(sample))


def read_choice(sample: Sample, said: Said) -> Reading:
    """The one option that is chosen, as its letter; 1.0 if it is the gold one.

    The last statement of an answer counts, that of a tag or box before prose unless what follows takes it back. Options
    that are rejected do not count, nor do letters that are articles, names or quantities.
    """
    gold = letters_in(sample.answer, choices_of(sample))
    choices = _choices_of(sample)
    if len(gold) != 1 or (sample.options and not gold <= dict(choices).keys()):
        return Reading(None, None, "gold answer is not one of the options")
    letter = chosen(said, choices, sample.question)
    if letter is None:
        return Reading(None, 0.0, "no option is chosen, or several are")
    return Reading(letter, 1.0 if {letter} == gold else 0.0)


def read_choices(sample: Sample, said: Said) -> Reading:
    """All options that are selected, as "A, C" or "none"; 1.0 if they are the gold ones and no other."""
    choices = choices_of(sample)
    gold = right_letters(sample.answer)
    if choices and not gold <= dict(choices).keys():
        return Reading(None, None, "gold answer is no list of the options' letters")
    for text in candidates(said):
        selected = _selected(text, choices)
        if selected is not None:
            return Reading(", ".join(sorted(selected)) or NONE_RIGHT, 1.0 if selected == gold else 0.0)
    return Reading(None, 0.0, "no list of options")


def chosen(said: Said, choices: Choices, question: str) -> str | None:
    """The letter of the one option that ``said`` chooses; None without one."""
    reader = _Choosing(choices, question)
    whole = field_of_object(said.final or said.text)
    if whole is not None:
        return reader.read(whole)
    if said.final is None:
        return reader.read(said.text, said.is_cut)
    letter = reader.read(said.final)
    if any(reader.read(other) != letter for other in said.beside):
        return None
    later = reader.last_turn(said.after, letter)
    return later or letter


@dataclass
class _State:
    """What has been said up to a sentence. ``letter`` is "" where several were stated."""

    letter: str | None = None
    by: str = ""
    rank: int = 0
    is_corrected: bool = False
    is_turned: bool = False
    is_concluded: bool = False
    is_explained: bool = False
    num_asked: int = 0
    told: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)

    def take_up(self, sentence: str) -> None:
        """Note whether a sentence takes up what was said before."""
        self.is_turned = self.is_turned or turns(sentence)
        self.is_corrected = self.is_corrected or corrects(sentence)

    def reject(self, letters: frozenset[str]) -> None:
        """Take back what is rejected."""
        self.rejected |= letters
        if self.letter in letters:
            self.letter, self.by = None, ""

    def give_up(self) -> None:
        """Take back what was not stated as the answer."""
        if self.rank < 3 or self.by != "letter":
            self.letter, self.by, self.rank = None, "", 0

    def by_letter(self, letters: frozenset[str], rank: int, sentence: str) -> None:
        """A sentence states letters; several, or another one than before without a word of correction, are none."""
        concluded = concludes(sentence)
        # "Explanation: A) red is ...": what only names an option there does not state another answer.
        rank -= self.is_explained and rank < 3
        if self.by == "letter" and self.letter is not None and {self.letter} != letters:
            is_followed = self.is_corrected or (concluded and not self.is_concluded) or rank > self.rank
            if not is_followed:
                if rank == self.rank:
                    self.letter = ""
                return
        self.state(min(letters) if len(letters) == 1 else "", "letter", rank)
        self.is_concluded = concluded

    def by_text(self, letters: frozenset[str], sentence: str, num_asked: int = 0) -> None:
        """A sentence names options by their texts: it counts where no letter was stated, or that is taken back.

        ``num_asked``: how many words of the question it has. One that sets something beside what was said, and has
        fewer than that had, is about another thing; with as many it leaves both open.
        """
        is_kept = self.by == "letter" and not self.is_turned
        if is_kept or letters <= self.rejected or (self.letter and is_hypothetical(sentence)):
            return
        if self.by == "text" and self.letter and {self.letter} != letters and contrasts(sentence):
            if num_asked >= self.num_asked:
                self.state("", "text", 0)
            return
        is_told = len(self.told) >= _FEWEST_TOLD and not (num_asked or self.is_corrected or concludes(sentence))
        self.state(min(letters) if len(letters) == 1 and not is_told else "", "text", 0)
        self.num_asked = num_asked

    def tell(self, sentence: str) -> None:
        """Note the options that a story goes through: "In the kitchen ... In the hall ... In the bedroom ..."."""
        if all(clause.is_affirmed for clause in clauses(sentence)):
            self.told |= placeholders(sentence)

    def state(self, letter: str, by: str, rank: int) -> None:
        """Take ``letter`` for what is stated."""
        self.letter, self.by, self.rank = letter, by, rank
        self.is_corrected = self.is_turned = False


class _Choosing:
    """Reads texts with the options of one question."""

    def __init__(self, choices: Choices, question: str) -> None:
        self.question = question
        self.texts: OptionTexts = option_texts(choices, question)
        self.letters = tuple(letter for letter, _ in choices)
        self.numbers: NumericOptions | None = numeric_options(choices, question)
        sides = {text.casefold().strip(" ."): letter for letter, text in choices}
        self.sides = {side: sides[side] for side in ("yes", "no")} if {"yes", "no"} <= sides.keys() else None
        self.exceptions = Exceptions(self.texts, question) if asks_for_exception(question) else None
        self.is_numbered = _NUMBERED.search(question) is not None

    def read(self, text: str, is_cut: bool = False) -> str | None:
        """The letter that ``text`` chooses; None: none, or several."""
        text = _HOMOGLYPH.sub(lambda sign: _LATIN[sign[0]], plain_said(text)).strip()
        if len(words := set(text.split())) == 1:
            text = words.pop()  # one answer many times
        bare = text.strip(_AROUND)
        lone = bare.rstrip("?？ ")  # "B?": unsure, and an answer
        if len(lone) == 1 and lone.upper() in self.letters:
            return lone.upper()
        if (everything := self.texts.all_listed(text)) is not None:
            return everything or None
        if self.is_numbered and bare.isdecimal() and len(bare) < 3:
            return self.letters[int(bare) - 1] if 0 < int(bare) <= len(self.letters) else None
        if (whole := self.texts.is_whole_text(text)) is not None:
            return whole
        if (labelled := named_by_label(text, tuple(self.texts.choices.items()))) is not None:
            return labelled
        if len(_letters_listed(text) & set(self.letters)) > 1 and not self.texts.has_labels:
            return self.texts.named_by_order(text)
        if is_shares(text, self.letters):
            return likeliest(text, self.letters)
        text = with_decisions_named(text)
        lines = [line for line in text.splitlines() if line.strip() and not is_second_best(line)]
        if self._is_two_answers(lines):
            return None
        state = self._read_lines(lines, is_cut)
        if self.sides is not None and state.by == "":
            side = side_of(text, self.question)
            return self.sides[side] if side else None
        if not state.letter and state.letter != "":
            left = [letter for letter in self.letters if letter not in state.rejected]
            if len(left) == 1 and points_to_rest(text):
                return left[0]
        if not (state.by == "letter" or state.rejected or is_cut) and (ordered := self.texts.named_by_order(text)):
            return ordered
        return state.letter or None

    def _is_two_answers(self, lines: list[str]) -> bool:
        """Whether all that is said is one sentence that comes to an option's text, and another option's letter."""
        said = [one for line in lines for one in sentences(self.texts.masked(self._rephrased(line)))]
        if len(said) != 2 or corrects(said[1]) or self.texts.has_letters:
            return False
        if _EXPLAINS.match(said[1]) and stated_in(said[0], self.letters, True).letters:
            return False
        told = _ENDS_IN_TEXT.search(said[0])
        stated = stated_in(said[1], self.letters, True).letters
        named = self.texts.named(said[0]) if stated and (told or not placeholders(said[0])) else None
        return named is not None and named.is_whole and len(named.letters) == 1 and not named.letters & stated

    def last_turn(self, text: str, letter: str | None) -> str | None:
        """The option that ``text``, which follows an answer, decides for instead; None where it keeps to that."""
        if not text or not (corrects(text) or concludes(text)):
            return None
        later = self.read(text)
        return later if later and later != letter else None

    def _read_lines(self, lines: list[str], is_cut: bool) -> _State:
        state = _State()
        labels = {label[1].upper() for line in lines if (label := _LABEL_LINE.match(line))} & set(self.letters)
        if is_cut and any(surveys(line) for line in lines[:-1]):
            lines = lines[:-1] if _LABEL_LINE.match(lines[-1]) else lines
        checked = ticked(lines, self.texts, is_wrong_one_asked=self.exceptions is not None)
        for number, line in enumerate(lines):
            if checked and number <= checked[1]:
                if number == checked[1]:
                    state.state(checked[0], "letter", 2)
                continue
            is_unfinished = is_cut and number == len(lines) - 1 and not line.rstrip().endswith((".", "!", "。"))
            self._read_line(state, line, labels, is_unfinished)
        return state

    def _read_line(self, state: _State, line: str, labels: set[str], is_unfinished: bool) -> None:
        state.is_explained = state.by == "letter" and _EXPLAINS.match(line) is not None
        label = _LABEL_LINE.match(line)
        listed = len(labels) > 1 and label is not None
        if (
            not listed
            and not is_unfinished
            and (whole := self.texts.is_whole_text(line.rpartition(": ")[2])) is not None
        ):
            if self.sides is None and state.by == "letter" and state.letter and _EXPLAINS.match(line):
                if whole != state.letter:
                    state.state("", "letter", 3)
            elif self.sides is None:
                state.by_text(frozenset(whole), line)
            return
        if self.is_numbered:
            line = _BY_NUMBER.sub(r"option \1", line)
        masked = self.texts.masked(self._rephrased(line))
        num_pairs = len(set(_PAIR.findall(masked)))
        if num_pairs > 1 and (label is not None or num_pairs == len(self.letters)):
            return  # the options one after the other on one line
        found = _LABEL_LINE.match(masked)
        is_answered_no = _ASKED_AND_DENIED.match(masked) is not None
        if found and not (listed or is_answered_no or self.exceptions is not None) and found[1].upper() in labels:
            other = self.texts.is_whole_text(line[label.end() :]) if label else None
            letters = {found[1].upper()} | ({other} if other else set())
            state.by_letter(frozenset(letters), 2, line)
            if len(letters) > 1:
                return
        said = sentences(masked)
        if is_unfinished and len(said) > 1 and any(surveys(one) for one in said[:-1]):
            said = said[:-1]
        for place, sentence in enumerate(said):
            self._read_sentence(state, sentence, listed, is_unfinished and place == len(said) - 1)

    def _read_sentence(self, state: _State, sentence: str, listed: bool, is_unfinished: bool) -> None:
        state.take_up(sentence)
        if is_question(sentence):
            return
        if is_of_others(sentence):
            return
        if self.exceptions is not None:
            sentence = self.exceptions.as_choices(sentence)
        stated = stated_in(sentence, self.letters, not listed)
        if self.texts.has_letters and stated.letters and not _NAMES_OPTION.search(sentence):
            return  # the option's text, or its letter: nobody knows
        state.reject(stated.rejected)
        also = {letter for pair in _ALSO.findall(sentence) for letter in pair if letter in self.letters}
        also -= stated.rejected
        if stated.letters and (also - stated.letters or self._is_contradicted(sentence, stated.letters)):
            state.state("", "letter", 3)
            return
        if state.by == "letter" and state.letter and also - {state.letter}:
            state.state("", "letter", 3)
            return
        gave_up = gives_up(self.texts.unmasked(sentence)) and not self.texts.says_undecidable(sentence)
        if stated.letters:
            if _CONDITION.match(sentence):
                return
            if _OTHERWISE.match(sentence):
                state.state("", "letter", 3)
                return
            if is_unfinished and len(sentence.strip()) < _SHORTEST_STATEMENT:
                return
            weak = is_hypothetical(sentence) and stated.rank < 3
            if not weak or (state.letter is None and not gave_up):
                state.by_letter(stated.letters, 1 if weak else stated.rank, sentence)
                last = max(sentence.rfind(letter) for letter in stated.letters)
                state.take_up(sentence[last + 1 :])
                return
        if gave_up:
            state.give_up()
        elif not listed and not is_unfinished:
            state.tell(sentence)
            if not (letters := self._by_texts(sentence)):
                return
            state.by_text(letters, sentence, self.texts.num_asked_in(sentence))

    def _rephrased(self, line: str) -> str:
        return rephrased(line, self.letters, all_but=self.exceptions is None)

    def _is_contradicted(self, sentence: str, letters: frozenset[str]) -> bool:
        """Whether a clause that is nothing but one option's text stands beside another one's letter."""
        for clause in clauses(sentence):
            named = placeholders(clause.text)
            is_other = clause.is_affirmed and not clause.is_reason and len(named) == 1 and not named & letters
            is_alone = len(without_placeholders(clause.text).split()) <= _FEWEST_BESIDE
            if is_other and is_alone and not _LETTER.search(clause.text):
                return True
        return False

    def _by_texts(self, sentence: str) -> frozenset[str]:
        """The options that a sentence names by their texts."""
        if self.numbers is not None:
            values = self.numbers.named(self.texts.unmasked(sentence))
            if values is not None:
                return values
        named = self.texts.named(sentence)
        if named is None or (not named.is_whole and len(sentence.split()) > _LONGEST_LOOSE):
            return frozenset()
        # "Yes" and "no" are read in all that is said.
        return named.letters if self.sides is None or not named.letters & set(self.sides.values()) else frozenset()


def candidates(said: Said) -> list[str]:
    """Where a list of options may stand: in the last tag or box, else in the last line, else in all that is said."""
    if (whole := field_of_object(said.final or said.text)) is not None:
        return [", ".join(_LISTED.findall(whole)) if whole.startswith("[") else whole]
    if said.final is not None:
        return [said.final]
    lines = [line for line in plain_said(said.text).splitlines() if line.strip()]
    return [said.text, lines[-1], *([lines[0]] if len(lines) > 1 else [])] if lines else []


def _letters_listed(text: str) -> set[str]:
    """The letters of ``text`` if it is nothing but a list of letters, else none: "A, (c) and D" -> {"A", "C", "D"}."""
    is_list = len(text) <= _LONGEST_LIST and _LIST.fullmatch(text.strip())
    return set(re.findall(r"[A-Z]", re.sub(r"\bAND\b", " ", text.upper()))) if is_list else set()


def _selected(text: str, choices: Choices) -> set[str] | None:
    """The letters that ``text`` lists; None where it is no list."""
    sentence = plain_said(text).strip()
    letters = {letter for letter, _ in choices} or set(string.ascii_uppercase)
    short = (without_lead_in(sentence) or sentence).strip(_AROUND)
    if explicit := _SELECTS.match(sentence):
        short = sentence[explicit.end() :].strip(_AROUND)
    if _NONE.fullmatch(short):
        return set()
    short = _LETTER_NAMES.sub("", short)
    if found := _letters_listed(short):
        return found if found <= letters else None
    if short.isalpha() and short.isupper() and list(short) == sorted(set(short)) and set(short) <= letters:
        return set(short)
    lines = [line for line in re.split(r"[;\n]", sentence) if line.strip()]
    labels = [_LABEL_LINE.match(line) for line in lines]
    options = dict(choices)
    if lines and all(labels):
        pairs = [(label[1].upper(), line[label.end() :]) for label, line in zip(labels, lines, strict=True) if label]
        if all(letter in options and same_text(rest.strip(), options[letter]) for letter, rest in pairs):
            return {letter for letter, _ in pairs}
    return None
