"""Number words of several languages, written as digits.

A word counts only where it is a number beyond doubt: articles ("ein", "une", "一个", "एक") stay as they are, "one" does
where it stands for a thing ("this one", "one of them"), and words of languages other than English are looked for only
in texts of theirs, or in texts of a few words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from vlm_pg.answers.numbers import ONES, TENS

_STOP_WORDS = {
    "en": "the is a of and in to are there it that so for was we i",
    "de": "der die das ist und ein eine es nicht im auf den dem von zu mit also sind beträgt gibt insgesamt "
    "kostete er sie im am bei hat wird sich einen einem einer aus für man wir",
    "fr": "le la les est et un une des dans pour de du au sont il donc y avant coûtait elle reste soit en que "
    "qui ont ce cette par sur",
    "es": "el la los las es un una y en de del que son por hay quedan entonces lo su se con para",
    "pt": "o a os as é um uma e em do da no na são há que era restam ele ela com para se",
    "it": "il lo la gli è un una di e in che sono nel della ci restano quindi del si per con",
    "nl": "de het een en is van in dat zijn er dus staan",
    "ru": "в и на по это равна поэтому что не с всего он за к от или",
}
_STOPS = {name: frozenset(text.split()) for name, text in _STOP_WORDS.items()}
_MOST_WORDS_WITHOUT_LANGUAGE = 4
_WORD = re.compile(r"[^\W\d_]{1,40}")


def _numbered(text: str, start: int = 0, step: int = 1) -> dict[str, int]:
    """Words in order, alternatives joined by "=": {"zero": 0, "one": 1, ...}."""
    groups = enumerate(text.split())
    return {word: start + step * place for place, group in groups for word in group.split("=")}


_WORDS: dict[str, dict[str, int]] = {
    "en": _numbered(" ".join(ONES))
    | _numbered(" ".join(TENS), 20, 10)
    | {"hundred": 100, "thousand": 1000, "million": 10**6},
    "de": _numbered("null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn")
    | _numbered("sechzehn siebzehn achtzehn neunzehn", 16)
    | _numbered("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig", 20, 10)
    | {"hundert": 100, "tausend": 1000},
    "fr": _numbered("zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize")
    | _numbered("vingt=vingts trente quarante cinquante soixante", 20, 10)
    | {"cent": 100, "cents": 100, "mille": 1000},
    "es": _numbered("cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince")
    | _numbered("dieciséis diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro", 16)
    | _numbered("treinta cuarenta cincuenta sesenta setenta ochenta noventa cien=ciento", 30, 10)
    | {"mil": 1000},
    "pt": _numbered("zero um dois=duas três quatro cinco seis sete oito nove dez onze doze treze catorze quinze")
    | _numbered("vinte trinta quarenta cinquenta sessenta setenta oitenta noventa cem=cento", 20, 10)
    | {"mil": 1000},
    "it": _numbered("zero uno due tre quattro cinque sei sette otto nove dieci undici dodici tredici quattordici")
    | _numbered("quindici sedici diciassette diciotto diciannove venti", 15)
    | _numbered("trenta quaranta cinquanta sessanta settanta ottanta novanta cento", 30, 10),
    "nl": _numbered("nul één twee drie vier vijf zes zeven acht negen tien elf twaalf dertien veertien vijftien"),
    "ru": _numbered("ноль один=одна=одно два=две три четыре пять шесть семь восемь девять десять одиннадцать")
    | _numbered("двенадцать тринадцать четырнадцать пятнадцать шестнадцать семнадцать восемнадцать", 12)
    | _numbered("двадцать тридцать сорок пятьдесят шестьдесят семьдесят восемьдесят девяносто сто", 20, 10),
}
# Articles, and words that mean something else in English where no language is known.
_ARTICLES = frozenset(["un", "uno", "um"])
_ENGLISH_TOO = frozenset(["once", "elf", "cent", "cents", "mil", "due", "sei", "tre", "mille", "zero", "six"])
_JOINING_WORDS = {"en": "and", "fr": "et", "es": "y", "pt": "e"}

# Scripts without a doubt about the language: the word, and what may follow it (a counter) or none.
_HINDI = _numbered("शून्य - दो तीन चार पांच=पाँच छह=छः सात आठ नौ दस ग्यारह बारह")
_ARABIC = _numbered(
    "صفر واحد اثنان=اثنين ثلاثة=ثلاث أربعة=أربع خمسة=خمس ستة=ست سبعة=سبع ثمانية=ثماني=ثمان تسعة=تسع عشرة=عشر"
)
_KOREAN_ONES = _numbered("하나=한 둘=두 셋=세 넷=네 다섯 여섯 일곱 여덟 아홉", 1)
_KOREAN_TENS = _numbered("열 스물=스무 서른 마흔 쉰", 10, 10)
_KANA = _numbered("ひとつ ふたつ みっつ よっつ いつつ むっつ ななつ やっつ ここのつ とお", 1)
_KOREAN = re.compile(
    rf"(?<![가-힣])({'|'.join(_KOREAN_TENS)})?({'|'.join(sorted(_KOREAN_ONES, key=len, reverse=True))})?"
    r"(?=\s?(?:개|명|마리|대|권|장|살|시간|번|자루|송이|그루|채|벌|켤레|잔|병|그릇|가지|곳|사람|달)|입니다|이다|$)"
)
_CHINESE_DIGITS = {sign: place for place, sign in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
_CHINESE_UNITS = {"十": 10, "百": 100, "千": 1000}
_COUNTER = (
    "个個把张張只隻条條位人名本块塊元米厘公分秒天年岁歲次件棵枚辆輛台座间間套层層楼步对對双盏瓶杯碗根支朵头匹艘架扇幅盒页"
    "度斤吨平立脚匹冊つ箱颗粒袋盘串排组種种小毫千万亿点"
)
_CHINESE = re.compile(
    # Not the first ("第一"), nor words that begin or end in a number ("统一", "十分").
    rf"(?<![第统唯万单同之其某每任另那这这哪])([零〇一二两兩三四五六七八九十百千]{{1,12}})(?:点([零一二三四五六七八九]{{1,6}}))?"
    rf"(?:(?P<scale>[万亿])|(?=\s?[{_COUNTER}])|(?=\s*[。，,.!！;；)）\s]|\s*$))"
)
_ONLY_ONE_AFTER = re.compile(r"(?:共|仅|只|只有|共有|剩|还剩|剩下)$")
_HALF = re.compile(r"\b([0-9]{1,6})\s{1,3}and\s{1,3}(?:a|one|1)\s{1,3}half\b", re.IGNORECASE)
_HALF_OF_UNIT = re.compile(r"\bhalf\s{1,3}(?:an?\s{1,3})?(?=(?:hour|minute|meter|metre|mile|liter|litre|kilo)\b)", re.I)
_DOZEN = re.compile(r"\b(half\s{1,3})?a\s{1,3}dozen\b", re.IGNORECASE)
_SINGLE = re.compile(r"\b(?:an?|one|1|only)\s{1,3}single\b", re.IGNORECASE)
_POINT = re.compile(
    r"(?<![0-9.])([0-9]{1,6})\s{1,3}point\s{1,3}([0-9]{1,2})(?:\s{1,3}([0-9]))?(?![0-9])", re.IGNORECASE
)
_NO_ONE_BEFORE = re.compile(
    r"(?:\b(?:no|this|that|any|every|some|each|the|another|which|other|\w{1,12}est|last|first|"
    r"next|right|left|a)|n't)\s{1,3}$",
    re.IGNORECASE,
)
_NO_ONE_AFTER = re.compile(
    r"\s{1,3}(?:of|by|another|can|could|must|should|would|might|may|that|which|who|is|has|was|"
    r"to|at|in|on|for|with|behind|"
    r"more|side|end|after|way|needs?|sees?|thing|near|beside|next|under)\b|['’]s\b",
    re.IGNORECASE,
)


def language_of(text: str) -> str:
    """The language most of whose little words ``text`` has ("de"), or "" if it has too few of any."""
    found = [word.casefold() for word in _WORD.findall(text[:4000])]
    counts = {name: sum(word in stops for word in found) for name, stops in _STOPS.items()}
    best = max(counts, key=lambda name: counts[name])
    others = [count for name, count in counts.items() if name != best]
    return best if counts[best] >= 2 and counts[best] > max(others) else ""


def digits_for_words(text: str, language: str) -> str:
    """``text`` with digits for its number words.

    digits_for_words("two hundred and four", "") -> "204"; digits_for_words("一共有四把椅子", "") -> "一共有4把椅子"

    Args:
        text: already in one spelling (``plain_text.plain``).
        language: what ``language_of`` says of the whole output.
    """
    text = _SINGLE.sub("1 ", _DOZEN.sub(lambda match: "6" if match[1] else "12", text))
    is_short = len(_WORD.findall(text[:400])) <= _MOST_WORDS_WITHOUT_LANGUAGE and len(text) <= 400
    text = _latin(text, "en", _WORDS["en"])
    for name, words in _WORDS.items():
        if name == language and name != "en":
            text = _latin(text, name, {word: value for word, value in words.items() if word not in _ARTICLES})
        elif not language and is_short:
            kept = {word: value for word, value in words.items() if word not in _ARTICLES | _ENGLISH_TOO}
            text = _latin(text, name, kept)
    text = _HALF_OF_UNIT.sub("0.5 ", _HALF.sub(r"\1.5", text))
    text = _POINT.sub(lambda match: f"{match[1]}.{match[2]}{match[3] or ''}", text)
    return text if text.isascii() else _other_scripts(text)


def _latin(text: str, name: str, words: dict[str, int]) -> str:
    """``text`` with digits for runs of words that make one number."""
    if name == "de":
        text = _WORD.sub(lambda match: _german(match[0]), text)
    joining = _JOINING_WORDS.get(name)
    pattern = _RUNS[name]
    return pattern.sub(lambda match: _run(text, match, words, joining), text)


def _run_pattern(words: Iterable[str], joining: str | None) -> re.Pattern[str]:
    any_word = "|".join(sorted(words, key=len, reverse=True))
    gap = rf"(?:\s{{0,2}}-\s{{0,2}}|\s{{1,3}}(?:{joining}\s{{1,3}})?)" if joining else r"[\s-]{1,3}"
    return re.compile(rf"(?<![\w-])(?:{any_word})(?:{gap}(?:{any_word})){{0,11}}(?![^\W\d_])", re.IGNORECASE)


_RUNS = {name: _run_pattern(words, _JOINING_WORDS.get(name)) for name, words in _WORDS.items()}


def _run(text: str, match: re.Match[str], words: dict[str, int], joining: str | None) -> str:
    parts = [part for part in re.split(r"[\s-]+", match[0].casefold()) if part != joining]
    if any(part not in words for part in parts):
        return match[0]
    after = text[match.end() : match.end() + 30]
    if parts == ["one"]:
        before = text[max(0, match.start() - 20) : match.start()]
        if _NO_ONE_BEFORE.search(before) or _NO_ONE_AFTER.match(after):
            return match[0]
    if re.match(r"-[a-z]", after) or (len(parts) == 1 and parts[0] in ("hundred", "thousand", "million")):
        return match[0]  # "three-digit"; "5 hundred" is read with its digits
    value = _value([words[part] for part in parts])
    if value is not None:
        return str(value)
    return re.sub(r"[^\W\d_]+", lambda word: str(words.get(word[0].casefold(), word[0])), match[0])


def _value(values: list[int]) -> int | None:
    """The number that words say together; None if they say several: "three four"."""
    total = current = 0
    is_first = True
    for value in values:
        if value >= 1000:
            total, current = total + max(current, 1) * value, 0
        elif value == 100:
            if current >= 100:
                return None
            current = max(current, 1) * 100
        elif value == 20 and current % 100 == 4:  # quatre-vingts
            current += 76
        elif is_first or _fits(current, value):
            current += value
        else:
            return None
        is_first = False
    return total + current


def _fits(current: int, value: int) -> bool:
    if value < 10:
        return value > 0 and current % 10 == 0 and current % 100 != 10
    return current % 100 == 0 or (value < 20 and current % 100 in (60, 80))


def _german(word: str) -> str:
    """A German word of several numbers: "einundzwanzig" -> "21"; any other word as it is."""
    value = _german_value(word.casefold())
    return word if value is None else str(value)


def _german_value(word: str) -> int | None:
    words = _WORDS["de"] | {"ein": 1}
    for scale, factor in (("tausend", 1000), ("hundert", 100)):
        before, found, after = word.partition(scale)
        if found and len(word) > len(scale):
            first = 1 if not before else _german_value(before) or words.get(before)
            rest = 0 if not after else words.get(after) or _german_value(after.removeprefix("und"))
            return None if first is None or rest is None else first * factor + rest
    ones, found, tens = word.partition("und")
    if found and words.get(ones, 99) < 10 and words.get(tens, 0) in range(20, 100, 10):
        return words[tens] + words[ones]
    return None


def _other_scripts(text: str) -> str:
    for words in (_HINDI, _ARABIC, _KANA):
        pattern = "|".join(sorted((word for word in words if word != "-"), key=len, reverse=True))
        boundary = "" if words is _KANA else r"(?![\w\u0900-\u097f\u0600-\u06ff])"
        front = "" if words is _KANA else r"(?<![\w\u0900-\u097f\u0600-\u06ff])"
        text = re.sub(f"{front}(?:{pattern}){boundary}", lambda match, words=words: str(words[match[0]]), text)  # type: ignore[misc]
    text = _KOREAN.sub(
        lambda match: str(_KOREAN_TENS.get(match[1], 0) + _KOREAN_ONES.get(match[2], 0)) if match[0] else "", text
    )
    return _CHINESE.sub(lambda match: _chinese(text, match), text)


def _chinese(text: str, match: re.Match[str]) -> str:
    before = text[max(0, match.start() - 4) : match.start()]
    signs = match[1]
    if signs == "一" and not match[2] and not _ONLY_ONE_AFTER.search(before):
        return match[0]
    if len(signs) == 1 and not match["scale"] and not re.search(r"[^\w]$|[\u3040-\u9fff]$|^$", before):
        return match[0]
    total = current = 0
    if len(signs) > 1 and all(sign in _CHINESE_DIGITS for sign in signs):
        total = int("".join(str(_CHINESE_DIGITS[sign]) for sign in signs))
    else:
        for sign in signs:
            if sign in _CHINESE_DIGITS:
                current = _CHINESE_DIGITS[sign]
            else:
                total, current = total + max(current, 1) * _CHINESE_UNITS[sign], 0
    digits = "".join(str(_CHINESE_DIGITS[sign]) for sign in match[2] or "")
    return f"{total + current}{'.' + digits if digits else ''}{match['scale'] or ''}"
