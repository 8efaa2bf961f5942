"""Questions for what is not so: "Which statement is NOT correct?", "All of these appear EXCEPT", "不正确的是".

There a sentence that says an option is true, or appears, does not choose it, and one that says it is false, or does
not appear, does. Of a sentence that is about an option in any other way nothing is taken.
"""

from __future__ import annotations

import re
from functools import lru_cache

from vlm_pg.answers.clauses import clauses
from vlm_pg.eval.reading.option_letters import is_letter
from vlm_pg.eval.reading.option_masks import placeholders, without_placeholders
from vlm_pg.eval.reading.option_texts import OptionTexts
from vlm_pg.eval.reading.stems import words_in
from vlm_pg.eval.reading.verdicts import DENIAL, FALSE, NOT, TRUE

_UNTRUE = r"(?:incorrect(?:ly)?|false|wrong|untrue|inaccurate|mistaken)"
_STATEMENT = r"(?:statements?|options?|descriptions?|claims?|sentences?|captions?|conclusions?|assertions?)"
# No part of a sentence that tells when or why: "What does she do when she is not watched?" asks for what is so.
_SAME_PART = (
    r"(?:(?!\b(?:when|while|if|after|before|because|since|so|reason|cause|without|happens)\b)[^?.!\n;]){0,160}?"
)
_ASKS = re.compile(
    rf"\b(?:which|what|who|whom)\b{_SAME_PART}{NOT}\s(?P<verb>\w{{2,20}})|"
    rf"\b(?:which|what)\b{_SAME_PART}\b(?:{_STATEMENT}|one|following|these)\b{_SAME_PART}\b{_UNTRUE}\b|"
    rf"\b(?:which|what|identify|select|choose|find|mark)\b{_SAME_PART}\b{_UNTRUE}\s{_STATEMENT}|"
    r"\b(?:all|each|every|any)\b[^?\n]{0,200}\bexcept\b\W{0,4}(?:for\W{0,4})?(?:(?:which|what)\b[^\n]{0,20})?$|(?-i:\bEXCEPT\b)|"
    r"(?:不正确|错误|不对|有误|不符合?|不属于|不包括|不包含|没有?出现|未出现|没有?提到|未提[到及]|不恰当|不合理|不是)"
    r"[^?？\n]{0,12}(?:的是|的一项|是哪|的选项|的说法)|哪[^?？\n]{0,15}(?:没有?|不|未|错误)|除了[^?？\n]{0,20}哪|"
    r"\bwelche[rsnm]?\b[^?\n]{0,120}\b(?:nicht|kein\w{0,2}|falsch\w{0,2}|inkorrekt|unzutreffend)\b|"
    r"\b(?:laquelle|lequel|lesquel\w{1,3}|quel\w{0,3})\b[^?\n]{0,120}(?:\bpas\b|\bfauss?e?s?\b|\bfaux\b|\bincorrecte?s?\b)|"
    r"\b(?:cu[áa]l\w{0,2}|quais|qual)\b[^?\n]{0,120}\b(?:no|não|incorret[ao]s?|incorrect[ao]s?|fals[ao]s?|nunca)\b|"
    r"\bкак(?:ое|ая|ой|ие)\b[^?\n]{0,120}\b(?:не|неверн\w{1,3}|неправильн\w{1,3})\b",
    re.IGNORECASE,
)
_SAYS_ANSWER = re.compile(
    r"\b(?:answers?|antwort|respuesta|réponse|resposta|risposta|ответ|choose|choice|pick|select|wähle|elijo|choisis|go\swith|"
    r"the\sexception)\b|\b(?:correct|right|best)\soption\b|答案|选(?!项)",
    re.IGNORECASE,
)
_SHOWN = re.compile(
    r"\b(?:appear\w{0,3}|shown|seen|visible|present|mentioned|included|depicted|occur\w{0,4}|happen\w{0,3}|match\w{0,3}|fits?|describes?|as\s(?:the\s\w{1,15}\s)?shows|"
    r"agrees?|holds?|belongs?|there\s(?:is|are|was|were)|erscheint|aparece|apparaît)\b|出现|提到|提及|属于",
    re.IGNORECASE,
)
_SHOWS = re.compile(
    r"^\W{0,4}(?:and\s|but\s)?(?:the\s)?(?:video|clip|film|graph|image|picture|text|speaker|it|i|we|you)\s(?:\w{1,8}(?:\s|n['’]t\s)){1,2}?"
    r"(?:ever\s)?(?:shows?|see|mentions?|contains?|includes?|features?|depicts?|have|find)\b|^\W{0,4}视频中?没有",
    re.IGNORECASE,
)
_LEADING_NO = re.compile(r"^\W{0,4}(?:no|yes)\s?[,:]\s", re.IGNORECASE)
_ENDS_IN_DENIAL = re.compile(r"\b(?:is|are|was|were|do|does|did)(?:\snot|n['’]t)\W{0,3}$", re.IGNORECASE)
# What may be otherwise elsewhere, or is only supposed.
_IN_PART = re.compile(
    r"\b(?:at\sfirst|initially|until|later|eventually|(?:at|in)\sthe\s(?:start|beginning|end)|may|might|could|would|if|whether|"
    r"necessarily|sure|certain|clear|only|think|thought|seems?|claims?|says?)\b|起初|一开始|可能|如果|是否",
    re.IGNORECASE,
)
_UNKNOWN = re.compile(r"\b(?:tell|determin\w{1,3}|decid\w{1,3}|know|unclear|unknown)\b|知道|确定|判断", re.IGNORECASE)
_BUT = re.compile(r"^\W{0,4}(?:but|yet|though|although|however|then|later|until)\b|^(?:但|后来)", re.IGNORECASE)
_ALL_BUT = re.compile(
    r"\b(?:all|every\w{0,5}|each|none)\b(?P<before>[^.;\n]{0,80}?),?\s(?:except|but|besides|other\sthan|apart\sfrom|save)\s(?:for\s)?"
    r"(?P<rest>[^.;\n]{1,120})",
    re.IGNORECASE,
)
_ONLY = re.compile(r"\bonly\s(?=(?:option\s|statement\s)?(?:\(?[A-Z]\b|optxt))", re.IGNORECASE)
_LETTER = re.compile(r"(?<![A-Za-z0-9'’])([A-Z])(?![A-Za-z0-9'’])")
_VERDICT_AFTER = re.compile(
    r"(?<![A-Za-z])([A-Z])\)?\s?[:：–-]\s{0,3}(?=(?:not\s)?(?:in)?(?:correct|true|false|wrong|right|accurate)\b)"
)
_SMALL_WORDS = frozenset(
    words_in(
        "a an the of in on at by to is are was were be been do does did has have had can could not n't t never no any "
        "that which this it its there and but so because since i we you ever at all anywhere actually clearly really "
        "definitely option statement choice sentence description video clip film graph image picture text cannot "
        "isn't aren't wasn't weren't doesn't don't didn't hasn't haven't can't therefore thus hence one animal object "
        "thing item however then"
    )
)
_NAMING = frozenset(words_in("it is the a an so therefore thus hence must be would option statement choice and"))


@lru_cache(maxsize=512)
def asks_for_exception(question: str) -> bool:
    """Whether ``question`` asks for the one option that is not so."""
    return _ASKS.search(question) is not None


class Exceptions:
    """Rewrites what is said of the options of a question for what is not so, as choices and nothing else."""

    def __init__(self, texts: OptionTexts, question: str) -> None:
        self._texts, self._letters = texts, frozenset(texts.choices)
        found = _ASKS.search(question)
        verb = found["verb"] if found and found["verb"] else ""
        self._asked = frozenset(words_in(question))
        self._verb = frozenset(words_in(verb)) - _SMALL_WORDS

    def as_choices(self, sentence: str) -> str:
        """``sentence`` with "the answer is C" for what says that C is not so, and without what says that one is so.

        Options' whole texts are masked in ``sentence``.

            as_choices("A and B are true, C is false.") -> "the answer is C"
        """
        sentence = _VERDICT_AFTER.sub(r"\1 is ", _LEADING_NO.sub("", sentence))
        if (excepted := self._excepted(sentence)) is not None:
            return excepted
        sentence = _ONLY.sub("", sentence)
        kept: list[str] = []
        chosen: set[str] = set()
        is_judged = is_open = False
        for clause in clauses(sentence):
            part = clause.text
            if _SAYS_ANSWER.search(part):
                kept.append(part)
                continue
            letters = self._letters_in(part)
            verdict = self._verdict(part, sentence, bool(letters))
            is_judged = is_judged or verdict is not None
            if verdict is False and letters:
                chosen |= letters
            elif verdict is True:
                is_open = is_open or bool(not letters and chosen and _BUT.search(part))
                # "A, B and D are true", "Option C: the bird is shown"
                while kept and not clause.is_reason and not _SAYS_ANSWER.search(kept[-1]):
                    kept.pop()
            elif verdict is None and self._only_names(part):
                kept.append(part)
        if is_judged:
            kept = [part for part in kept if not placeholders(part) or _SAYS_ANSWER.search(part)]
        if chosen and not is_open and not any(_SAYS_ANSWER.search(part) for part in kept):
            kept = [part for part in kept if not self._letters_in(part) - chosen]
            kept.append(f"the answer is {' or '.join(sorted(chosen))}")
        return ", ".join(kept)

    def _excepted(self, sentence: str) -> str | None:
        """Of "all but C are true" C, of "all but C are false" nothing; None for any other sentence."""
        found = _ALL_BUT.search(sentence)
        letters = self._letters_in(found["rest"]) if found else frozenset()
        if not found or len(letters) != 1:
            return None
        told = found["before"] + found["rest"]
        is_denied = FALSE.search(told) or DENIAL.search(told) or found[0].lower().startswith("none")
        return "" if is_denied or _IN_PART.search(told) else f"the answer is {min(letters)}"

    def _letters_in(self, part: str) -> frozenset[str]:
        """The options that a part of a sentence is about."""
        letters = {one[1] for one in _LETTER.finditer(part) if is_letter(one[1], part[one.start() :])}
        letters = (letters & self._letters) | placeholders(part)
        return frozenset(letters) or self._texts.named_loosely(part)

    def _verdict(self, part: str, sentence: str, has_letters: bool) -> bool | None:
        """Whether a part says that something is so (True) or not (False); None: neither, or it is not clear."""
        says_truth = FALSE.search(part) or TRUE.search(part)
        says_shown = _SHOWN.search(part) or _SHOWS.search(part) or self._verb & set(words_in(part))
        is_short = _ENDS_IN_DENIAL.search(part) is not None and part.strip() != sentence.strip(" .")
        is_none = re.match(r"(?:but|and)?\s?\bno\s", part, re.IGNORECASE) and _SHOWN.search(sentence)
        bare = FALSE.sub(" ", part)
        num_denials = len(FALSE.findall(part)) + len(DENIAL.findall(bare))
        if num_denials == 0:
            return True if says_truth or says_shown else None
        if num_denials > 1 or _IN_PART.search(sentence) or _UNKNOWN.search(part):
            return None
        if says_truth:
            return False
        told = set(words_in(without_placeholders(part))) - {letter.casefold() for letter in self._letters}
        of_options = frozenset().union(*(words_in(text) for text in self._texts.choices.values()))
        is_about_more = told - _SMALL_WORDS - self._asked - of_options - set(words_in(" ".join(_SHOWN.findall(part))))
        if is_about_more - set(words_in(" ".join(found[0] for found in _SHOWS.finditer(part)))):
            return None
        is_told = not _LETTER.search(part) and not placeholders(part)  # a statement itself is denied
        return False if says_shown or is_short or is_none or (is_told and has_letters) else None

    def _only_names(self, part: str) -> bool:
        """Whether a part is no more than an option's letter, or its text, and words that lead to it."""
        if not placeholders(part):
            return not _SHOWN.search(part) and bool(_LETTER.search(part))
        words = [word for word in words_in(without_placeholders(part)) if word not in _NAMING]
        return not [word for word in words if word.upper() not in self._letters]
