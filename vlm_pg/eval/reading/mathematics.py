"""Mathematics: what a whole output says the result is. Whether it is right is for the checking processes to say."""

from __future__ import annotations

import re
from collections.abc import Callable

from vlm_pg.answers.clauses import affirmed
from vlm_pg.answers.grading import mathematics_call, mathematics_verdict
from vlm_pg.answers.latex import statement, words
from vlm_pg.answers.numbers import read_quantity
from vlm_pg.answers.plain_text import without_marks
from vlm_pg.answers.pool import CheckerPool
from vlm_pg.answers.verdict import Verdict
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.expressions import (
    MAX_CHARACTERS,
    as_interval,
    has_square_factor_under_root,
    result_of,
    runs,
    with_words_as_signs,
)
from vlm_pg.eval.reading.said import plain_said
from vlm_pg.eval.reading.statements import (
    first_correction,
    is_beside_the_point,
    is_check,
    last_correction,
    last_explicit,
    statements,
    without_reason,
)
from vlm_pg.eval.reading.symbols import end_of_unit
from vlm_pg.eval.reading.thinking import Said
from vlm_pg.types import Sample

# (answer, question) -> its verdict; the real one asks the checking processes.
Grade = Callable[[str, Sample], Verdict]

_LONGEST = 20_000
_MATRIX = re.compile(r"\\begin\{(\w{0,3}matrix)\}((?:(?!\\(?:begin|end)).){0,800})\\end\{\1\}", re.DOTALL)
_ROW_GAP = re.compile(r"\\\\\s?\[[^\]\n]{1,12}\]")
_PLACEHOLDER = re.compile(
    r"\W*(?:\\text\s?\{)?\s?(?:(?:your|the|final|an)\s|){0,3}(?:answer|result|solution|"
    r"expression)(?:\s?here)?\W*|[\W_]*",
    re.IGNORECASE,
)
_IN_TEXT = re.compile(r"\\(?:text\w{0,6}|mbox|mathrm)\s?\{((?:[^{}]|\{(?:[^{}]|\{[^{}]{0,200}\}){0,400}\}){0,1000})\}")
_CONTEST_LETTER = re.compile(r"^\W{0,6}(?:\\text\w{0,2}\s?\{\s?)?\(?\s?[A-J]\s?\)\s?\}?(?:\\[ ,;:]|\s)+(?=\S)")
_SEVERAL = re.compile(r"\b(?:all|solutions|roots|zeros|zeroes|values|numbers|pairs|integers)\b|所有|解", re.IGNORECASE)
# Of several things one value: "the sum of the roots".
_ONE_OF_SEVERAL = re.compile(
    r"\b(?:sum|product|number|average|mean|difference)\s(?:of\s)?(?:the\s|all\s|its\s|both\s|two\s|real\s|distinct\s|possible\s){0,4}"
    r"(?:solutions|roots|zeros|zeroes|values|integers)\b|\bhow\smany\b",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(r"^\W{0,4}if\b.{0,400}?(?:,|\bthen\b)", re.IGNORECASE | re.DOTALL)
_REFUTED = re.compile(r"\bcontradict|\bimpossible\b|\bwould\simply\b|矛盾", re.IGNORECASE)
_TAKEN_BACK = re.compile(r"\W{0,6}(?:is|was|would\sbe)\s(?:wrong|incorrect|not\b)", re.IGNORECASE)
_TERM = re.compile(
    r"(?:\bwhat\sis|\bvalue\sof|\bfind|\bcompute|\bdetermine)\s(?:the\svalue\sof\s)?\$([^$=]{2,40})\$", re.I
)
_CHANCE = re.compile(r"\bprobabilit|\bchance|\blikelihood|\bfraction\b|\bproportion\b|概率", re.IGNORECASE)
_ONE_IN = re.compile(r"(?<![\d.,/])([0-9]{1,9})\s(?:in|out\sof)\s(?:every\s)?([0-9]{1,9})(?![\d.,]*\d)", re.IGNORECASE)
# "2, 3" holds two values; "1,250" and "(2,5)" one.
_TWO_VALUES = re.compile(r",\s|,(?!\d{3}(?!\d)|\\!)")
_IN_BRACKETS = re.compile(r"[(\[{][^()\[\]{}]{0,400}[)\]}]")
_EQUATION = re.compile(r"\bequations?\s{1,3}(?:of|for|that|in)\b|方程", re.IGNORECASE)
_IN_BASE = re.compile(
    r"\bin\s{1,3}base\s{1,3}\$?\s?([0-9]{1,2})|\bto\s{1,3}base\s{1,3}\$?\s?([0-9]{1,2})", re.IGNORECASE
)
_RADICAL_FORM = re.compile(r"simplest\s{1,3}radical\s{1,3}form|simplified\s{1,3}radical", re.IGNORECASE)
_UNDECIDED = re.compile(
    r"\beither\b|\bdepend(?:s|ing)\b|\bunclear\b|\bor\s{1,3}(?:maybe|perhaps|possibly)\b", re.IGNORECASE
)
_CUE = re.compile(
    r"\b(?:so|therefore|thus|hence|consequently|i\.e\.,?|that\s{1,3}is,?|which\s{1,3}(?:is|"
    r"gives|means|equals)|gives|we\s{1,3}(?:get|obtain|have|find)|"
    r"finally|also|daher|donc|alors|por\s{1,3}(?:lo\s{1,3})?tanto|поэтому|значит)(?!\w)|"
    r"\\(?:therefore|implies|Rightarrow)(?![A-Za-z])|⇒|∴|所以|因此|即|得",
    re.IGNORECASE,
)
# Terms of one letter each, the first of which is multiplied or raised.
_POLYNOMIAL = re.compile(
    r"(?:\d{1,9}\*?[a-z](?:\^\{?\d\}?)?|[a-z]\^\{?\d\}?)(?:[+-]\d{0,9}\*?[a-z]?(?:\^\{?\d\}?)?){0,6}"
)
_BOUND = re.compile(
    r"\b(?:less|greater|more|fewer|larger|smaller|higher|lower)\s{1,3}than\s{1,3}(?:or\s{1,3}equal\s{1,3}to\s{1,3})?$|"
    r"\bat\s{1,3}(?:least|most)\s{1,3}$",
    re.IGNORECASE,
)
_ODDS = re.compile(r"\s{0,3}[0-9]{1,9}\s?(?::|\\colon)\s?[0-9]{1,9}\s{0,3}")
_OF_OTHERS = re.compile(r"\b(?:any\s{1,3}other|the\s{1,3}others?|all\s{1,3}other|complement\w{0,4})\b", re.IGNORECASE)
_CLAUSE = re.compile(r",\s(?:and|but|while|whereas)\s|;\s")
_JOIN = re.compile(
    r"[\s,;$]{0,8}(?:(?:or|and|oder|und|ou|o|et|y|或者?|和|或)[\s$]{0,4})?(?:\\q?quad\s?)?[\s$]{0,4}", re.IGNORECASE
)
_CONDITION = re.compile(
    r"\s(?:for|where|when|if|provided(?:\s{1,3}that)?)\s{1,3}(?:all\s{1,3})?\$?\s?[a-z]\s?(?:\\(?:neq?|in|ge|le|geq|leq)(?![A-Za-z])|[≠∈<>≤≥])[^.]{0,80}$"
)
_BEHIND = re.compile(
    r"\b(?:ahead\s{1,3}of|than|followed\s{1,3}by|before|whereas|while|unlike|compared|over|"
    r"against|although|though|not)\b",
    re.IGNORECASE,
)
_NAME = re.compile(r"(?<![\w\\$])[A-Z][a-z]{1,20}(?![\w(])")
_NO_NAMES = frozenset(
    [
        "Which",
        "What",
        "Who",
        "Find",
        "Is",
        "Are",
        "The",
        "In",
        "If",
        "Let",
        "How",
        "Compute",
        "Write",
        "Solve",
        "Evaluate",
        "Expand",
        "Factor",
        "Give",
        "Suppose",
        "Each",
        "For",
        "Of",
        "There",
        "An",
        "A",
        "One",
        "Two",
        "When",
        "Where",
        "Express",
        "Determine",
        "Round",
        "Enter",
    ]
)
_NUMBER_ALONE = re.compile(r"(-?)([0-9]{1,3}(?:,[0-9]{3}){1,10}|[0-9]{1,100})(?:\.([0-9]{1,100}))?")
_ALTERNATIVES = re.compile(r"\b([a-z]{2,15}),\s([a-z]{2,15}),?\sor\s([a-z]{2,15})\b")
_ECHO = re.compile(r"\$([^$]{3,200})\$")


def grade_in(pool: CheckerPool) -> Grade:
    """The rule of rewards (``rewards/mathematics``), in processes that are killed when a check takes too long."""

    def grade(answer: str, sample: Sample) -> Verdict:
        [outcome] = pool.run([mathematics_call(sample.answer, answer)])
        return mathematics_verdict(outcome)

    return grade


def read_mathematics(sample: Sample, said: Said, grade: Grade) -> Reading:
    """What ``said`` answers to a question for mathematics.

    Args:
        sample: its ``answer`` decides only whether the answer is a word, a formula or several formulas.
        said: what the output says.
        grade: says what an answer is worth; ``grade_in`` makes one of the checking processes.

    Returns:
        The answer as it was written, a number alone as ``as_voted`` has it. Its score is 0 where the question asks for
        simplest radical form and it is not.
    """
    answer = answer_of_mathematics(sample, said)
    if answer and _ODDS.fullmatch(answer) and ":" not in sample.answer and "ratio" not in sample.question.lower():
        return Reading(answer, 0.0, "odds, where no ratio is asked for")
    verdict = grade(answer or "", sample)
    if answer and verdict.value and _RADICAL_FORM.search(sample.question) and has_square_factor_under_root(answer):
        return Reading(answer, 0.0, "not in simplest radical form")
    if not answer and verdict.value is not None:
        return Reading(None, 0.0, "no one result is stated")
    return Reading(None if answer is None else as_voted(answer), verdict.value, verdict.note)


def as_voted(answer: str) -> str:
    """A number alone as all its spellings are counted in a vote: "025" -> "25", "3,159" and "3159.0" -> "3159"."""
    number = _NUMBER_ALONE.fullmatch(answer.strip(" $"))
    if number is None:
        return answer
    sign, whole, decimals = number[1], number[2].replace(",", "").lstrip("0") or "0", (number[3] or "").rstrip("0")
    is_zero = whole == "0" and not decimals
    return f"{'' if is_zero else sign}{whole}{'.' if decimals else ''}{decimals}"


def answer_of_mathematics(sample: Sample, said: Said) -> str | None:
    """The result that ``said`` states, as it was written, its working left out; None if it states none, or several.

    What the last box or tag holds, else what stands behind the last "The answer is", else in the last sentence with a
    formula; a change of mind is followed. Of a chain of equals signs the last exact side counts. An expression of the
    question that is only repeated is none. Several solutions are joined by commas where several are asked for, by the
    question or by a gold answer of several; where one is asked for, several values side by side are none.
    """
    asks_word = words(statement(sample.answer), gold=True) is not None
    text = _one_line_matrices(said.text[-_LONGEST:])
    if said.final is not None:
        return _in_final(sample, said, text, asks_word)
    if said.is_cut:
        return None
    return _in_prose(sample, text, asks_word)


def _in_final(sample: Sample, said: Said, text: str, asks_word: bool) -> str | None:
    after = said.after
    if _TAKEN_BACK.match(after):
        return None if said.is_cut else _in_prose(sample, after, asks_word)
    place = first_correction(after)
    if place is not None and not is_check(after[place:]):
        return None if said.is_cut else _in_prose(sample, after[place:], asks_word)
    pieces = [_one_line_matrices(one) for one in (*said.beside, said.final or "")]
    if _asks_several(sample) and not said.beside:
        last = next((one for one in reversed(statements(text)) if "\\boxed" in one), "")
        if last.count("\\boxed") > 1 and re.search(r"\}\s?\$?\s?(?:\\text\s?\{\s?)?(?:or|and|,)", last):
            return statement(last) or None
    stated = [_stated(sample, piece, asks_word) for piece in pieces]
    # "Write $\sqrt{53}$ in simplest radical form": what only repeats the question is the answer if the gold one does.
    repeats = _bare(sample.answer)
    answers = [one if one and _bare(one) == repeats else _finish(sample, one) for one in stated]
    if None in answers:
        return None
    distinct = list(dict.fromkeys(answer for answer in answers if answer))
    if len(distinct) > 1 and not _asks_several(sample):
        return None
    return ", ".join(distinct) or None


def _stated(sample: Sample, piece: str, asks_word: bool) -> str | None:
    """What a box or tag says: itself if it is a formula alone, else what its sentence states."""
    piece = _CONTEST_LETTER.sub("", piece.strip())
    if not asks_word and (whole := _IN_TEXT.fullmatch(piece)):
        piece = whole[1]
    if _PLACEHOLDER.fullmatch(piece) or len(piece) > MAX_CHARACTERS:
        return None
    if asks_word:
        return _word(sample, piece) or piece
    if re.search(r"[^\W\d_]{2,}\s{1,3}[^\W\d_]{2,}", re.sub(r"\\\w+(?:\s?\{[^{}]*\})?", "", piece)):
        return _in_prose(sample, piece, asks_word)
    if _UNDECIDED.search(piece) or (re.search(r"\bor\b", piece) and not _asks_several(sample)):
        return None
    return as_interval(piece)


def _in_prose(sample: Sample, text: str, asks_word: bool) -> str | None:
    explicit = last_explicit(text)
    if explicit is not None:
        said = re.split(r"\n\s{0,9}\n|(?<=[^\d])[.!]\s|(?<=\d)\.\s", text[explicit[1] :].lstrip(" :*\n"), maxsplit=1)[0]
        behind = text[explicit[1] :]
        place = first_correction(behind)
        if place is None or is_check(behind[place:]):
            return _finish(sample, _sentence(sample, said, asks_word))
        return _in_prose(sample, behind[place:], asks_word)
    place = last_correction(text)
    if place is not None and not is_check(text[place:]):
        found = _last(sample, text[place:], asks_word)
        if found is not None:
            return _finish(sample, found)
    return _finish(sample, _last(sample, text, asks_word))


def _last(sample: Sample, text: str, asks_word: bool) -> str | None:
    for one in reversed(statements(text)):
        if is_beside_the_point(one):
            continue
        has_word = asks_word and any(re.search(rf"\b{re.escape(name)}\b", one, re.I) for name in _names(sample))
        if has_word or (not asks_word and runs(without_marks(_signs(one, sample), " "))):
            return _sentence(sample, one, asks_word)
    return None


def _sentence(sample: Sample, sentence: str, asks_word: bool) -> str | None:
    """What one sentence states."""
    sentence = sentence[:MAX_CHARACTERS]
    if asks_word:
        return _word(sample, sentence)
    several = _asks_several(sample)
    text = affirmed(without_reason(_signs(without_marks(sentence, " "), sample)))
    text = _SUPPOSED.sub("", _CONDITION.sub("", text))
    if _UNDECIDED.search(text) or _REFUTED.search(text):
        return None
    clauses = [clause for clause in _CLAUSE.split(text) if not _OF_OTHERS.search(clause)]
    text = ", ".join(clauses) or text
    for cue in reversed(list(_CUE.finditer(text))):
        if runs(text[cue.end() :]):
            text = text[cue.end() :]
            break
    found = runs(text)
    if not found:
        return None
    # "f(3) = 8 and f(2) = 3", asked for f(3).
    symbols = {_bare(one) for one in _ECHO.findall(sample.question)}
    of_asked = [run for run in found if _left_side(run) in symbols]
    if len(of_asked) == 1 and len(found) > 1 and not several and all(_left_side(run) for run in found):
        found = of_asked
    if _is_of_another_term(found[-1], sample) or _is_unsolved(found[-1], sample):
        return None
    is_equation = _EQUATION.search(sample.question) is not None
    results = [result_of(found[-1], is_equation=is_equation)]
    place = text.rfind(found[-1])
    if _BOUND.search(text[:place].rstrip("$ ") + " "):
        return None
    results[0] += _unit_behind(text[place + len(found[-1]) :], sample)
    for run in reversed(found[:-1]):
        begin = text.rfind(run, 0, place)
        gap = text[begin + len(run) : place]
        if begin < 0 or not _JOIN.fullmatch(gap):
            break
        result = result_of(run, is_equation=is_equation)
        if not several:
            if re.search(r"\bor\b|或", gap) or (result != results[0] and _left_side(run) == _left_side(found[-1])):
                return None
            break
        results.insert(0, result)
        place = begin
    return ", ".join(results)


def _unit_behind(text: str, sample: Sample) -> str:
    """The unit that ``text`` begins with, where the gold answer has one: "20 kg" is no 20 cm."""
    if read_quantity(plain_said(sample.answer))[1] is None:
        return ""
    bare = text.lstrip(" $(")
    return f" {bare[: end_of_unit(bare, 0)].strip()}".rstrip()


def _asks_several(sample: Sample) -> bool:
    """Whether several values are asked for, by the question's words or by a gold answer of several."""
    gold, shorter = "", sample.answer[:MAX_CHARACTERS]
    while shorter != gold:
        gold, shorter = shorter, _IN_BRACKETS.sub("", shorter)
    asks_one = _ONE_OF_SEVERAL.search(sample.question) is not None
    return (_SEVERAL.search(sample.question) is not None and not asks_one) or _TWO_VALUES.search(gold) is not None


def _signs(text: str, sample: Sample) -> str:
    """``text`` with signs for words; "1 in 4" is a fraction where a probability is asked for."""
    text = with_words_as_signs(text)
    return _ONE_IN.sub(r"\1/\2", text) if _CHANCE.search(sample.question) else text


def _is_of_another_term(run: str, sample: Sample) -> bool:
    """Whether a run gives a value to another term of the variables that are asked about: "a = 7", asked for a + b."""
    left, terms = _left_side(run), _TERM.findall(sample.question)
    names = {left, _left_side(sample.answer)}
    if len(names) > 1 and all(len(name) == 1 and name.isalpha() for name in names):
        return True  # "y = 5", where x is asked for
    if not left or len(terms) != 1 or not re.search(r"[A-Za-z]\s?[-+*/]|[-+*/]\s?[A-Za-z]", terms[0]):
        return False
    letters, asked = set(re.findall(r"[A-Za-z]", left)), set(re.findall(r"[A-Za-z]", terms[0]))
    return bool(letters) and letters <= asked and sorted(left.strip("()")) != sorted(_bare(terms[0]).strip("()"))


def _left_side(run: str) -> str:
    """What an equation gives a value to: "x" of "x = 2", "" of "2"."""
    left, sign, _ = run.partition("=")
    return _bare(left) if sign else ""


def _finish(sample: Sample, answer: str | None) -> str | None:
    """``answer``, but None for one that only repeats the question; with the base that the question names."""
    if answer is None or not answer.strip():
        return None
    answer = answer.strip()
    if _is_unsolved(answer, sample):
        return None
    if re.search(r"[A-Za-z]", answer) and _bare(answer) in {_bare(one) for one in _ECHO.findall(sample.question)}:
        return None
    base = _IN_BASE.search(sample.question)
    # A gold answer that leaves the base to the question is compared as it is.
    if base and "_" in sample.answer and re.fullmatch(r"[0-9A-F]{1,40}", answer):
        return f"{answer}_{{{base[1] or base[2]}}}"
    return answer


def _is_unsolved(run: str, sample: Sample) -> bool:
    """Whether a formula gives the value of a multiple or a power of what is asked: "2x = 5", "x^2 = 5".

    Not if the question has that side itself, or an equation is the answer.
    """
    left, sign, _ = _bare(run).partition("=")
    return (
        bool(sign)
        and "=" not in sample.answer
        and _POLYNOMIAL.fullmatch(left) is not None
        and left not in _bare(sample.question)
    )


def _bare(latex: str) -> str:
    return re.sub(r"[\s$]|\\left|\\right|\\[,;! ]", "", latex)


def _names(sample: Sample) -> list[str]:
    """The words that a question for one offers: its names, or "even, odd, or neither"; and the gold answer."""
    question = sample.question[:4000]
    names = [name for name in _NAME.findall(question) if name not in _NO_NAMES]
    names += [name for match in _ALTERNATIVES.findall(question) for name in match]
    gold = words(statement(sample.answer), gold=True)
    known = {name.casefold(): name for name in [*([gold] if gold else []), *names]}
    return list(known.values())


def _word(sample: Sample, sentence: str) -> str | None:
    """The one word of those offered that a sentence affirms."""
    plain = re.sub(r"\\\w{1,12}\s?\{([^{}]*)\}", r"\1", without_marks(sentence[:MAX_CHARACTERS], " "))
    kept = affirmed(without_reason(plain))
    names = _names(sample)
    for text in (kept, _BEHIND.split(kept, maxsplit=1)[0]):
        found = [name for name in names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE)]
        if len(found) == 1:
            return found[0]
    return None


def _one_line_matrices(text: str) -> str:
    text = _ROW_GAP.sub(r"\\\\", text)
    return _MATRIX.sub(lambda match: re.sub(r"\s{1,99}", " ", match[0]), text)
