"""Short texts: the words that an output gives for its answer, taken out of the sentence they stand in."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from vlm_pg.answers.clauses import clauses, phrases, without_lead_in
from vlm_pg.answers.texts import check_exact, check_free_form, check_ocr
from vlm_pg.answers.units import parse_unit
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.number_words import digits_for_words, language_of
from vlm_pg.eval.reading.phrasing import corrects, gives_up, is_question, sentences
from vlm_pg.eval.reading.said import field_of_object, plain_said
from vlm_pg.eval.reading.stems import stem, words_in
from vlm_pg.eval.reading.thinking import Said
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample

_AROUND = " \t\r\n.,;:!\"'“”‘’`"
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")
_ANSWER_LINE = re.compile(
    r"(?:^|\b)(?:(?:the|my)\s)?(?:(?:final|correct|best|short)\s)?(?:answer|antwort|respuesta|"
    r"réponse)\s?(?:\bis\b|\bist\b|\bes\b|\best\b|:)\s?:?\s{0,3}(\S.{0,300})$|(?:答案)(?:是|为|:)\s?(\S.{0,300})$",
    re.IGNORECASE,
)
_EXPLAINED = re.compile(
    r",?\s(?:which|because|since|who|whose|where|as\s(?:it|he|she|they|the|can|seen|shown|well)|so\sthat|"
    r"judging|based\son|once|when|after\s\w{1,12}ing)\b|,\s(?:as|and)\b|\s[-–—]\s|:\s|\s\((?!\w\))",
    re.IGNORECASE,
)
_OTHER_WORDS = re.compile(
    rf"\b{phrases('in other words, that is, namely, i e, called, known as, correct myself')}\s?[,:]?\s", re.IGNORECASE
)
_SAYING = phrases(
    "is, was, are, were, shows, show, holds, holding, demonstrates, commits, reads, says, uses, used, "
    "using, depicts, has, wears, carries, contains, displays, indicates, plays, plays the, becomes, looks "
    "like, stands at, must be, is called, in the, into the, in, on the, at the, to the"
)
_SAYS = re.compile(
    rf"\b{_SAYING}\s",
    re.IGNORECASE,
)
# Two answers, of which the question's time decides: "It was red but is blue now."
_CHANGED = re.compile(
    r"\b(?:was|were)\s[^.;]{1,60}?,?\sbut\s(?:(?:it|he|she|they|now)\s){0,2}(?:is|are|became|becomes|turned)\s",
    re.IGNORECASE,
)
# Not Markdown's emphasis: "A*".
_LONE_STAR = re.compile(r"^([^*\n]{0,60}\w)\*(?=\W{0,3}$)")
_NOT_BUT = re.compile(r"^\W{0,3}not\s[^,.;]{1,60}?,?\sbut\s(?:rather\s)?", re.IGNORECASE)
_CONCLUDING = re.compile(r"^\W{0,3}(?:so|thus|therefore|hence|final(?:ly)?)\s?[,:]\s{0,3}", re.IGNORECASE)
# What follows the answer and tells more of it: "the Mekong on a ferry".
_MORE = re.compile(
    r"\s(?:on|at|in|by|with|during|while|before|after|near|using|through|over|under|into|from|to|for)\s.*$",
    re.IGNORECASE | re.DOTALL,
)
_FEWEST_ASKED = 2
# A name as catalogues have it: "Austen, Jane".
_CATALOGUED = re.compile(r"([^\W\d_][\w'’-]{1,30}),\s([^\W\d_][\w'’.-]{0,30}(?:\s[^\W\d_][\w'’.-]{0,30}){0,2})")
_NAME_ASKED = re.compile(r"\b(?:who|whom|whose|name)\b", re.IGNORECASE)
# "The bridge appears to be | the Charles Bridge | in Prague."
_IS_NAMED = re.compile(
    r"\b(?P<subject>\w{2,20})\s(?:(?:appears|seems)\sto\sbe|is|was|must\sbe)\s(?:most\slikely\s|likely\s|probably\s)?(?:called\s)?"
    r"(?:the\s)?(?P<name>[A-Z][\w'’-]{1,30}(?:\s[A-Z][\w'’-]{1,30}){0,4})(?=\s(?:in|on|at|near|over|from)\s[^.;,]{1,60}[.]?$)"
)
# "It was not written by Anne but by Jane" says the same as "It was written by Jane".
_NOT_BY_BUT_BY = re.compile(
    r"\b(is|are|was|were)(?:\snot|n['’]t)\s(\w{2,20})\s(by|in|at|on|from|to|with)\s[^,;.]{1,60}?,?\sbut\s(?:rather\s|instead\s)?\3\s",
    re.IGNORECASE,
)
_DONE_BY = re.compile(r"(?:it\s(?:is|was)\s)?(\w{3,20})\sby\s(\S.{0,80})", re.IGNORECASE)
# Who makes what: the verb's stem, and the words of a question that ask for its doer.
_MAKERS = (frozenset(words_in("written wrote write author writer")), frozenset(words_in("sung sang singer sing")))
_FEWEST_SAME = 5
# "In the last scene, | a polar bear | walks across the ice": behind "a" of one thing the first word in -s is a verb.
_SUBJECT_ASKED = re.compile(
    r"\W{0,3}(?:what|which)\s\w{2,20}\s(?:appears?|shows\sup|(?:is|are)\s(?:seen|shown|visible|present))\b",
    re.IGNORECASE,
)
_SUBJECT_DOES = re.compile(
    r"(?:(?P<where>[^,]{1,60}),\s)?(?:an?|one)\s(?P<name>(?:(?!of\b)[\w-]{2,20}\s){1,3}?)(?!seems|looks|lacks|misses)(?:[a-z-]{2,20}(?<![su])(?<!i)s)\s"
    r"(?P<rest>(?:across|in|into|on|onto|through|over|under|along|toward|towards|around|up|down|away|out|from|by|and)\b[^,;:]{0,120})",
    re.IGNORECASE,
)
_SUBJECT_SEEN = re.compile(
    r"(?:(?P<where>[^,]{1,60}),\s)?(?:only\s)?(?:an?|the)\s(?P<name>(?:(?!of\b)[\w-]{2,20}\s){1,3}?)(?:is|can\sbe)\s"
    r"(?:seen|shown|visible|present)(?P<rest>(?:\s(?:in|at)\s[^,;:]{1,60})?)",
    re.IGNORECASE,
)
_ANOTHER = re.compile(r"\band\s(?:the|his|her|its|their)\b|\b(?:an?|another|other|but|while|with|or)\b", re.IGNORECASE)
_STAR = "\ue000"
_ARTICLE = re.compile(r"^(?:an?|the)\s(?=\S)", re.IGNORECASE)
_EITHER = re.compile(r"\b(?:or|both)\b|\beither\b|或者|还是|\boder\b", re.IGNORECASE)
_TEMPLATE = re.compile(
    r"^\W{0,3}(?:answer here|your (?:final )?answer(?: here)?|final answer|\{.{0,40}\}|\$\w{1,20})\W{0,3}$",
    re.IGNORECASE,
)
_QUANTITY = re.compile(
    r"-?[$€£¥₹]?(?:[0-9][0-9,]{0,20}(?:\.[0-9]{1,12}|/[0-9]{1,12}\b)?|\.[0-9]{1,12})"
    r"(?:\s?[^\W\d_°%$€£]{1,12}(?:/[^\W\d_]{1,12})?\b|\s?[°%])?"
)
_LIST = re.compile(r"\[.{0,200}\]")
_NUMBERS = re.compile(r"(?<![\w.])-?[0-9]{1,12}(?:\.[0-9]{1,9})?(?![\w])")
_ENDINGS = re.compile(r"(?:ical|ously|ous|ic|al|y|e|ies|ism|ist|ity|ium)$")
_IDLE = frozenset(
    words_in("a an the of to is are was were it its it's he she they in on at with this that and so there here called")
)
_PLACED = ("in", "on", "at")
_SHORT = 8
_LONGEST_ANSWER = 12
_FEWEST_LETTERS = 8


def read_text(sample: Sample, said: Said) -> Reading:
    """The words that answer, and what the checker of the sample's kind makes of them.

    ``exact`` is held against the gold answer as people do: articles, words of the question, inflection, gaps, one
    letter's slip in a long word and other units of the same value are passed over; ``ocr`` and ``free_form`` by their
    reward, from all that is said where no short answer stands out.
    """
    if "mc_question" in sample.details:
        # TempCompass's captions: its answer is the one to a question that a judge is asked about the caption.
        return Reading(None, None, "captions are scored by a judge alone, from the set's question about them")
    settings = RewardSettings()
    if sample.answer_kind == "exact":
        gold = check_exact(sample.answer, sample, settings)
        if gold.value is None:
            return Reading(None, None, gold.note)
        if (same := _same_as_gold(said, sample, settings)) is not None:
            return Reading(same, 1.0)
        answer = _answer_of(sample, said)
        if answer is None:
            return Reading(None, 0.0, "no short answer")
        return Reading(answer, 1.0 if _is_same(answer, sample, settings) else 0.0)
    check = check_ocr if sample.answer_kind == "ocr" else check_free_form
    whole = (said.final if said.final is not None else said.text).strip()
    if sample.answer_kind == "free_form":
        whole = plain_said(whole)
    verdict = check(whole, sample, settings)
    return Reading(whole or None, verdict.value, verdict.note)


def _same_as_gold(said: Said, sample: Sample, settings: RewardSettings) -> str | None:
    """What is said or stated as the answer if all of it is the gold answer, which may hold brackets, dashes and
    clauses that elsewhere begin an explanation; else None."""
    if said.beside or (said.is_cut and said.final is None):
        return None
    told = [said.final if said.final is not None else plain_said(said.text)]
    lines = [line for line in told[0].splitlines() if line.strip()]
    stated = [_ANSWER_LINE.search(" ".join(lines[start:])) for start in (-1, -2)]
    told += [found[1] or found[2] for found in stated if found]
    for text in told:
        if _is_exactly(text, sample, settings):
            return _as_read(without_lead_in(plain_said(text).strip(_AROUND)) or text)
    return None


def _is_exactly(answer: str, sample: Sample, settings: RewardSettings) -> bool:
    """Whether ``answer`` is the gold answer, its number words or digits aside: "six" and "6"."""
    if check_exact(answer, sample, settings).value == 1.0:
        return True
    gold = replace(sample, answer=_with_digits(sample.answer))
    return check_exact(_with_digits(answer), gold, settings).value == 1.0


def _with_digits(text: str) -> str:
    plain = plain_said(text)
    return digits_for_words(plain, language_of(plain))


def _as_read(answer: str) -> str:
    answer = (_ARTICLE.sub("", answer) or answer).replace(_STAR, "*")
    # Of a quantity case is its unit's: "mV" is no "MV".
    return answer if any(sign.isdigit() for sign in answer) else answer.casefold()


def _answer_of(sample: Sample, said: Said) -> str | None:
    """The words that an output gives for its answer, equal ones spelled alike; None: none, or several."""
    answer = _given(sample, replace(said, text=_LONE_STAR.sub(rf"\1{_STAR}", said.text)))
    if answer is None:
        return None
    return _as_read(_doer(answer, plain_said(said.final or said.text), sample))


def _given(sample: Sample, said: Said) -> str | None:
    given = field_of_object(said.final or said.text)
    if given is None and said.final is not None:
        given = said.final
        if any(_folded(other) != _folded(given) for other in said.beside):
            return None
    if given is not None:
        given = plain_said(given)
        return _one(given, sample) if len(given.split()) <= _LONGEST_ANSWER else _from_prose(given, sample)
    if _LIST.fullmatch(sample.answer) and len(numbers := _NUMBERS.findall(plain_said(said.text))) > 1:
        return f"[{', '.join(numbers)}]"
    bold = _BOLD.findall(said.text)
    text = plain_said(said.text)
    if said.is_cut and not text.endswith((".", "!", "。")):
        text = text.rpartition("\n")[0] if "\n" in text else ""
    if bold and text and bold[-1] in said.text.splitlines()[-1] and not bold[-1].rstrip().endswith(":"):
        return _one(plain_said(bold[-1]), sample)
    return _from_prose(text, sample)


def _from_prose(text: str, sample: Sample) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if found := _ANSWER_LINE.search(lines[-1]):
        return _one(_without_explanation(found[1] or found[2]), sample)
    told = [sentence for line in lines for sentence in sentences(line) if not is_question(sentence)]
    if not told or gives_up(told[-1]):
        return None
    told = [_NOT_BY_BUT_BY.sub(r"\1 \2 \3 ", one) for one in told]
    if (subject := _subject(told[-1], sample)) is not None:
        return _one(subject, sample)
    if len(lines) == 1 and len(told) == 1 and (short := _short(told[0], sample)):
        return _one(short, sample)
    if (concluding := _CONCLUDING.match(told[-1])) and (short := _short(told[-1][concluding.end() :], sample)):
        return _one(short, sample)
    first = _short(told[0], sample) if len(told[0].split()) <= _SHORT and len(told) > 1 else None
    if any(corrects(one) for one in told[1:]):
        first = None  # taken back
    return _stated(told[-1], sample) or (_one(first, sample) if first else None)


def _subject(sentence: str, sample: Sample) -> str | None:
    """Who does or is seen in what a sentence tells, where the question asks who appears; None where that is not clear.

    Where it happens has to be said in the question's words, and no other thing may be named.
    """
    if not _SUBJECT_ASKED.match(sample.question):
        return None
    bare = sentence.strip(_AROUND)
    for pattern in (_SUBJECT_DOES, _SUBJECT_SEEN):
        found = pattern.fullmatch(bare)
        if found is None or _ANOTHER.search(found["rest"]):
            continue
        where = set(words_in(f"{found['where'] or ''} {found['rest'] if pattern is _SUBJECT_SEEN else ''}")) - _IDLE
        if where <= set(words_in(sample.question)) and all(clause.is_affirmed for clause in clauses(bare)):
            return found["name"].strip()
    return None


def _doer(answer: str, text: str, sample: Sample) -> str:
    """Of "written by Jane Austen" who did it, where the question asks for the one who does that."""
    found = _DONE_BY.fullmatch(answer)
    if found is None or not _asks_name(sample.question):
        return answer
    # "The book beside it was written by" tells of another one.
    before = text[: text.rfind(answer)] if answer in text else "elsewhere"
    subject = words_in(re.split(r"[.!?;:\n]", before)[-1])
    if set(subject) - _IDLE - set(words_in(sample.question)):
        return answer
    [verb], asked = words_in(found[1])[:1], set(words_in(sample.question))
    is_asked = verb in asked or any(verb in makers and makers & asked for makers in _MAKERS)
    # "painted" and "painter", "directed" and "director".
    is_kin = any(one[:_FEWEST_SAME] == verb[:_FEWEST_SAME] and len(verb) >= _FEWEST_SAME for one in asked)
    return found[2] if is_asked or is_kin else answer


def _short(sentence: str, sample: Sample) -> str | None:
    """A sentence that is no more than an answer, and perhaps its explanation: "Homophonic, because ..."."""
    parts = clauses(_NOT_BUT.sub("", sentence))
    # "Merge sort, not quicksort" answers with the first.
    if len(parts) > 1 and parts[0].is_affirmed and all(_is_rejection(part.text) for part in parts[1:]):
        parts = parts[:1]
        sentence = parts[0].text
    if any(not part.is_affirmed for part in parts):
        return None
    if (told := _object(sentence, sample)) is not None:
        return told
    bare = _without_explanation(_NOT_BUT.sub("", sentence))
    if len(bare.split()) > _SHORT or _SAYS.search(bare + " ") or _OTHER_WORDS.search(bare + " "):
        return None
    return (
        bare if set(words_in(bare)) - _IDLE - set(words_in(sample.question)) or re.search(r"\w[^\w\s]$", bare) else None
    )


def _is_rejection(clause: str) -> bool:
    return re.match(r"\W{0,3}(?:and\s)?(?:not|rather\sthan|instead\sof)\s", clause, re.IGNORECASE) is not None


def _object(sentence: str, sample: Sample) -> str | None:
    """What a sentence that begins in the question's words goes on with: "They cross | the Mekong | on a ferry"."""
    asked = set(words_in(sample.question)) - _IDLE
    words = sentence.strip(_AROUND).split()
    place = 0
    while place < len(words) and set(words_in(words[place])) <= asked | _IDLE - {"a", "an"}:
        place += 1
    while place and words[place - 1].casefold() in ("the", "its", "his", "her", "their"):
        place -= 1
    if len(asked & set(words_in(" ".join(words[:place])))) < _FEWEST_ASKED or place == len(words):
        return None
    rest = _MORE.sub("", _without_explanation(" ".join(words[place:])))
    return rest if rest and len(rest.split()) <= _SHORT and not _SAYS.search(rest + " ") else None


def _stated(sentence: str, sample: Sample) -> str | None:
    """What the last affirming clause of a sentence says of what was asked."""
    if other := list(_OTHER_WORDS.finditer(sentence)):
        return _one(_without_explanation(sentence[other[-1].end() :]), sample)
    if _CHANGED.search(sentence):
        return None
    asked = set(words_in(sample.question)) | _IDLE
    if _asks_name(sample.question) and (named := _IS_NAMED.search(sentence)) and stem(named["subject"]) in asked:
        return _one(named["name"], sample)
    is_quantity = any(sign.isdigit() for sign in sample.answer)
    for clause in reversed([one for one in clauses(sentence) if one.is_affirmed and not one.is_reason]):
        text = _EXPLAINED.split(clause.text, maxsplit=1)[0]
        if is_quantity and (quantity := _QUANTITY.search(text)):
            return quantity[0].strip()
        says = list(_SAYS.finditer(text))
        if not says or not (set(words_in(text)) & (asked - _IDLE) or set(words_in(text[: says[0].start()])) <= _IDLE):
            continue
        rest = text[says[-1].end() :].split()
        while rest and set(words_in(rest[-1])) <= asked:
            rest.pop()
        while rest and set(words_in(rest[0])) <= asked and words_in(rest[0]) != ["a"] and len(rest) > 1:
            rest.pop(0)
        if rest and len(rest) <= _SHORT:
            return _one(" ".join(rest), sample)
    return None


def _without_explanation(text: str) -> str:
    bare = without_lead_in(text.strip(_AROUND)) or text.strip(_AROUND)
    return _EXPLAINED.split(bare, maxsplit=1)[0].strip(_AROUND)


def _one(text: str, sample: Sample) -> str | None:
    """``text`` if it is one answer, without a lead-in. A slash is between two, unless the gold answer has one."""
    text = text.strip(_AROUND)
    text = (without_lead_in(text) or text).strip(_AROUND)
    if "/" in text and "/" not in sample.answer:
        return None
    if not text or _TEMPLATE.match(text) or _EITHER.search(text) or gives_up(text):
        return None
    return None if any(not clause.is_affirmed for clause in clauses(text)) else text


def _is_same(answer: str, sample: Sample, settings: RewardSettings) -> bool:
    """Whether ``answer`` is the gold answer as people hold them against each other."""
    if _is_exactly(answer, sample, settings):
        return True
    if (value := _value(answer)) is not None and (gold_value := _value(sample.answer)) is not None:
        return value == gold_value
    if any(char.isdigit() for char in answer + sample.answer) and not _LIST.fullmatch(sample.answer):
        return False
    asked = set(words_in(sample.question))
    told = _core(answer, asked)
    gold = _core(sample.answer, asked)
    if not told or not gold:
        return False
    if _LIST.fullmatch(sample.answer):
        return _folded(answer) == _folded(sample.answer)
    catalogued = _CATALOGUED.fullmatch(answer) if _asks_name(sample.question) else None
    if catalogued and _folded(f"{catalogued[2]} {catalogued[1]}") == _folded(sample.answer):
        return True
    if _folded(answer) == _folded(sample.answer) or told in (gold, gold[1:] if gold[0] in _PLACED else gold):
        return True
    joined, gold_joined = "".join(told), "".join(gold)
    if joined == gold_joined or (_root(joined) == _root(gold_joined) and len(_root(joined)) > 4):
        return True
    is_long = min(len(joined), len(gold_joined)) >= _FEWEST_LETTERS and len(told) == len(gold) == 1
    return is_long and joined[0] == gold_joined[0] and _is_slip(joined, gold_joined)


def _asks_name(question: str) -> bool:
    return _NAME_ASKED.search(question) is not None


def _core(text: str, asked: set[str]) -> list[str]:
    """The words that tell an answer: no articles, and no words of the question unless there are no others."""
    words = [word for word in words_in(text) if word not in ("a", "an", "the")]
    return [word for word in words if word not in asked] or words


def _root(word: str) -> str:
    return _ENDINGS.sub("", re.sub(r"i$", "y", word))


def _is_slip(one: str, other: str) -> bool:
    """Whether a letter is missing in one of two words; another letter in its place makes another word: absorption."""
    short, long = sorted((one, other), key=len)
    return len(long) == len(short) + 1 and any(long[:place] + long[place + 1 :] == short for place in range(len(long)))


def _value(text: str) -> tuple[object, object] | None:
    """A quantity's kind and value in the kind's own unit; None where ``text`` is none."""
    text = text.strip(_AROUND)
    number = re.fullmatch(r"(-?[0-9]{1,15}(?:\.[0-9]{1,12})?)\s?(\D{1,24})", text)
    unit = parse_unit(number[2]) if number else None
    return (unit.kind, Fraction(number[1]) * unit.factor) if number and unit else None


def _folded(text: str) -> str:
    return "".join(plain_said(text).casefold().split())
