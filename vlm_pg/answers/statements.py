"""Statements of an output: where it gives its answer, changes its mind, and repeats its question."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vlm_pg.answers.clauses import affirmed, clauses, phrases
from vlm_pg.answers.plain_text import NO_GAPS, without_marks

MAX_STATEMENTS = 400
MAX_STATEMENT_CHARACTERS = 2000

_SENTENCE = re.compile(
    r"(?:(?<=[.?])|(?<=[^\W\d]!))[)\"”*]{0,3}\s{1,9}(?=\S)|(?<=[。！？])\s{0,3}|[;；]\s(?=[^\W\d_]{2})|\n{1,99}"
)
_BULLET = re.compile(r"^\s{0,20}(?:[-•*–]\s{1,9}|\(?[0-9]{1,2}[.)]\s{1,9}(?=\S)|#{1,6}\s|[✅✓✔☑]\s{0,3})")
_RULE = re.compile(r"[\s|:=*_-]{0,400}")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|approx|vs|etc|Mr|Mrs|Ms|Dr|St|No|[A-Z])|^\s{0,9}[0-9]{1,2})\.$")
_ASIDE = re.compile(
    rf"\s{{0,9}}[(*]{{0,2}}{phrases('note, notes, remark, caveat, confidence, 注, 注意, 备注, 说明')}\s{{0,3}}[:：,]|"
    rf".*\b{phrases('feel free, let me know, hope this, hope that, if you have, if you need')}\b|"
    rf".*\b{phrases('if you want, would you like, typically, usually, in general, on average')}\b|"
    rf".*\b{phrases('happy to help, happy to assist, happy to explain, happy to clarify, happy to provide')}\b|"
    r".*(?:如果[你您]|希望|通常)",
    re.IGNORECASE,
)
_CORRECTION = re.compile(
    r"\b(?:wait|hold\s{1,3}on|actually|correction|on\s{1,3}(?:reflection|second\s{1,3}thoughts?)|sorry|apologies|"
    r"scratch\s{1,3}that|oops|hmm|let\s{1,3}me\s{1,3}(?:re-?\w{3,10}|correct|fix|count\s{1,3}again|try\s{1,3}again|look\s{1,3}again)|"
    r"looking\s{1,3}(?:again|further|closer|more\s{1,3}closely)|recounting|"
    r"i\s{1,3}(?:made\s{1,3}a\s{1,3}mistake|was\s{1,3}wrong|misread|miscounted|forgot|correct)|"
    r"that(?:['’]s|\s{1,3}is|\s{1,3}was)\s{1,3}(?:wrong|incorrect|not\s{1,3}right)|or\s{1,3}(?:rather|maybe|perhaps)|"
    r"warte|moment|korrektur|attendez|attends|en\s{1,3}fait|pardon|erreur|espera|perdón|en\s{1,3}realidad|corrijo)\b|"
    r"(?:^|[.!?,]\s)no[,:.!]\s|不对|等等|等一下|更正|搞错|说错|其实|抱歉",
    re.IGNORECASE,
)
_CONFIRMATION = re.compile(
    r"[✓✔✅☑]|\b(?:is|was|are|that['’]s|it['’]s|seems|looks)\s{1,3}(?:indeed\s{1,3}|all\s{1,3})?(?:correct|right|consistent|fine)\b|"
    r"(?:^|[.!,:]\s)(?:correct|yes|right)\s{0,2}[.!,]|\b(?:confirmed|confirms|holds|matches|works|checks?\s{1,3}out|stands|"
    r"double[\s-]?check|verify|verification|check)\b|正确|没错|对的|无误|验证|检查|验算",
    re.IGNORECASE,
)
_DENIAL = re.compile(r"\b(?:not|in)\s{0,3}(?:correct|right)\b|\bwrong\b|n['’]t\b|不正确|不对|错", re.IGNORECASE)
_EXPLICIT = re.compile(
    r"(?:\b(?:(?:my|the|our|so|final|correct|right|best|numeric(?:al)?|short)\s{1,3}){0,3}"
    r"(?:answer|result|solution(?:\s{1,3}set)?|option|choice)\"?\s{0,3}"
    r"(?:(?:to\s{1,3}(?:the|this)\s{1,3}question\s{1,3})?(?:is|are|would\s{1,3}be|should\s{1,3}be|must\s{1,3}be|comes\s{1,3}out\s{1,3}(?:as|to)|"
    r"becomes)\b\s{0,3}(?:therefore|thus|then)?\s{0,3}[:：]?|[:：=])"
    r"|\b(?:my|the)\s{1,3}answer\s{1,3}(?:from\s{1,3}\w\s{1,3})?to(?=\s{1,3}(?:option\s)?\(?[A-Z0-9]\b)|\bfinal\s{1,3}(?:answer|estimate|count|value)\s{0,3}[:：\n-]|\bfinal\s{0,3}[:：]|####|\banswer\s{0,3}\n"
    r"|(?:最终|正确|最后)?的?(?:答案|结果|选项|答)(?:应该|应当|就)?(?:是|为|选|[:：])\s{0,3}[:：]?"
    r"|(?:解答|回答|答え)\s{0,3}(?:は|[:：])|(?:정답|답)\s{0,3}(?:은|는|[:：])"
    r"|\b(?:respuesta|resposta|réponse|reponse|antwort|risposta|ergebnis|resultado|résultat)"
    r"(?:\s{1,3}(?:correcta|correta|correcte|final|finale))?\s{0,3}(?:[:：]|(?:es|é|est|ist|è|lautet)\b\s{0,3}[:：]?)"
    r"|\bответ\s{0,3}[:：—-])",
    re.IGNORECASE,
)
_REASON = re.compile(
    r"[,(]?\s{0,3}(?:\b(?:because|since|given\s{1,3}that|as\s{1,3}(?:the|there|it|we|each|they|i)|(?:al|even\s{1,3})?though)\b|因为|由于)",
    re.I,
)
_CONCLUSION = re.compile(
    rf"\b{phrases('so, thus, therefore, hence, which is, which means, which makes, that is, that makes, i.e.')}\b|"
    rf"\b{phrases('for a total of, in total, in all, altogether, leaving, leaves, makes, gives, meaning')}\b|"
    r"所以|因此|故|[一总]共|即",
    re.IGNORECASE,
)
_SEEING = re.compile(
    r"\b(?:i|we|you|one)\s(?:can|could)\s(?:clearly\s)?(?:see|count|observe|find)\b|\bmost\s(?:likely|probably)\b|\b(?:no|without(?:\sa|\sany)?)\sdoubt\b",
    re.IGNORECASE,
)
_WRONG = re.compile(r"\b(?:wrong|incorrect|false|rejected|not)\s{1,3}(?:the\s{1,3})?$", re.IGNORECASE)
_VALUE = re.compile(r"[0-9]|(?<![A-Za-z])[A-Z](?![A-Za-z])")
_REJECTING = re.compile(
    r"\b(?:not|but|rather|than|instead|isn['’]t|aren['’]t|neither|nor|or|none|nothing|other|others|over|wrong|incorrect|false|"
    r"eliminated|rejected|sino|sondern|nicht)\b|不是|而是|而|不|错误?|都|非",
    re.IGNORECASE,
)
_LEADING = re.compile(r"[\s:：*_\"“`]{0,40}")

_WORD = re.compile(rf"[{NO_GAPS}]|[^\W\d_{NO_GAPS}]+(?:['’][^\W\d_]+)?")
# Words that say nothing about anything: a statement may have them beside the words of its question.
_GENERIC_WORDS = """
    a an the this that these it its it's is are was were be been being has have had do does did i we you they he
    she his her their there's one of in on at by to from for with as and so then thus hence therefore which who
    whom what when where how many much about approximately around roughly exactly precisely total altogether
    overall all together there here will see seen sees count counted counting shown shows show appear appears
    visible video image picture clip scene photo footage based answer question result final correct option choice
    best likely think believe estimate estimated say choose pick select go my our me us get gives give equal
    equals makes make means mean comes amounts value number amount quantity conclusion finally also just only
    clearly indeed definitely out up into please following above given s sec secs second seconds m min mins minute
    minutes h hour hours am pm cm mm km meter meters metre metres percent probably certainly obviously surely sure
    letter letters answers must approx circa ca rm rs usd eur gbp cny rmb minus negative
    的 是 在 有 了 个 共 一 总 约 大 和 为 这 那 里 中 上 到 从 与 就 人 可 以 看 视 频 图 片 画 面 选 答 案
    项 应 该 所 因 此 其 我 认 觉 得 负 第 只 对 正 确 最 终
"""
_GENERIC = frozenset(_GENERIC_WORDS.split())
_ENDINGS = ("ings", "ing", "ies", "ied", "ers", "ed", "es", "er", "s", "e", "y")
_IRREGULAR = {
    "left": "leav",
    "leaves": "leav",
    "sat": "sit",
    "ran": "run",
    "took": "tak",
    "put": "put",
    "people": "person",
}


def last_explicit(text: str, is_cut: bool) -> tuple[str, str] | None:
    """The statement behind the last "The answer is" of ``text``, and what follows it; None without one.

    What the length limit may have cut is none.
    """
    for found in reversed(list(_EXPLICIT.finditer(text))):
        if _WRONG.search(text[max(0, found.start() - 20) : found.start()]):
            return None
        behind = text[found.end() :]
        lead = _LEADING.match(behind)
        behind = behind[lead.end() if lead else 0 :]
        stated = next(iter(_split(behind)), "")
        rest = behind[len(stated) :]
        if (again := _EXPLICIT.search(stated)) is not None:
            stated = stated[: again.start()]
        if stated.strip() and not (is_cut and not rest.strip()):
            return stated[:MAX_STATEMENT_CHARACTERS].strip(), rest
    return None


def is_statement(sentence: str) -> bool:
    """Whether a sentence may give an answer: it is no question, note, courtesy or word on what is usual."""
    return not _ASIDE.match(sentence) and not sentence.rstrip(' *_)"”').endswith(("?", "？"))


def correction(text: str, *, last: bool = False) -> str | None:
    """What follows the first (or last) change of mind in ``text``; None if there is none."""
    found = list(_CORRECTION.finditer(text))
    return text[found[-1 if last else 0].end() :] if found else None


def is_check(text: str) -> bool:
    """Whether ``text`` only checks the answer before it, and finds nothing wrong."""
    return _CONFIRMATION.search(_DENIAL.sub(" ", text)) is not None and not _DENIAL.search(text)


def sentences(text: str) -> list[str]:
    """The last ``MAX_STATEMENTS`` sentences, lines and list items of ``text`` in order, without bullets."""
    parts = _split(text)
    bare = (_BULLET.sub("", part, count=1).strip() if len(parts) > 1 else part.strip() for part in parts)
    return [part for part in bare if part and not _RULE.fullmatch(part)][-MAX_STATEMENTS:]


def _split(text: str) -> list[str]:
    """``text`` in pieces that end where a sentence or a line does."""
    parts: list[str] = []
    start = 0
    for end in (*(found.end() for found in _SENTENCE.finditer(text)), len(text)):
        if not _ABBREVIATION.search(text[start:end].rstrip()) or end == len(text):
            parts.append(text[start:end])
            start = end
    return [part for part in parts if part]


def without_reason(statement: str) -> str:
    """``statement`` up to its reason: "It is 0, because -1 does not count" -> "It is 0"."""
    reason = _REASON.search(statement, 1)
    return statement[: reason.start()] if reason else statement


def stems(text: str) -> list[str]:
    """The words of ``text`` that say something, without their endings, in order."""
    return [stem(word) for word in _WORD.findall(text.lower()) if word not in _GENERIC]


def stem(word: str) -> str:
    """stem("opening") == stem("opens") == "open"."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    word = word.removesuffix("'s").removesuffix("’s")
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def is_echo(
    statement: str, known: Iterable[str], rejectable: Iterable[str] = (), *, any_language: bool = False
) -> bool:
    """Whether ``statement`` has no word that is not among the ``known`` stems, and rejects nothing.

    It may reject another answer: a number, or words of ``rejectable``. With ``any_language`` words of another script
    than the known ones are passed over.

    is_echo("There are 3 people in the kitchen", stems("How many people are in the kitchen?")) -> True
    is_echo("There are 3 people in the garden", stems("How many people are in the kitchen?")) -> False
    """
    text = _SEEING.sub(" ", without_reason(without_marks(statement)))
    others = set(rejectable)
    allowed = set(known)
    foreign = any_language and all(word.isascii() for word in allowed)
    if affirmed(text) == text:
        return {word for word in stems(text) if word.isascii() or not foreign} <= allowed
    for clause in clauses(text):
        own = {word for word in stems(_REJECTING.sub(" ", clause.text)) if word.isascii() or not foreign}
        if clause.rejections and not (own & others or _VALUE.search(clause.text)):
            return False
        if clause.is_unclear or not own <= allowed | (others if clause.rejections else set()):
            return False
    return True


def conclusion(statement: str) -> str | None:
    """What a statement comes to: "2 on the left and 2 behind, so 4 in total" -> "4 in total"; None without one."""
    found = list(_CONCLUSION.finditer(statement))
    rest = statement[found[-1].end() :].strip() if found else ""
    return rest or None
