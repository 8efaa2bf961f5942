"""What people and models write in front of an answer, and a few words behind it, in several languages."""

from __future__ import annotations

import re
from itertools import islice

from vlm_pg.rewards.clauses import affirmed
from vlm_pg.rewards.plain_text import split_at_boxes

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
        lead_in = _LEAD_IN.match(text)
        if lead_in is None or not lead_in.end():
            break
        text = text[lead_in.end() :].lstrip()
    ending = _ENDING.search(text, max(0, len(text) - _LONGEST_ENDING))
    return text[: ending.start()] if ending and ending.start() else text
