"""Clauses of a statement: what each affirms or rejects, and the lead-in before the answer.

"B, not A." affirms B and rejects A; "A and C are wrong" rejects both; "anything but B" rejects B.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import islice

from vlm_pg.answers.plain_text import split_at_boxes


def phrases(text: str) -> str:
    """An alternation of the phrases that commas separate; a blank in one is up to three of white space."""
    return "(?:" + "|".join(" ".join(phrase.split()).replace(" ", r"\s{1,3}") for phrase in text.split(",")) + ")"


_SENTENCE_END = re.compile(r"(?<![\d.])\.(?=\s|$)|(?<=\d)\.(?=\s{1,4}\D|\s*$)|[!?;\n。！？；]")
_LETTER = r"\(?[A-Z]\)?(?![A-Za-z0-9'’])"
_CONNECTIVE = phrases(
    "but, because, since, so, while, whereas, therefore, although, though, unlike, instead of, rather than, sino, "
    "sondern, mais, pero"
)
_CHINESE_CONNECTIVE = "因为|由于|所以|因此|但是?|而(?:不|非|是)|不过"
# Where one sentence changes from what is affirmed to what is not, or the other way round.
_CLAUSE_START = re.compile(
    r"\b(?=I\s{1,3}(?:would|choose|pick|select|say|think|believe|guess|go)\b|I['’]d\b)|"
    r"[,:]\s|[,，、:](?=[^\x00-\x7f]|\s*$)|(?<=[^\x00-\x7f])[,，:]|\s-\s|"
    rf"\b(?={_CONNECTIVE}\b)|(?={_CHINESE_CONNECTIVE})|"
    # "B not A", "B (not A)", "B over A", "B is right and A is wrong", "是B不是A"
    r"(?<=[A-Z0-9)])\s{1,3}(?=(?:and\s{1,3})?not\s{1,3}(?:option\s{1,3})?\(?(?:[A-Z](?![a-z])|[0-9]))|\((?=(?:and\s{1,3})?not\b)|"
    r"\s(?=over\s{1,3}\(?[A-Z](?![A-Za-z]))|(?<=[a-z]\s)and\s{1,3}(?=(?:option\s)?[A-Z]\s{1,3}(?:is|are|isn|does|can)\b)|"
    # "答案是B,A和C都不对"
    r",(?=\(?[A-Z]\)?\s{0,2}[^\x00-\x7f])|(?<=[A-Z0-9)])\s{0,2}(?=而是|而?不?是\s{0,2}[A-Z0-9(])"
)
# "A, B and C": the commas of a list of letters separate no clauses, but for one after a letter that is stated.
_LISTED = re.compile(
    rf"(?<!\bis\s)(?<![是选为])({_LETTER})\s{{0,3}}[,，、]\s{{0,3}}(?=(?:(?:and|or)\s|和|或)?\s{{0,3}}{_LETTER}\s{{0,3}}"
    rf"(?:[,，、/&.)]|and\b|or\b|are\b|和|或|与|都|均|$))"
)
_ALL_BUT = re.compile(
    r"\b(?:any|every|all|none)(?:thing|one|\s{1,3}of\s{1,3}them|\s{1,3}(?:the\s{1,3})?(?:other\s{1,3})?(?:options?|choices?|answers?))?"
    r"\s{1,3}(?:but|except|save)\b",
    re.IGNORECASE,
)
# "Rather B than A" is "B rather than A".
_RATHER = re.compile(rf"\b[Rr]ather\s{{1,3}}({_LETTER})\s{{1,3}}than\b")
# "Wrong: A, B" rejects what follows the colon.
_LABEL_OF_WRONG = re.compile(
    r"\b((?:not|wrong|incorrect|rejected|eliminated|excluded)(?:\s{1,3}(?:answers?|options?|choices?))?)\s{0,3}:",
    re.IGNORECASE,
)
_REASON = re.compile(
    rf"\s*(?:{phrases('because, since, as, while, whereas, although, though, unlike')}\b|因为|由于)", re.IGNORECASE
)
_REJECTING_WORDS = phrases(
    "not, never, cannot, nor, wrong, incorrect, false, unlikely, improbable, inaccurate, mistaken, fail, fails, "
    "lack, lacks, "
    "untrue, invalid, impossible, except, exclude, excluded, excludes, excluding, unlike, instead of, rather than, "
    "other than, doubt, doubts, eliminate, eliminated, eliminates, reject, rejected, rejects, nicht, kein, "
    "keine, falsch, "
    "pas, faux, fausse, incorrecto, incorrecta, no es, no son, sbagliato, least, worst, is out, are out"
)
_REJECTION = re.compile(
    rf"\bneither\b(?:[^,.]{{0,60}}\bnor\b)?|\b{_REJECTING_WORDS}\b|n['’]t\b|\brul(?:e|ed|es|ing)\s{{1,3}}(?:\S{{1,12}}\s{{1,3}})?out\b|"
    r"\bover\s{1,3}\(?(?-i:[A-Z])(?![A-Za-z])|"
    r"不|并非|非(?!常)|没|错|除了|除外|排除|以外|ない|ません|違|아니|아닙|않|틀|\bне\b|\bневерн|\bкроме\b|ليس|नहीं",
    re.IGNORECASE,
)
# Negation that does not reject: "not only", "no doubt", "none other than", "不错".
_HARMLESS = re.compile(
    rf"\b{phrases('not only, not just, not merely, why not, none other than, no other than, nothing but, no doubt')}\b|"
    rf"\b{phrases('without doubt, without a doubt, at least')}\b|"
    r"不错|不仅|不但|不难|不论|不管|没错|没问题",
    re.IGNORECASE,
)
# A clause that says no more than this is about what stands before it: "B, which is wrong", "B? No."
_VERDICT = re.compile(
    rf"(?:{phrases('and, but, that, this, it, which, no, clearly, obviously, definitely, option')}\b"
    r"(?:['’]s)?\s{0,3},?\s{0,3}){0,3}"
    rf"(?:{phrases('is, are, was, would be, cannot be')}|isn['’]t)?\s{{0,3}}"
    rf"(?:(?:not\s{{1,3}})?(?:the\s{{1,3}})?{phrases('correct, right, true, the answer, answer, it, an option')}|"
    r"no|nope|wrong|incorrect|false)"
    r"(?:\s{1,3}(?:answer|option|choice|one))?|(?:这|那|它)?个?是?(?:错误?的?|不对的?|不正确的?|不是)",
    re.IGNORECASE,
)
_NO = re.compile(r"\bno(?:pe)?\b", re.IGNORECASE)
MAX_CLAUSES = 200


@dataclass(frozen=True)
class Clause:
    """A part of a statement.

    ``sentence``: number of its sentence. ``rejections``: how many words in it negate or reject; with two or more it is
    not clear what the clause says. ``is_reason``: it begins with because, since, while or the like.
    """

    text: str
    sentence: int
    rejections: int
    is_reason: bool

    @property
    def is_affirmed(self) -> bool:
        return self.rejections == 0

    @property
    def is_unclear(self) -> bool:
        return self.rejections > 1


def clauses(text: str) -> list[Clause]:
    """The clauses of ``text`` in order, at most ``MAX_CLAUSES``.

    [(clause.text, clause.rejections) for clause in clauses("B, not A.")] -> [("B", 0), ("not A", 1)]
    """
    found: list[Clause] = []
    for number, sentence in enumerate(_SENTENCE_END.split(text)):
        if len(found) >= MAX_CLAUSES:
            break
        if not sentence.strip():
            continue
        sentence = _RATHER.sub(r"\1 rather than", sentence)
        sentence = _LISTED.sub(r"\1 / ", _LABEL_OF_WRONG.sub(r"\1 ", _ALL_BUT.sub("except", sentence)))
        for part in _parts(sentence):
            rejections = sum(1 for _ in _REJECTION.finditer(_HARMLESS.sub(" ", part)))
            if found and _VERDICT.fullmatch(part) and (rejections or part.lower() in ("no", "nope")):
                found[-1] = replace(found[-1], rejections=found[-1].rejections + 1)
            else:
                found.append(Clause(part, number, rejections, _REASON.match(part) is not None))
    return found[:MAX_CLAUSES]


def affirmed(text: str) -> str:
    """``text`` without the clauses that reject; "" if all do: "It is 5, not 6" -> "It is 5"."""
    if not any(pattern.search(text) for pattern in (_REJECTION, _ALL_BUT, _NO)):
        return text  # the usual case, and much faster on long texts
    parts = clauses(text)
    if all(part.is_affirmed for part in parts):
        return text
    return ". ".join(part.text for part in parts if part.is_affirmed)


def _parts(sentence: str) -> list[str]:
    parts, start = [], 0
    for match in _CLAUSE_START.finditer(sentence):
        parts.append(sentence[start : match.start()])
        start = match.end()
    parts.append(sentence[start:])
    return [stripped for part in parts if (stripped := part.strip(" ,，、:"))]


_ENGLISH = (
    r"(?:(?:so|thus|hence|therefore|finally|in\s{1,3}conclusion|ok|okay|well)\b\s{0,3}[,:]?\s{0,3}(?:that\s{1,3})?)?"
    r"(?:i\s{1,3}(?:think|believe|guess|would\s{1,3}say|am\s{1,3}(?:sure|confident))\s{0,3},?\s{0,3}(?:that\s{1,3})?)?"
    r"(?:(?:(?:the|my|our)\s{1,3})?(?:(?:final|correct|right|best|exact|most\s{1,3}likely)\s{1,3}){0,2}"
    r"(?:answer|result|solution|value|option|choice)(?:\s{1,3}(?:to|of)\s{1,3}(?:the|this|that)\s{1,3}question)?"
    r"(?:\s{1,3}(?:is|are|must\s{1,3}be|should\s{1,3}be|would\s{1,3}be)\b\s{0,3}:?|\s{0,3}[=:])"
    r"|(?:it|this|that)\s{1,3}is\b\s{0,3}:?|it['’]s\b|i\s{1,3}(?:choose|pick|select|say|go\s{1,3}with)\b\s{0,3}:?)"
)
_OPINION = r"i\s{1,3}(?:think|believe|guess)\s{1,3}"
_CHINESE = (
    r"(?:(?:所以|因此|故|因而|综上(?:所述)?|我认为|我觉得)\s{0,3}[,:]?\s{0,3})?"
    r"(?:(?:我的|本题的?|这道?题的?|问题的)?(?:最终|最后|正确|标准)?的?(?:答案|结果|选项)"
    r"(?:应该是|应当是|应该为|应为|是|为|选|\s{0,3}:)\s{0,3}:?|答\s{0,3}:|(?:我)?(?:应该|应当|应)?(?:选择|选)\s{0,3}:?)"
)
_JAPANESE = r"(?:正解|答え|解答|回答)\s{0,3}(?:は|:)\s{0,3}:?"
_KOREAN = r"(?:정답|답변|답)\s{0,3}(?:은|는|:)\s{0,3}:?"
_LATIN = (
    r"(?:(?:la|a|il|le|die)\s{1,3})?(?:richtige\s{1,3}|bonne\s{1,3})?(?:respuesta|resposta|r[ée]ponse|antwort|risposta)"
    r"(?:\s{1,3}(?:correcta|correta|correcte|corretta|final|finale))?(?:\s{1,3}(?:es|é|est|ist|è|lautet)\b|\s{0,3}:)"
    r"\s{0,3}:?"
)
_RUSSIAN = r"(?:правильный\s{1,3})?ответ\s{0,3}(?::|-|это\b)\s{0,3}"
_ARABIC = r"(?:الإجابة|الجواب)(?:\s{1,3}(?:الصحيحة|الصحيح))?(?:\s{1,3}(?:هي|هو))?\s{0,3}:?"
_HINDI = r"(?:सही\s{1,3})?उत्तर\s{0,3}(?:है\s{0,3}:?|:)"
_LEAD_IN = re.compile(
    "|".join((_ENGLISH, _CHINESE, _JAPANESE, _KOREAN, _LATIN, _RUSSIAN, _ARABIC, _HINDI, _OPINION)), re.IGNORECASE
)
_ENDING = re.compile(
    r"(?:\s{0,3}(?:です|だ|である|입니다|이다|이에요|예요)"
    r"|\s{1,3}(?:is|would\s{1,3}be|must\s{1,3}be)\s{1,3}(?:(?:the|my)\s{1,3})?(?:(?:final|correct|right|best)\s{1,3})?"
    r"(?:answer|option|choice|correct|right))\s{0,3}[.。!]?\s{0,3}$",
    re.IGNORECASE,
)
_LONGEST_ENDING = 48
_MOST_LEAD_INS = 3
_BEFORE_BOX = re.compile(r"(?:^|\*\*|\\[(\[]|[^\d\s*$+/^_√<>≤≥≠±\u2010-\u2013\u2212{}\\-])[\s$]*$")
_BEHIND_BOX = re.compile(r"[*$ ]*(?:$|\n|\\[)\]]|[.,;!。，；！](?!\s?\d))")
_ALTERNATIVE = re.compile(r"\b(?:or|either|maybe|perhaps|possibly)\b|或|可能", re.IGNORECASE)

_EXPLICIT = re.compile(
    r"\b(?:answer|result)(?:\s{1,3}is\b|\s{0,3}:)\s{0,3}:?|答案(?:是|为|\s{0,3}:)\s{0,3}:?", re.IGNORECASE
)


def explicit_statement(text: str) -> str | None:
    """What follows the one "the answer is" of ``text``; None if it says that never or more than once.

    explicit_statement("Step 6: the answer is 9") -> "9"
    """
    found = list(islice(_EXPLICIT.finditer(text), 2))
    return text[found[0].end() :].strip() or None if len(found) == 1 else None


def boxed_statement(text: str) -> str | None:
    """The content of the one box of ``text``, or of several that are the same; None if the answer is more than that.

    It is where something goes on before or behind the box ("-\\\\boxed{5}", "\\\\boxed{5} kg"), or the rest rejects or
    offers something ("not \\\\boxed{B}", "A or \\\\boxed{B}").

        boxed_statement("So we get \\\\boxed{\\\\frac{3}{4}}.") -> "\\\\frac{3}{4}"
    """
    contents, outside = split_at_boxes(text)
    if len(set(contents)) != 1:
        return None
    is_whole = all(_BEFORE_BOX.search(before) for before in outside[:-1]) and all(
        _BEHIND_BOX.match(behind) for behind in outside[1:]
    )
    rest = " ".join(outside)
    return contents[0] if is_whole and affirmed(rest) == rest and not _ALTERNATIVE.search(rest) else None


def without_lead_in(text: str) -> str:
    """``text`` without "The answer is", "答案是", "Ответ:" and the like before it, and "is the answer" behind it.

    Only what stands at the very beginning or end goes: "The answer is not B" becomes "not B". "" if nothing is left.

        without_lead_in("So the final answer is: B") -> "B"
    """
    for _ in range(_MOST_LEAD_INS):
        if (lead_in := _LEAD_IN.match(text)) and lead_in.end():
            text = text[lead_in.end() :].lstrip()
    ending = _ENDING.search(text, max(0, len(text) - _LONGEST_ENDING))
    return text[: ending.start()] if ending and ending.start() else text
