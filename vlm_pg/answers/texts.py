"""Text answers: exact (the same but for spelling), free form (ROUGE), transcribed (word error rate)."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from vlm_pg.answers.clauses import boxed_statement, without_lead_in
from vlm_pg.answers.latex import one_spelling
from vlm_pg.answers.plain_text import (
    MAX_LONG_CHARACTERS,
    MAX_ROUGE_CHARACTERS,
    NO_GAPS,
    is_formula,
    plain,
    plain_formula,
    plain_short,
    same_but_for_case,
    without_layout,
    without_marks,
    words,
)
from vlm_pg.answers.units import parse_unit
from vlm_pg.answers.verdict import GraderSettings, Verdict, shorten
from vlm_pg.types import Sample

_CLOSING = ".,;:!?\u3002\u3001 "
_QUANTITY = re.compile(r"-?[0-9][0-9.,]{0,30} ?(\D{1,24})")


def check_exact(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """1.0 if ``answer`` is the gold answer but for how it is written, else 0.0.

    Left out on both sides: Unicode compatibility forms (NFKC), case (but not of symbols: "mV" is no "MV", "Co" no
    "CO"), spacing, closing punctuation, Markdown and quotes around it, LaTeX's layout and spellings of a formula, and a
    lead-in such as "The answer is".
    """
    if not normalized(sample.answer):
        return Verdict(None, f"gold answer {shorten(sample.answer)} is empty but for punctuation")
    if len(answer) > MAX_LONG_CHARACTERS:
        return Verdict(0.0, f"answer has more than {MAX_LONG_CHARACTERS} characters, which no exact answer has")
    readings = [answer] if (boxed := boxed_statement(answer)) is None else [answer, boxed]
    formulas = is_formula(sample.answer)
    is_same = any(
        same_but_for_case(read(text), read(sample.answer), formulas=formulas)
        for text in readings
        for read in (normalized, _core)
    )
    return Verdict(1.0 if is_same and not any(_have_other_units(text, sample.answer) for text in readings) else 0.0)


def normalized(text: str) -> str:
    """What is compared: normalized("Ｎew  York.") -> "New York"."""
    return " ".join(plain(text).split()).rstrip(_CLOSING)


def _core(text: str) -> str:
    """``normalized`` without lead-in and Markdown, formulas in one spelling: "150 µV" is "150µV"."""
    bare = without_marks(plain_formula(text)).rstrip(_CLOSING)
    stripped = without_marks(without_lead_in(bare).rstrip(_CLOSING)) or bare
    return one_spelling(normalized(stripped))


def _have_other_units(left: str, right: str) -> bool:
    """Whether both texts are a number with a unit, and the units are not the same."""
    found = [_QUANTITY.fullmatch(without_marks(plain(text)).rstrip(_CLOSING)) for text in (left, right)]
    units = [parse_unit(match[1]) for match in found if match]
    return len(units) == 2 and None not in units and len({(unit.kind, unit.factor) for unit in units if unit}) == 2


if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import Tokenizer

_TOKEN = re.compile(rf"[{NO_GAPS}]|[^\W_{NO_GAPS}]+")


def check_free_form(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L on stemmed words.

    Words are runs of letters and digits of any script; where a script has no gaps between words, each character is one.
    A lead-in such as "The answer is" and Markdown are left out; what is in LaTeX's box counts alone if that is nearer.
    A gold answer of one word has no word pairs; ROUGE-2 is then left out of the mean, so that repeating the gold answer
    earns 1. One without letters or digits has no value.
    """
    tokenizer, scorer = _rouge()
    gold = _bare_core(sample.answer)
    num_gold_words = len(tokenizer.tokenize(gold))
    if num_gold_words == 0:
        return Verdict(None, f"gold answer {shorten(sample.answer)} has no words that ROUGE reads")
    measures = ("rouge1", "rougeL") if num_gold_words == 1 else ("rouge1", "rouge2", "rougeL")
    readings = dict.fromkeys((_bare_core(answer), _bare_core(boxed_statement(answer) or answer)))
    means = [
        sum(float(scores[measure].fmeasure) for measure in measures) / len(measures)
        for scores in (scorer.score(gold, text) for text in readings)
    ]
    return Verdict(max(means))


def _bare_core(text: str) -> str:
    bare = without_marks(plain_short(text, MAX_ROUGE_CHARACTERS))
    return without_lead_in(bare) or bare


@cache
def _rouge() -> tuple[Tokenizer, RougeScorer]:
    # Imported here: it is heavy, and most runs have no such answers.
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer, Tokenizer

    class AnyScript(Tokenizer):
        """ROUGE's own words where they are ASCII, whole words of other scripts, characters where there are no gaps."""

        def __init__(self) -> None:
            self._ascii = DefaultTokenizer(use_stemmer=True)

        def tokenize(self, text: str) -> list[str]:
            tokens: list[str] = []
            for token in _TOKEN.findall(text.lower()):
                tokens += self._ascii.tokenize(token) if token.isascii() else [token]
            return tokens

    tokenizer = AnyScript()
    return tokenizer, RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=tokenizer)


_FRAME = "*$ \n"


def check_ocr(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """1 - WER, held in [0, 1]; WER is the word edit distance divided by the number of gold words.

    Words are what white space separates, and each character of a script without gaps between words (Chinese, Japanese,
    Thai ...), so that there it is the character error rate. Punctuation counts, since it is part of what is written,
    and so does case unless ``ocr_case_sensitive`` is off. Unicode compatibility forms (NFKC) do not. An answer in
    LaTeX's box, in bold or after a lead-in such as "The answer is" counts as what it frames, where that is nearer.
    """
    gold = _words(sample.answer, settings)
    if not gold:
        return Verdict(None, "gold answer is empty")
    import jiwer  # heavy, and most runs have no such answers

    errors = [float(jiwer.wer(" ".join(gold), " ".join(_words(text, settings)))) for text in _readings(answer)]
    return Verdict(max(0.0, 1.0 - min(errors)))


def _readings(answer: str) -> set[str]:
    """The answer as it stands, and what it frames; the closing dot of a sentence is no part of that."""
    text = plain_short(answer, MAX_LONG_CHARACTERS)
    framed = without_layout(boxed_statement(text) or text).strip(_FRAME)
    rest = without_lead_in(framed)
    # What ends like a sentence may be written there: "禁煙です".
    is_behind_lead_in = rest != framed and framed.endswith(rest)
    rest = rest.strip(_FRAME)
    return {text, framed} | ({rest, rest.rstrip(f".。{_FRAME}")} if is_behind_lead_in else set())


def _words(text: str, settings: GraderSettings) -> list[str]:
    normal = plain_short(text, MAX_LONG_CHARACTERS)
    return words(normal if settings.ocr_case_sensitive else normal.casefold())
