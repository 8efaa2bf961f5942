"""Words that say of a statement that it is true or false, in the languages that outputs are read in."""

from __future__ import annotations

import re

NOT = r"(?:\bnot|n['’]t|\bnever)\b"
FALSE = re.compile(
    r"\b(?:incorrect(?:ly|[ao]s?|es?)?|false(?:ly)?|wrong|untrue|inaccurate|mistaken|unsupported|contradict\w{0,3}|absent|missing|"
    r"falsch\w{0,2}|unzutreffend|inkorrekt|fals[ao]s?|errad[ao]s?|erróne[ao]s?|fausse?s?|faux|sbagliat[aeio]|неверн\w{1,3}|"
    r"неправильн\w{1,3})\b|不正确|不对|错误?|有误|不符合?",
    re.IGNORECASE,
)
TRUE = re.compile(
    r"\b(?:correct(?:ly|[ao]s?|es?)?|right|true|accurate|valid|supported|consistent|confirmed|richtig\w{0,2}|korrekt|wahr|stimmt|"
    r"verdader[ao]s?|verdadeir[ao]s?|ciert[ao]s?|corret[ao]s?|vraie?s?|exacte?s?|corrett[aeio]|верн\w{1,3}|правильн\w{1,3})\b|"
    r"\byes\b|[✓✅✔]|正确|符合|对(?![比于话应])|没错",
    re.IGNORECASE,
)
DENIAL = re.compile(
    rf"{NOT}|\bcannot\b|\b(?:no|nicht|keine?|pas|jamais|não|nunca|non|не|neither|nor|hardly|barely|scarcely)\b|"
    r"\bdoubt\w{0,3}\b|没有?|未|不|并非|除",
    re.IGNORECASE,
)
