"""Which option a sentence states by its letter, its number or its place: "so the answer is (C)", "the third option".

A capital letter in running text may be the article, a point or a name; it counts only where the words around it say
that an option is meant.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from vlm_pg.answers.clauses import Clause, clauses, phrases
from vlm_pg.answers.plain_text import WORD_LETTER
from vlm_pg.eval.reading.verdicts import FALSE, TRUE

_X = rf"[(\[]?([A-Z])[)\]]?(?!{WORD_LETTER}|[0-9_'’*^]|\s?[=+]|-\w)"
_OPTION_NAMES = (
    "option, choice, caption, sentence, description, statement, letter, opción, opcion, opção, alternativa, lettre, "
    "letra, buchstabe, вариант"
)
_NAMES = phrases(f"answer, antwort, lösung, réponse, reponse, respuesta, resposta, risposta, ответ, {_OPTION_NAMES}")
# "Option A shows a cat" tells of an option and does not say that it is the answer.
_TELLS = rf"\b{phrases(_OPTION_NAMES)}\s{{1,3}}(?-i:{_X})(?=\s{{1,3}}(?!(?:or|and|because|since|as)\b)(?-i:[a-z]))"
_EAST = r"答案|选项|选择|应选|故选|选|正解|答え|정답|답|उत्तर|الإجابة(?:\sالصحيحة)?|الجواب"
_IS = (
    r"(?:\s{1,3}(?:is|are|es|est|é|e|è|ist|lautet|wäre|would\s{1,3}be|should\s{1,3}be|must\s{1,3}be|to\s{1,3}be|be|"
    r"seems\s{1,3}to\s{1,3}be|this|here|هي|هو)\b|\s{0,3}(?:应该是|应该为|应当是|应为|是|为|は|은|는|이|:|=|-)){0,3}"
)
_CORRECT = r"(?:\s{1,3}(?:correcta|correcte|correta|corretta|finale?|richtige)\b)?"
_MILD = phrases(
    "the, la, el, a, o, die, das, clearly, therefore, thus, also, then, definitely, probably, most likely, likely, "
    "still, simply, correcta, correcte, correta, corretta, correct, option, opción, opção, letter, number, "
    "indeed, hence, "
    "again, actually, now, in fact, really, richtige, caption, sentence"
)
_PLACED = rf"(?:\s{{0,3}},?\s{{0,3}}{_MILD}\b,?){{0,3}}\s{{0,3}}[\"'“‘]?"
_CHOOSING = phrases(
    "choose, pick, select, go with, going with, say, vote for, opt for, leaves, leaving, remains, only, settle on, "
    "prefer, guess is, choice of, leaning towards, leaning toward, lean towards, lean toward, inclined to, supports, "
    "points to, wähle, elijo, choisis"
)
_MUST_BE = phrases(
    "must be, has to be, should be, could be, it is, it’s, this is, that is, can only be, closest is, "
    "would be, might be, richtig ist, also"
)
# Three ranks: what says that it is the answer, what says that an option is meant, and a letter with its option's text.
_ANSWERS = re.compile(
    rf"(?:(?!{_TELLS})\b{_NAMES}{_CORRECT}{_IS}{_PLACED}|(?:{_EAST}){_IS}\s{{0,3}}|而是\s{{0,3}})(?-i:{_X})|"
    rf"\b{_CHOOSING}"
    rf"{_PLACED}(?-i:{_X})(?!\s(?-i:(?!or\b|and\b)[a-z]))|"
    rf"\b{_MUST_BE}"
    rf"{_PLACED}(?-i:{_X})(?=\W{{0,3}}(?:$|[,.;:!(—-]|optxt|because\b|since\b))|"
    rf"\bit's{_PLACED}(?-i:{_X})(?=\W{{0,3}}(?:$|[,.;:!(—-]|optxt|because\b|since\b|for\s(?:sure|certain)\b))|"
    rf"\b(?:is|was|are){_PLACED}(?-i:{_X})(?:['’]s)?(?=\W{{0,3}}$)|\bis\s(?-i:([A-Z]))['’]s\b",
    re.IGNORECASE,
)
_TOLD = re.compile(_TELLS, re.IGNORECASE)
# "B. The others are wrong" rejects no B.
_OTHERS = re.compile(
    r"\b(?:others?|rest|else|remaining|ander\w{1,2}|autres?|otr[ao]s|demás|altr[ie]|outr[ao]s)\b|其他|其余|остальн",
    re.IGNORECASE,
)
_OWN_VERDICT = re.compile(
    r"\W{0,3}optxt[A-Z](?:\W{0,3}$|\s{1,3}(?:is|was|are|were|does|do|did|can|could|would|seems?|has|have)(?:n['’]t)?(?![a-z]))"
)
_CROSS = re.compile(r"[❌✗✘✖❎]")
_MOST_WORDS_OF_VERDICT = 7
_SMALL = re.compile(
    rf"(?:\b{phrases('option, choice, letter')}|\b{_NAMES}\s{{0,3}}:|\b{_NAMES}\s{{1,3}}(?:is|es|est|é|"
    rf"ist)\s{{0,3}}:?)\s{{0,3}}"
    r"(?:\(([a-z])\)|(?<![a-z])([a-z])(?=\)|[.,;!]?\s{0,3}$|[.,;!]\s))",
    re.IGNORECASE,
)
_IS_ANSWER = re.compile(
    rf"(?<![\w'’]){_X}\s{{1,3}}(?:optxt[A-Z]\s{{1,3}})?(?-i:(?:is|was|ist|es|est|seems|fits|matches|works|"
    rf"describes|captures|must be|would be)\b"
    r"(?=\s(?:(?:clearly|definitely|therefore|also|indeed|the|my|das|la)\s){0,3}(?:what\b|answer|correct|"
    r"right\b|best|better|true\b|"
    r"richtig|correcta|vrai|supported|consistent|confirmed|option|closest|most\b|it\b|choice)))|"
    rf"(?<![\w'’]){_X}\s{{1,3}}(?:fits|matches|agrees|describes|captures|works)\b|"
    rf"(?<![A-Za-z]){_X}\s?(?:选项|项)?(?:才?是?正确|才?对|है|입니다|이다|です)",
)
_WITH_TEXT = re.compile(r"(?<![\w'’])[(\[]?([A-Z])(?:[)\]][.:]?|[.:])?\s{1,3}\(?optxt([A-Z])\b")
_TEXT = re.compile(r"\boptxt([A-Z])\b")
_TEXT_THEN = re.compile(r"\boptxt([A-Z])\s{0,3}\((?:option\s)?([A-Z])\)")
_BRACKETED = re.compile(r"\(([A-Z])\)|(?<![\w(])\[([A-Z])\]")
_LEADING = phrases(
    "so, hence, thus, therefore, but, and, then, or, otherwise, else, maybe, perhaps, ok, okay, hmm, "
    "actually, i e, it is, it’s, either, sorry, also, sondern, donc, folglich, entonces, best, yes"
)
_ALONE = re.compile(
    rf"(?:{_LEADING}"
    r"\s{1,3}){0,3}[(\[\"'“‘]?([A-Za-z])[)\]\"'”’.:]{0,3}",
    re.IGNORECASE,
)
_BARE = re.compile(r"(?<![\w'’(\[-])[(\[]?([A-Z])[)\]]?(?![\w'’(]|-\w|\s?[=+*^/])")
_REFUTING = phrases(
    "distractor, decoy, contradicted, refuted, disproved, discarded, dismissed, unsupported, "
    "off the table, ist ausgeschlossen, scheidet"
)
_REFUTED = re.compile(
    rf"\b{_REFUTING}\b"
    r"|可以排除",
    re.IGNORECASE,
)
_TEMPTING = re.compile(
    r"\btempt(?:ing|ed)\s(?:to\b|by\b)|\blooks?\s(?:right|correct|plausible)\sat\sfirst\b", re.IGNORECASE
)
_SETTLES = re.compile(r"(?<![\w'’])\(?([A-Z])\)?\s(?:it\s(?:is|must\sbe|has\sto\sbe))\W{0,3}$")
_UNSURE_LETTERS = "AI"
_MAYBE = re.compile(
    r"\b(?:or|between|either|maybe|perhaps|possibly|both|and/or)\b|或|还是|oder|\bou\b|\bo\b", re.IGNORECASE
)
_AMONG = re.compile(r"\b(?:between|both|of|from|among)\W{1,3}$", re.IGNORECASE)
_JOINED = re.compile(
    r"\(?\b([A-Z])\)?\s{0,3}(?:,|/|\bor\b|\band\b|&|或|和|oder|und)\s{0,3}(?:(?:maybe|perhaps|option|possibly|"
    r"even|also)\s){0,2}\(?([A-Z])\b(?!['’]|\s(?:is|are|was|does|shows|would)\b)"
)


@dataclass(frozen=True)
class Stated:
    """Letters that one sentence states, and those that it rejects.

    ``rank``: 3 where it says that this is the answer, 2 where an option is named by its letter, 0 where none is.
    ``letters`` of more than one: the sentence leaves them open.
    """

    letters: frozenset[str]
    rejected: frozenset[str]
    rank: int


def stated_in(sentence: str, options: Collection[str], label_counts: bool) -> Stated:
    """What one sentence states by letters. Options' whole texts are masked in it.

    Args:
        sentence: one sentence, as ``OptionTexts.masked`` gives it.
        options: the letters of the question's options.
        label_counts: whether a letter that stands in front of a text ("B. ...") is stated by that; not so in lists.
    """
    ranked: dict[str, int] = {}
    rejected: set[str] = set()
    open_ones: set[str] = set()
    if (settled := _SETTLES.search(sentence)) and settled[1] in options:
        return Stated(frozenset(settled[1]), frozenset(), 3)
    label = ""
    for place, clause in enumerate(clauses(sentence)):
        if label and _is_rejected(label, clause):
            rejected.add(label)
        label = alone[1] if clause.is_affirmed and (alone := _ALONE.fullmatch(clause.text.strip())) else ""
        if clause.is_affirmed and _TEMPTING.search(clause.text):
            continue
        bare = {m[1] for m in _BARE.finditer(clause.text) if m[1] in options}
        if clause.is_affirmed and (refuted := _REFUTED.search(clause.text)):
            rejected |= {m[1] for m in _BARE.finditer(clause.text[: refuted.start()]) if m[1] in options}
            continue
        if not clause.is_affirmed:
            if not clause.is_unclear:
                rejected |= {one for one in bare if one not in _UNSURE_LETTERS or is_letter(one, clause.text)}
                rejected |= _letters(_BRACKETED, clause.text)
            continue
        found = _ranked(clause.text, label_counts, can_be_alone=label_counts or place > 0)
        if clause.is_reason and ranked:
            continue
        for letter, rank in found.items():
            if letter in options and not (ranked and _only_explains(clause.text, letter)):
                ranked[letter] = max(rank, ranked.get(letter, 0))
    if not ranked and not rejected and _MAYBE.search(sentence) is None:
        ranked = {letter: 3 for letter in _letters(_SMALL, sentence) if letter in options}
    for pair in _JOINED.finditer(sentence):
        if max(ranked.values(), default=0) == 3 and _AMONG.search(sentence[: pair.start()]):
            continue
        if (pair[1] in ranked or pair[2] in ranked) and {pair[1], pair[2]} <= set(options) - rejected:
            open_ones |= {pair[1], pair[2]}
    mismatched = {
        m[2]
        for m in _WITH_TEXT.finditer(sentence)
        if m[1] in ranked and m[2] != m[1] and not m[0].startswith(("A ", "I "))
    } - rejected
    mismatched |= {m[1] for m in _TEXT_THEN.finditer(sentence) if m[2] in ranked and m[1] != m[2]} - rejected
    letters = {letter: rank for letter, rank in ranked.items() if letter not in rejected}
    top = max(letters.values(), default=0)
    stated = {letter for letter, rank in letters.items() if rank == top} | (open_ones - rejected) | mismatched
    return Stated(frozenset(stated), frozenset(rejected), top)


def _is_rejected(label: str, clause: Clause) -> bool:
    """Whether ``clause``, which follows an option's label, says no more than that it is wrong: "A. Red is wrong"."""
    told = clause.text
    other = {match[1] for match in _TEXT.finditer(told)} - {label} or {m[1] for m in _BARE.finditer(told)} - {label}
    is_of_label = _OWN_VERDICT.match(told)
    says_wrong = clause.rejections == 1 and (FALSE.search(told) or TRUE.search(told) or is_of_label)
    is_refuted = clause.is_affirmed and (_REFUTED.search(told) or _CROSS.search(told))
    is_short = len(told.split()) <= _MOST_WORDS_OF_VERDICT
    return is_short and bool(says_wrong or is_refuted) and not other and not _OTHERS.search(told)


def _ranked(clause: str, label_counts: bool, can_be_alone: bool) -> dict[str, int]:
    found: dict[str, int] = {}
    for pattern, rank in ((_BRACKETED, 1), (_TEXT_THEN, 2), (_TOLD, 2), (_IS_ANSWER, 3), (_SMALL, 3), (_ANSWERS, 3)):
        if pattern is _BRACKETED and not label_counts and re.match(r"\W{0,4}\(", clause):
            continue
        for letter in _letters(pattern, clause):
            found[letter] = max(rank, found.get(letter, 0))
    for match in _WITH_TEXT.finditer(clause):
        if match[0].startswith(("A ", "I ")):  # the article, or the pronoun
            continue
        if label_counts or match.start() > 3:
            found[match[1]] = max(2, found.get(match[1], 0))
    if can_be_alone and (alone := _ALONE.fullmatch(clause.strip())) and alone[1].isupper():
        found[alone[1].upper()] = 3
    return found


def _letters(pattern: re.Pattern[str], text: str) -> set[str]:
    if pattern is _TEXT_THEN:
        return {match[2] for match in pattern.finditer(text)}
    return {
        group.upper()
        for match in pattern.finditer(text)
        for group in match.groups()
        if group and is_letter(group, text[match.start() :])
    }


def is_letter(letter: str, text: str) -> bool:
    """Whether a capital A or I is a letter, not the article or the pronoun: no small word but a verb follows it."""
    if letter not in _UNSURE_LETTERS:
        return True
    return (
        re.search(
            rf"(?<!{WORD_LETTER})(?<![0-9_'’]){letter}(?!{WORD_LETTER}|[0-9_'’])"
            rf"(?!\s{{1,3}}(?!{_FOLLOWS})(?!optxt{letter})[^\W\d_A-Z])",
            text,
        )
        is not None
    )


_FOLLOWS = (
    phrases(
        "or, and, is, are, was, because, since, as, but, not, over, fits, matches, instead, rather, for, would, "
        "could, though, cannot, can be, can not, isn, does, doesn, may, might, should, has, "
        "seems, describes, captures, best, better, in, 项"
    )
    + r"\b"
)


def _only_explains(clause: str, letter: str) -> bool:
    return (
        re.search(rf"\b(?:for|in|with|as to)\s(?:option\s)?{letter}\b|\b{letter}\s(?:would|could|might)\b", clause)
        is not None
    )
