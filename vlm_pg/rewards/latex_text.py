"""Mathematics as people and models write it: which part of a text is the answer, and whether a parser may read it.

Everything here works on strings in time linear in their length (texts are capped before), and evaluates nothing.
"""

from __future__ import annotations

import re
import unicodedata

# Of a whole answer, and of the mathematics in it. The gold answers of MATH-500 have at most 53 characters.
MAX_TEXT_CHARACTERS, MAX_CHARACTERS = 2000, 400
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

_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∞": r"\infty "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "}
    | {"∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ ", "√": r"\sqrt ", "π": r"\pi ", "θ": r"\theta "}
    | {"α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega "}
    | {"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
    | {sign: f"^{{{digit}}}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
)
_DECORATION = ' \t\r\n*_`"“”'
_BOX = re.compile(r"\\f?boxed?\s*\{")
_DELIMITED = re.compile(
    r"(?<!\\)\$\$?(?=[^\s$])([^$]*)(?<!\s)\$\$?(?!\d)|\\\(((?:[^\\]|\\(?!\)))*)\\\)|\\\[((?:[^\\]|\\(?!\]))*)\\\]"
)
_DELIMITERS = re.compile(r"\\?\$|\\[()]|(?<!\\)\\[\[\]]")
# Outside of delimiters these belong to the answer, too: "-$5$", "5 or $7$".
_SUBSTANCE = re.compile(r"[0-9=<>^/+\-(\[{]")
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore)\b,?\s{0,3})?(?:(?:the|my|our)\s{1,3})?(?:(?:final|correct|exact)\s{1,3})?"
    r"(?:(?:answer|result|solution|value)\s{0,3}(?:is|are|=|:)|it\s{1,3}is)\s{0,3}:?",
    re.IGNORECASE,
)
_TEXT_MACRO = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf|operatorname)\s?\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,'’-]+[^\W\d_]+)*")
_PLAIN_NAME = re.compile(r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln|infinity|infty)(?![A-Za-z])")
_ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt\s?\(([^()]*)\)")
_SCIENTIFIC = re.compile(r"(?<![\w\\])([0-9]{1,15}(?:\.[0-9]{1,15})?)[eE]([+-]?[0-9]{1,3})(?![\w.])")
_MACRO = re.compile(r"\\([A-Za-z]+)")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|arc[a-z]*|log|ln|exp|sinh|cosh|tanh|det)\b")
_BINOMIAL = re.compile(r"\\[dt]?binom(?!\s?\{\s?(?:[0-9]{1,3}|[a-z])\s?\}\s?\{\s?(?:[0-9]{1,3}|[a-z])\s?\})")

# What an answer is written with. Integrals, sums, products and limits are tasks, not answers, and may take for ever.
_MACRO_NAMES = """
    frac dfrac tfrac cfrac sqrt binom dbinom tbinom pi infty cdot times div pm mp le leq leqslant ge geq geqslant ne
    neq lt gt approx equiv in notin cup cap setminus emptyset varnothing subset subseteq mathbb mathbf mathrm
    mathcal mathit text textbf textit textrm mbox operatorname boxed fbox left right big Big bigg Bigg bigl bigr
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


def statement(text: str) -> str:
    """The mathematics that an answer states, as LaTeX without delimiters; several statements are joined by commas.

    What is in ``\\boxed{}`` counts, else what is between delimiters, else all of it but "The answer is". Signs such as
    "√2", "²" and "≤", and "sqrt(2)", "2**3", "3e5" become LaTeX.

        statement("The answer is $\\frac12$.") -> "\\frac12"
    """
    plain = unicodedata.normalize("NFKC", text[: MAX_TEXT_CHARACTERS + 1].translate(_SIGNS)).strip(_DECORATION)
    boxes = _boxed(plain)
    plain = ", ".join(dict.fromkeys(boxes)) if boxes else _without_delimiters(plain)
    lead = _LEAD.match(plain)
    plain = " ".join((plain[lead.end() :] if lead else plain).strip(_DECORATION).split())
    plain = _DELIMITERS.sub("", plain).strip().rstrip(".,;。").strip(_DECORATION)
    plain = _ROOT.sub(r"\\sqrt{\1}", plain.replace("**", "^"))
    plain = _PLAIN_NAME.sub(_as_macro, plain)
    return _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", plain)


def words(latex: str, *, gold: bool) -> str | None:
    """A statement that is words rather than mathematics, folded for comparison; None for mathematics.

    Args:
        latex: what ``statement`` returned.
        gold: a gold answer is words only if it says so: ``\\text{}`` around it, a space, or four letters in a row.
            Without it, letters in any number are.
    """
    bare = _TEXT_MACRO.sub(r"\1", latex)
    is_marked = bare != latex
    bare = bare.strip(" (){}[].")
    if not _WORDS.fullmatch(bare) or (gold and not (is_marked or len(bare) >= 4 or " " in bare)):
        return None
    return " ".join(bare.casefold().split())


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
    if _BINOMIAL.search(latex):
        return "it has a binomial of something other than small numbers or letters"
    counts = {
        "nested brackets": (_depth(latex), MAX_DEPTH),
        "digits in a row": (max(map(len, re.findall("[0-9]+", latex)), default=0), MAX_DIGITS),
        "letters": (sum(map(str.isalpha, _MACRO.sub("", _TEXT_MACRO.sub("", latex)))), MAX_LETTERS),
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


def _boxed(text: str) -> list[str]:
    """The contents of all outermost boxes; one that never closes reaches to the end."""
    contents = []
    box = _BOX.search(text)
    while box is not None:
        end, depth = box.end(), 1
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        contents.append(text[box.end() : end - (depth == 0)].strip())
        box = _BOX.search(text, end)
    return contents


def _without_delimiters(text: str) -> str:
    """What is between dollar signs or LaTeX's brackets, if all that matters is; otherwise all of the text."""
    parts = [next(filter(None, groups), "").strip() for groups in _DELIMITED.findall(text)]
    if not parts or _SUBSTANCE.search(_DELIMITED.sub(" ", text)):
        return text
    return ", ".join(dict.fromkeys(parts))


def _as_macro(match: re.Match[str]) -> str:
    return "\\infty " if match[1] == "infinity" else f"\\{match[1]} "


def _depth(latex: str) -> int:
    depth = deepest = 0
    for sign in latex:
        if sign in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif sign in ")]}":
            depth = max(0, depth - 1)
    return deepest
