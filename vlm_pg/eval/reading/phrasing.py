"""How statements follow each other: sentences, questions, changes of mind, conclusions, and giving up."""

from __future__ import annotations

import re

from vlm_pg.answers.clauses import phrases

_BREAK = re.compile(r"(?<=[.!?])[\"'”’)]{0,2}\s{1,4}(?=\S)|(?<=[。！？；;])\s{0,4}")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|etc|cf|approx|fig|no)\.$", re.IGNORECASE)
_LABEL_BEFORE = re.compile(r"\b[A-Z]\.$")
_SINGLE = re.compile(r"^\W{0,6}(?:[A-Za-z]|[0-9]{1,2})\.$")
_TAKING_UP = phrases(
    "wait, hmm, hm, actually, sorry, correct myself, correction, on second thought, on reflection, "
    "scratch that, double-check, double check, let me check, let me verify, recheck, re-check, my "
    "mistake, i misread, i was wrong, however, but, although, though, rather, oops, warte, moment, "
    "espera, attends, instead"
)
_CORRECTS = re.compile(
    rf"\b{_TAKING_UP}\b"
    r"|^\W{0,3}no\s?[,:—-]|等等|不对|等一下|但是?|其实",
    re.IGNORECASE,
)
_TAKING_BACK = phrases(
    "wait, hmm, hm, actually, sorry, correct myself, on second thought, on reflection, scratch that, my "
    "mistake, i misread, i was wrong, oops, warte, moment, espera"
)
_TURNS = re.compile(
    rf"\b{_TAKING_BACK}\b|等等|不对|等一下",
    re.IGNORECASE,
)
_CONCLUDING = phrases(
    "so, therefore, thus, hence, final, finally, in conclusion, overall, conclude, in summary, "
    "consequently, then, is confirmed, correct answer, which leaves, that leaves"
)
_CONCLUDES = re.compile(
    rf"\b{_CONCLUDING}\b|"
    rf"\b{phrases('also, daher, folglich, donc, por lo tanto, entonces, portanto')}\b|所以|因此|综上|故|最终",
    re.IGNORECASE,
)
_CONTRASTS = re.compile(
    r"\bon\sthe\sother\shand\b|\b(?:in|by)\scontrast\b|\bmeanwhile\b|\bconversely\b|\bdagegen\b|\ben\srevanche\b|另一方面|相比之下",
    re.IGNORECASE,
)
_TELLING = phrases(
    "tell, say, decide, determine, identify, see, hear, answer, know, watch, view, choose, judge, make "
    "out, process, provide, access, give"
)
_GIVES_UP = re.compile(
    rf"\b(?:can(?:no|['’])t|can\snot|could\s?n[o'’]t|couldn['’]t|unable\sto|not\sable\sto|no\sway\sto|"
    rf"impossible\sto|hard\sto)\s"
    rf"(?:\w{{1,12}}\s){{0,2}}{_TELLING}\b|"
    rf"\b(?:lost?|lose)\s(?:track|sight)\b|\b(?:do(?:es)?\s?n['’]t|do(?:es)?\snot|did\s?n['’]t)\s(?:know|show|"
    rf"include|contain|provide|let)\b|"
    r"\bcan(?:not|['’]t)\sbe\s(?:determined|seen|known|told|answered|decided)\b|\b(?:not\senough|"
    r"insufficient)\s(?:\w{1,12}\s)?(?:information|detail|context|evidence)|"
    r"\btoo\s(?:dark|blurry|small|short|far)\sto\b|\bplease\s(?:provide|share|upload|describe)\b|"
    r"\bnothing\sin\b.{0,40}\b(?:tells?|shows?|says?)\b|"
    r"\bi['’]?m\ssorry\b|\bas\san\sai\b|\bnone\sof\sthe\soptions\b|\bnot\s(?:clear|visible|shown)\b|"
    r"无法|不能确定|看不清|不知道",
    re.IGNORECASE,
)
_HYPOTHETICAL = re.compile(
    r"\b(?:would|might|could)\s(?:not\s)?(?:also\s)?(?:have|be|been|mean|need|show|say|call|point|fit|look|"
    r"seem)\b|^\W{0,4}if\b|\bone\scould\b|"
    r"\b(?:looks|seems|appears)\s(?:like|tempting)\b|\bat first (?:sight|glance)\b",
    re.IGNORECASE,
)
_REMAINING = phrases(
    "remaining, other one, one left, option left, last one, remaining one, only one left, one remaining, "
    "option remaining, remaining option"
)
_REST = re.compile(
    rf"\b(?:only|the|that)\s(?:\w{{1,10}}\s)?{_REMAINING}\b|"
    r"\bthe\sother\s(?:one|option|answer|choice)\b|\bonly\sone\s(?:option\s)?(?:is\sleft|remains|left)\b",
    re.IGNORECASE,
)
_ORDINALS = {
    "first": "1",
    "second": "2",
    "third": "3",
    "fourth": "4",
    "fifth": "5",
    "sixth": "6",
    "seventh": "7",
    "eighth": "8",
    "1st": "1",
    "2nd": "2",
    "3rd": "3",
    "4th": "4",
    "5th": "5",
}
_NAMES = phrases("option, choice, answer, caption, sentence, description, statement, answer choice, candidate")
_ORDINAL = re.compile(rf"\bthe\s({'|'.join(_ORDINALS)})\s(?:answer\s)?{_NAMES}\b(?!\s(?:frame|part))", re.IGNORECASE)
_NUMBER = re.compile(rf"\b{_NAMES}\s(?:number\s)?([1-9][0-9]?)\b(?![.,:]?[0-9%])", re.IGNORECASE)
_LESS = re.compile(
    r"\b(.{1,120}?)\s(?:fits?|is|matches|works|describes|captures)\s(?:[^.\n]{0,60}\s)?(?:less|"
    r"worse)\s(?:[^.\n]{0,40}\s)?than\s(?:the\s)?(.{1,80})",
    re.IGNORECASE,
)
_LEFT_ORDINAL = re.compile(rf"^({'|'.join(_ORDINALS)})\b(?!\s\w)", re.IGNORECASE)
_MORE_LIKELY = re.compile(
    r"\b([A-Z])\s(?:is|seems|looks|fits)\s(?:much\s)?(?:more\s(?:likely|plausible)|better)\sthan\s[^.\n]{1,80}"
)
_CAN_ONLY = re.compile(
    r"\b(?:can(?:no|['’])t|can\snot|cannot|could\s?n['’]t)\s(?:\w{1,10}\s){0,2}(?:anything|"
    r"any\s(?:other\s)?(?:option|choice|one|answer))\s(?:but|except|other\sthan)\s",
    re.IGNORECASE,
)
_ALL_BUT = re.compile(
    r"\b(?:every|all|any|each)\s(?:of\s)?(?:the\s)?(?:other\s)?(?:options?|choices?|answers?|ones?|"
    r"statements?)\s(?:but|except|besides|other\sthan|save)\s(?:for\s)?"
    r"(\(?[A-Z]\)?)\s[^.\n]{0,30}(?:contradict|wrong|incorrect|false|exclude|ruled|eliminat|fail|impossible|"
    r"not\b|n['’]t\b)[^.\n]{0,200}",
    re.IGNORECASE,
)
# "None of them, except A": what is excepted is the answer.
_NONE_BUT = re.compile(
    r"\bnone\s(?:of\s)?[^.\n]{0,80}?,?\s(?:except|but|besides|other\sthan|apart\sfrom|save)\s(?:for\s)?(\(?[A-Z]\)?)(?![\w'’])",
    re.IGNORECASE,
)
_OF_OTHERS = re.compile(
    r"\b(?:most|many|some|other)\s(?:people|viewers|users|students|models|observers)\b|\b(?:others|everyone\selse)\s"
    r"(?:would|might|may|will|could)?\s?(?:say|answer|choose|pick|think|select|guess)\b",
    re.IGNORECASE,
)
_QUOTES = re.compile(
    r"\b(?:option|choice|answer|statement)\s\(?[A-Z]\)?\s(?:only\s)?(?:says|states|claims|suggests|mentions|proposes|reads|"
    r"refers\sto|talks\sabout)\b(?!.{0,200}\b(?:exactly|indeed|correct|right|true|matches|confirmed|"
    r"consistent)\b)",
    re.IGNORECASE,
)
_COUNTERFACTUAL = re.compile(
    r"\bwould\s(?:only\s)?(?:have\s)?(?:be|been)\b[^.\n]{0,60}\bif\b(?!\s(?:i|we|you)\b|\s(?:forced|asked))|"
    r"^\W{0,4}(?:if|had)\b(?!\s(?:i|we|you)\shad\sto\b)[^.\n]{0,120}\b(?:had|were|did)\b[^.\n]{0,120}\bwould\b",
    re.IGNORECASE,
)
_SURVEYS = re.compile(
    r"\b(?:each|every|all|the)\s(?:of\sthe\s)?(?:given\s|possible\s|provided\s|answer\s){0,2}(?:options?|choices?|answers?|"
    r"statements?)\b|\bone\sby\sone\b|选项",
    re.IGNORECASE,
)
_OTHER_REASON = re.compile(
    r"\b(?:for|because\sof|due\sto)\s(?:another|a\sdifferent|some\sother|other)\s(?:reason|cause)s?\W{0,3}$",
    re.IGNORECASE,
)
_RANKING = re.compile(r"\(?([A-Z])\)?(?:\s{0,2}>\s{0,2}\(?[A-Z]\)?){1,15}")
_SECOND_BEST = re.compile(
    r"^\W{0,6}(?:second|third|next|2nd|3rd)[\s-](?:best|choice|most likely)\b|^\W{0,6}runner-up\b", re.IGNORECASE
)


# Chinese has no blank behind a question mark: "C?不，是D".
_ASKED = re.compile(r"(？|\?(?=[\u4e00-\u9fff]))(?=\S)")


def sentences(line: str) -> list[str]:
    """The sentences of one line; a label ("B.") and an abbreviation end none."""
    found: list[str] = []
    for piece in _BREAK.split(_ASKED.sub(r"\1 ", line)):
        labels_next = piece.startswith("optxt") and _LABEL_BEFORE.search(found[-1]) if found else None
        if found and (labels_next or _ABBREVIATION.search(found[-1]) or _SINGLE.match(found[-1])):
            found[-1] += f" {piece}"
        elif piece.strip():
            found.append(piece)
    return found


def corrects(sentence: str) -> bool:
    """Whether a sentence takes up again what was said: "Wait, ...", "However, ...", "Let me check"."""
    return _CORRECTS.search(sentence) is not None


def turns(sentence: str) -> bool:
    """Whether a sentence says that the one before it was wrong: "Wait, ...", "Sorry, ..."."""
    return _TURNS.search(sentence) is not None


def concludes(sentence: str) -> bool:
    """Whether a sentence draws a conclusion: "So ...", "The final answer ..."."""
    return _CONCLUDES.search(sentence) is not None


def contrasts(sentence: str) -> bool:
    """Whether a sentence sets something beside what was said before: "..., on the other hand, ..."."""
    return _CONTRASTS.search(sentence) is not None


def gives_up(sentence: str) -> bool:
    """Whether a sentence says that there is no answer: a refusal, or something that cannot be told."""
    return _GIVES_UP.search(sentence) is not None or _OTHER_REASON.search(sentence) is not None


def is_hypothetical(sentence: str) -> bool:
    """Whether a sentence tells what could be, not what is."""
    return _HYPOTHETICAL.search(sentence) is not None


def is_of_others(sentence: str) -> bool:
    """Whether a sentence tells what others would answer, what an option says, or what would be otherwise."""
    return any(pattern.search(sentence) for pattern in (_OF_OTHERS, _QUOTES, _COUNTERFACTUAL))


def surveys(text: str) -> bool:
    """Whether ``text`` is about to go through the options: "Let's look at each option"."""
    return _SURVEYS.search(text) is not None


def is_question(sentence: str) -> bool:
    """Whether a sentence asks."""
    return sentence.rstrip(" \"'”’)*").endswith(("?", "？"))


def points_to_rest(text: str) -> bool:
    """Whether ``text`` chooses what is left of the options: "it has to be the other one"."""
    return _REST.search(text) is not None


def is_second_best(line: str) -> bool:
    """Whether a line names what comes after the best: "Second best: D"."""
    return _SECOND_BEST.search(line) is not None


def rephrased(sentence: str, letters: tuple[str, ...], *, all_but: bool = True) -> str:
    """``sentence`` with options' letters for their places, and without what says a thing by its opposite.

    rephrased("It must be the third option", ("A", "B", "C")) -> "It must be option C"

    ``all_but``: whether the one excepted from what is wrong is chosen by that.
    """
    if (less := _LESS.search(sentence)) and len(letters) > 1:
        better = _LEFT_ORDINAL.sub(lambda one: f"the {one[1]} option", less[2])
        sentence = f"{better} is the best"
    sentence = _MORE_LIKELY.sub(r"the answer is \1", sentence)
    sentence = _CAN_ONLY.sub("must be ", sentence)
    if all_but:
        sentence = _NONE_BUT.sub(r"the answer is \1", _ALL_BUT.sub(r"the answer is \1", sentence))
    if len(letters) > 1 and (ranking := _RANKING.search(sentence)):
        sentence = f"{sentence[: ranking.start()]} the answer is {ranking[1]}"

    def letter_of(place: str, whole: str) -> str:
        return f"option {letters[int(place) - 1]}" if 0 < int(place) <= len(letters) else whole

    sentence = _ORDINAL.sub(lambda found: letter_of(_ORDINALS[found[1].lower()], found[0]), sentence)
    return _NUMBER.sub(lambda found: letter_of(found[1], found[0]), sentence)
