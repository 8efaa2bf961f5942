"""Which mathematics a parser gets to see: what would take long, or is nothing a final answer is written with, is not.

Everything here works on strings in time linear in their length (texts are capped before), and evaluates nothing.
"""

from __future__ import annotations

import re

from vlm_pg.answers.latex import TEXT_MACRO

# Of the mathematics in an answer. The gold answers of MATH-500 have at most 53 characters.
MAX_CHARACTERS = 400
# The parser's time doubles with every few levels of brackets; gold answers of MATH-500 have at most 2.
MAX_DEPTH = 5
MAX_DIGITS = 60
MAX_LETTERS = 40
MAX_MACROS = 40
MAX_FUNCTIONS = 6
MAX_RELATIONS = 8
MAX_BARS = 8
MAX_UNIONS = 4
MAX_POWERS = 8
MAX_OPERATORS = 30  # 1 + 2 + ...
MAX_LISTED = 80  # parts of a list or matrix

_MACRO = re.compile(r"\\([A-Za-z]+)")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|arc[a-z]*|log|ln|exp|sinh|cosh|tanh|det)\b")
_BINOMIAL = re.compile(r"\\[dt]?binom(?!\s?\{\s?(?:[0-9]{1,3}|[a-z])\s?\}\s?\{\s?(?:[0-9]{1,3}|[a-z])\s?\})")

# "1 1" is neither 11 nor 1; mixed numbers and thousands are spelled out before.
_SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9]")

# What an answer is written with. Integrals, sums, products and limits are tasks, not answers, and may take for ever.
_MACRO_NAMES = """
    frac dfrac tfrac cfrac sqrt binom dbinom tbinom pi infty cdot times div pm mp le leq leqslant ge geq geqslant ne
    neq lt gt approx equiv in notin cup cap setminus emptyset varnothing subset subseteq mathbb mathbf mathrm
    mathcal mathit text textbf textit textrm mbox mathsf operatorname
    textnormal textsf texttt textup boxed fbox left right big Big bigg Bigg bigl bigr
    Bigl Bigr middle begin end sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp det circ
    degree prime overline underline bar vec hat angle triangle ldots cdots dots to rightarrow mid vert lvert rvert
    lfloor rfloor lceil rceil langle rangle lbrace rbrace lbrack rbrack quad qquad displaystyle textstyle limits
    land lor wedge vee and or not cent pounds euro alpha beta gamma delta epsilon varepsilon zeta eta theta iota
    kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi
    Psi Omega i imath j Re Im hline
"""
_KNOWN_MACROS = frozenset(_MACRO_NAMES.split())
_OPERATORS = (":", "+", "-", "*", "/", "^", "_", "!", "\\cdot", "\\times", "\\div", "\\pm", "\\mp", "\\frac", "\\sqrt")
_ENVIRONMENTS = re.compile(r"\\(?:begin|end)\s?\{(?!(?:[pbvBV]?matrix|array|cases)\})")


def refusal(latex: str) -> str | None:
    """Why a parser does not get to see this statement; None if it does."""
    if not latex:
        return "there is no mathematics in it"
    if len(latex) > MAX_CHARACTERS:
        return f"it has more than {MAX_CHARACTERS} characters"
    if not (latex.isascii() and latex.isprintable()):
        return "it has characters that mathematics is not written with"
    unknown = next((name for name in _MACRO.findall(latex) if name not in _KNOWN_MACROS), None)
    if unknown is not None:
        return f"\\{unknown[:40]} is not something a final answer is written with"
    if _ENVIRONMENTS.search(latex):
        return "it has an environment other than a matrix"
    if _SIDE_BY_SIDE.search(latex):
        return "it has two numbers side by side"
    if _BINOMIAL.search(latex):
        return "it has a binomial of something other than small numbers or letters"
    counts = {
        "nested brackets": (_depth(latex), MAX_DEPTH),
        "digits in a row": (max(map(len, re.findall("[0-9]+", latex)), default=0), MAX_DIGITS),
        "letters": (sum(map(str.isalpha, _MACRO.sub("", TEXT_MACRO.sub("", latex)))), MAX_LETTERS),
        "macros": (latex.count("\\"), MAX_MACROS),
        "functions": (len(_FUNCTION.findall(latex)), MAX_FUNCTIONS),
        "relations": (len(re.findall(r"[=<>]|\\[lg]eq?\b|\\[lg]t\b|\\neq?\b", latex)), MAX_RELATIONS),
        "vertical bars": (latex.count("|") + latex.count("vert"), MAX_BARS),
        "unions": (latex.count("\\cup") + latex.count("\\cap"), MAX_UNIONS),
        "powers and indices": (latex.count("^") + latex.count("_"), MAX_POWERS),
        "operators": (sum(map(latex.count, _OPERATORS)), MAX_OPERATORS),
        "parts": (latex.count(",") + latex.count(";") + latex.count("&") + latex.count("\\\\"), MAX_LISTED),
    }
    return next((f"it has more than {most} {what}" for what, (count, most) in counts.items() if count > most), None)


def _depth(latex: str) -> int:
    depth = deepest = 0
    for sign in latex:
        if sign in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif sign in ")]}":
            depth = max(0, depth - 1)
    return deepest
