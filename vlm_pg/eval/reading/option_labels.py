"""Options that a letter or number tells apart, named by it in another script: "维生素D" for "Vitamin D"."""

from __future__ import annotations

import re

from vlm_pg.answers.options import Choices

# A name that the letter belongs to, and no word of denying, excepting or lacking.
_NAMED = re.compile(
    r"\W{0,4}(?:(?:正确)?(?:答案|回答)?(?:应该)?(?:是|为|[:：]))?\s?(?P<name>[\u3400-\u9fff]{2,4})\s?(?P<label>[A-Z][0-9]{0,2}|[0-9]{1,3})[\s.。!！]{0,3}"
)
_NO_NAME = re.compile(r"选|答|项|第|不|非|没|无|除|缺|错|未|或|和|与")
_LABEL = re.compile(r"[A-Z][0-9]{0,2}|[0-9]{1,3}")


def named_by_label(text: str, choices: Choices) -> str | None:
    """The letter of the option whose label is all that ``text`` has in Latin script behind a Chinese name.

    The options are the same words but for the label. A label that is the letter of another option names nothing: nobody
    knows which of the two is meant.

    named_by_label("维生素D", (("A", "Vitamin A"), ("D", "Vitamin D"))) -> "D"
    """
    found = _NAMED.fullmatch(text)
    labels = _labels(choices)
    if found is None or labels is None or _NO_NAME.search(found["name"]):
        return None
    named = [letter for letter, label in labels.items() if label == found["label"]]
    is_letter_of_another = found["label"] in labels and named != [found["label"]]
    return named[0] if len(named) == 1 and not is_letter_of_another else None


def _labels(choices: Choices) -> dict[str, str] | None:
    """Of options that are the same words but for their last one, which is a label, that one; None for others."""
    words = {letter: text.strip(" .").split() for letter, text in choices}
    before = {" ".join(one[:-1]).casefold() for one in words.values()}
    if len(words) < 2 or len(before) != 1 or "" in before:
        return None
    labels = {letter: one[-1] for letter, one in words.items()}
    is_all = all(_LABEL.fullmatch(label) for label in labels.values())
    return labels if is_all and len(set(labels.values())) == len(labels) else None
