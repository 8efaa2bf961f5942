"""An output as the statements it makes, one after the other: which may be its answer, and where it changes its mind."""

from __future__ import annotations

import re

from vlm_pg.answers.clauses import phrases

MAX_STATEMENTS = 400

_SENTENCE = re.compile(
    r"(?:(?<=[.?])|(?<=[^\W\d]!))[)\"”]?\s{1,9}(?=\S)|(?<=[。！？])\s{0,3}|[;；]\s(?=[^\W\d_]{2})|\n{1,99}"
)
_BULLET = re.compile(r"^\s{0,20}(?:[-•*–]\s{1,9}|\(?[0-9]{1,2}[.)]\s{1,9}(?=\S)|#{1,6}\s|[>✅✓✔☑]\s{0,3})")
_RULE = re.compile(r"[\s|:=*_-]{0,400}")
# What is not the answer whatever it says: notes, courtesy, what is usual, checks of what was said.
_NOTE = re.compile(
    r"\s{0,9}[(*]{0,2}(?:note|notes|hinweis|anmerkung|remarque|nota|caveat|disclaimer|"
    r"confidence|p\.?s\.?|注|注意|备注|说明|примечание)\s{0,3}[:：,]",
    re.IGNORECASE,
)
_COURTESY = re.compile(
    rf"\b{phrases('feel free, let me know, hope this, hope that, hope it, happy to')}\b|"
    rf"\b{phrases('if you have, if you need, if you want, would you like')}\b|"
    r"如果(?:你|您)|希望",
    re.IGNORECASE,
)
_USUAL = re.compile(
    r"\b(?:typically|usually|generally|in\s{1,3}general|on\s{1,3}average|commonly|standard|"
    r"for\s{1,3}(?:example|instance)|e\.g\.|"
    r"üblicherweise|normalerweise|généralement|normalmente|обычно)\b|通常|一般|例如|比如",
    re.IGNORECASE,
)
_CHECK = re.compile(
    r"\b(?:let\s{1,3}(?:me|us|'s)\s{1,3}(?:double[\s-]?check|verify|check|confirm)|"
    r"to\s{1,3}(?:double[\s-]?check|verify|check)|"
    r"check|verification|verify|proof|sanity\s{1,3}check|probe|vérification|comprobación|"
    r"проверка)\b\s{0,3}[:,.]?|验证|检查|检验|验算",
    re.IGNORECASE,
)
_CORRECTION = re.compile(
    r"\b(?:wait|hold\s{1,3}on|actually|correction|on\s{1,3}(?:reflection|"
    r"second\s{1,3}thought)s?|sorry|apologies|scratch\s{1,3}that|oops|hmm|"
    r"let\s{1,3}me\s{1,3}(?:re-?(?:count|compute|consider|calculate|think|do|examine|visit|"
    r"phrase|vise)|correct|fix|count\s{1,3}again|try\s{1,3}again|look\s{1,3}again)|"
    r"looking\s{1,3}(?:again|further|closer|more\s{1,3}closely)|recounting|"
    r"i\s{1,3}(?:made\s{1,3}a\s{1,3}mistake|was\s{1,3}wrong|misread|miscounted|forgot|correct)|"
    r"that(?:'s|\s{1,3}is|\s{1,3}was)\s{1,3}(?:wrong|incorrect|not\s{1,3}right)|"
    r"or\s{1,3}(?:rather|maybe|perhaps)|moment\s{1,3}mal|"
    r"moment|warte|halt|korrektur|verzeihung|entschuldigung|stimmt\s{1,3}nicht|doch\s{1,3}nicht|"
    r"attendez|attends|en\s{1,3}fait|pardon|erreur|je\s{1,3}me\s{1,3}trompe|"
    r"espera|perdón|en\s{1,3}realidad|corrijo|corrección|me\s{1,3}equivoqu[ée]|na\s{1,3}verdade|"
    r"desculpe?|aspetta|anzi|scusa|стоп|подождите|погодите|точнее|извините|исправл\w{0,6})\b|"
    r""
    r"(?:^|[.!?,]\s)no[,:.!]\s|(?:^|[.!?]\s)(?:nein|non|нет)[,:]\s|不对|等等|等一下|更正|哦不|搞错|说错|其实|抱歉|"
    r"いや|待って|訂正|すみません|아니[,.요 ]|잠깐|정정",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(
    r"[✓✔✅☑]|\b(?:is|was|are|that['’]s|it['’]s|seems|looks)\s{1,3}(?:indeed\s{1,3}|"
    r"all\s{1,3})?(?:correct|right|consistent|fine)\b|"
    r"(?:^|[.!,:]\s)(?:correct|yes|right|stimmt|richtig|correcto|exact|верно)\s{0,2}[.!,]|"
    r"\b(?:confirmed|confirms|holds|matches|works|checks?\s{1,3}out|as\s{1,3}expected|"
    r"stands)\b|正确|没错|对的|无误|正しい",
    re.IGNORECASE,
)
_DENIED = re.compile(r"\b(?:not|in)\s{0,3}(?:correct|right)\b|\bwrong\b|n't\b|不正确|不对|错", re.IGNORECASE)
_EXPLICIT = re.compile(
    r"(?:\b(?:(?:my|the|our|so|final|correct|numeric(?:al)?|short)\s{1,3}){0,3}(?:answer|result|solution)\"?\s{0,3}"
    r"(?:(?:to\s{1,3}(?:the|this)\s{1,3}question\s{1,3})?(?:is|are|would\s{1,3}be|"
    r"should\s{1,3}be|must\s{1,3}be|comes\s{1,3}out\s{1,3}(?:as|to)|"
    r"becomes)\b\s{0,3}(?:therefore|thus|then)?\s{0,3}[:：]?|[:：=])"
    r"|\b(?:final\s{1,3}(?:answer|estimate|count|value))\s{0,3}[:：\n-]|####|\banswer\s{0,3}\n"
    r"|(?:最终|正确|最后)?的?(?:答案|结果|答)(?:应该|应当|就)?(?:是|为|[:：])\s{0,3}[:：]?|答え\s{0,3}(?:は|[:：])|"
    r"(?:解答|"
    r"回答)\s{0,3}(?:は|[:：])|정답\s{0,3}(?:은|는|[:：])|답\s{0,3}(?:은|는|[:：])"
    r"|\b(?:respuesta|resposta|réponse|reponse|antwort|risposta|ergebnis|resultado|résultat|"
    r"risultato|antwoord)(?:\s{1,3}(?:correcta|correta|correcte|final|finale|correta))?"
    r"\s{0,3}(?:[:：]|(?:es|é|est|ist|è|lautet|is)\b\s{0,3}[:：]?)|\bответ\s{0,3}[:：—-]|"
    r"(?:الإجابة|الجواب)(?:\s{1,3}(?:هي|هو))?\s{0,3}[:：]?|उत्तर\s{0,3}[:：])",
    re.IGNORECASE,
)
_REASON = re.compile(
    r"[,(]?\s{0,3}(?:\b(?:because|since|given\s{1,3}that|as\s{1,3}(?:the|there|it|we|each|they|"
    r"i)|weil|denn|parce\s{1,3}que|puisque|car|pues|porque|poiché|perché|"
    r"так\s{1,3}как|потому|where|wobei|assuming|if\s{1,3}(?:we|you|one|the|i))\b|因为|由于)",
    re.IGNORECASE,
)


def statements(text: str) -> list[str]:
    """The last ``MAX_STATEMENTS`` sentences, lines and list items of ``text`` in order, without bullets."""
    parts = (_BULLET.sub("", part, count=1).strip() for part in _SENTENCE.split(text))
    return [part for part in parts if part and not _RULE.fullmatch(part)][-MAX_STATEMENTS:]


def is_beside_the_point(statement: str) -> bool:
    """Whether a statement is a note, a check, courtesy or about what is usual, and so answers nothing."""
    return any(pattern.search(statement) for pattern in (_COURTESY, _USUAL)) or any(
        pattern.match(statement) for pattern in (_NOTE, _CHECK)
    )


def without_reason(statement: str) -> str:
    """``statement`` up to where it says why: "It is 0, because -1 does not count" -> "It is 0"."""
    reason = _REASON.search(statement, 3) if len(statement) > 3 else None
    return statement[: reason.start()] if reason and reason.start() > 2 else statement


def last_correction(text: str) -> int | None:
    """Where ``text`` last changes its mind, just behind the words that say so; None if it never does."""
    found = list(_CORRECTION.finditer(text))
    return found[-1].end() if found else None


def first_correction(text: str) -> int | None:
    """Where ``text`` first changes its mind, just behind the words that say so; None if it never does."""
    first = _CORRECTION.search(text)
    return None if first is None else first.end()


def is_check(text: str) -> bool:
    """Whether ``text`` only goes over what was said before, and finds nothing wrong."""
    confirms = _CONFIRMED.search(_DENIED.sub(" ", text)) is not None
    return (confirms and not _DENIED.search(text)) or (_CHECK.search(text) is not None and not _DENIED.search(text))


def last_explicit(text: str) -> tuple[int, int] | None:
    """Where the last "The answer is" of ``text`` begins and ends; None without one."""
    found = list(_EXPLICIT.finditer(text))
    return found[-1].span() if found else None


def table_cells(statement: str) -> list[str]:
    """The cells of a table's row; [] for any other statement."""
    row = statement.strip()
    is_row = row.startswith("|") and row.endswith("|") and row.count("|") >= 3
    return [cell.strip() for cell in row.strip("|").split("|")] if is_row else []


def label_and_value(statement: str) -> tuple[str, str] | None:
    """The two sides of "Kitchen: 12"; None for a statement that is none like that."""
    match = re.fullmatch(r"([^:：\n]{1,60})[:：]\s{0,9}(\S[^\n]{0,200})", statement)
    return (match[1], match[2]) if match else None
