"""Transcribed text: one minus the word error rate."""

from __future__ import annotations

from vlm_pg.rewards.lead_ins import boxed_statement, without_lead_in
from vlm_pg.rewards.plain_text import MAX_LONG_CHARACTERS, plain_short, without_layout, words
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict
from vlm_pg.types import Sample

_FRAME = "*$ \n"


def check_ocr(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
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


def _words(text: str, settings: RewardSettings) -> list[str]:
    normal = plain_short(text, MAX_LONG_CHARACTERS)
    return words(normal if settings.ocr_case_sensitive else normal.casefold())
