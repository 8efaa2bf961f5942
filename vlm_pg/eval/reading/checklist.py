"""Lists of options in which each is marked: a tick, a cross, yes or no."""

from __future__ import annotations

import re

from vlm_pg.eval.reading.option_texts import OptionTexts

_TICKS, _CROSSES = "✅✔☑✓", "❌✗✘✖❎"
_SIGN = re.compile(rf"[{_TICKS}{_CROSSES}]")
_WORD = re.compile(
    r"(?:[|?:.,–-]|\s-|,\s?so(?:\s(?:this|that|it)\sis)?|->|→|=)\s{0,3}(?:only\s[^.|\n]{1,40}\s)?(yes|no|correct|incorrect|true|false|right|wrong|not\scorrect)\s{0,3}[.!|)]{0,2}\s{0,3}$",
    re.IGNORECASE,
)
_FIRST_WORD = re.compile(
    r"[\W_]{0,10}(?:option\s)?\(?[A-Z]\)?[.:]\s{0,3}[\W_]{0,4}(yes|no|correct|incorrect|true|false|right|wrong|not\scorrect)\s?[,.;–-]",
    re.IGNORECASE,
)
_YES = ("yes", "correct", "true", "right")
_LABEL = re.compile(r"[\W_]{0,10}(?i:option\s)?\(?([A-Z])(?:[).:]|\s{1,3}[|(–-]|\s{0,3}[✅✔☑✓❌✗✘✖❎])")
_FEWEST_LINES = 2
_MARKED = rf"\(?[A-Z]\)?\s?[{_TICKS}{_CROSSES}]?\ufe0f?"
_SORTED = re.compile(
    rf"[\W_]{{0,8}}(?P<label>(?i:correct|incorrect|right|wrong|true|false))(?i:\s(?:options?|answers?|choices?))?\s?[:：]\s{{0,3}}"
    rf"(?P<letters>{_MARKED}(?:\s{{0,3}}(?:[,;、/&]|and)\s{{0,3}}(?:and\s)?{_MARKED}){{0,9}})\W{{0,3}}"
)


def ticked(lines: list[str], texts: OptionTexts, *, is_wrong_one_asked: bool = False) -> tuple[str, int] | None:
    """The one option that a list of at least two marks as right, and its last line's number; None without any.

    ``is_wrong_one_asked``: the question asks for what is not so; then the one marked as wrong beside several right
    ones, since of two marks the one may as well mean the answer.

    ticked(["A | the sun is shining | no", "B | it rains | yes"], texts) -> ("B", 1)
    """
    marks: dict[str, bool] = {}
    last = -1
    for number, line in enumerate(lines):
        if (sorted_out := _sorted_out(line, texts)) is not None:
            marks |= sorted_out
            last = number
            continue
        signs = {sign in _TICKS for sign in _SIGN.findall(line)}
        word = _WORD.search(line[-120:]) or _FIRST_WORD.match(line)
        if len(signs) != 1 and not word:
            continue
        letter = _option_of(line, texts)
        if letter is None:
            continue
        marks[letter] = signs.pop() if len(signs) == 1 else bool(word) and word is not None and word[1].lower() in _YES
        last = number
    right = [letter for letter, is_right in marks.items() if is_right]
    if is_wrong_one_asked:
        wrong = [letter for letter, is_right in marks.items() if not is_right]
        return (wrong[0], last) if len(wrong) == 1 and len(right) >= _FEWEST_LINES else None
    return (right[0], last) if len(marks) >= _FEWEST_LINES and len(right) == 1 else None


def _sorted_out(line: str, texts: OptionTexts) -> dict[str, bool] | None:
    """What a line says of several options by its label: "Incorrect options: B ✖, C ✖"; None for any other line.

    Marks that say otherwise than the label make it no such line.
    """
    found = _SORTED.fullmatch(line)
    if found is None:
        return None
    is_right = found["label"].lower() in _YES
    letters = re.findall(r"[A-Z]", found["letters"])
    signs = {sign in _TICKS for sign in _SIGN.findall(line)}
    return dict.fromkeys(letters, is_right) if signs <= {is_right} and set(letters) <= set(texts.choices) else None


def _option_of(line: str, texts: OptionTexts) -> str | None:
    if (label := _LABEL.match(line)) and label[1] in texts.choices:
        return label[1]
    before = re.split(r"[?|]", line.strip("| "), maxsplit=1)[0]
    if (whole := texts.is_whole_text(before.strip(" -*•"))) is not None:
        return whole
    return None
