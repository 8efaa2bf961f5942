"""Free-form answers: overlap with the gold answer by ROUGE."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from vlm_pg.rewards.lead_ins import boxed_statement, without_lead_in
from vlm_pg.rewards.plain_text import MAX_ROUGE_CHARACTERS, NO_GAPS, plain_short, without_marks
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import Tokenizer

_TOKEN = re.compile(rf"[{NO_GAPS}]|[^\W_{NO_GAPS}]+")


def check_free_form(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L on stemmed words.

    Words are runs of letters and digits of any script; where a script has no gaps between words, each character is one.
    A lead-in such as "The answer is" and Markdown are left out; what is in LaTeX's box counts alone if that is nearer.
    A gold answer of one word has no word pairs; ROUGE-2 is then left out of the mean, so that repeating the gold answer
    earns 1. One without letters or digits has no value.
    """
    tokenizer, scorer = _rouge()
    gold = _core(sample.answer)
    num_gold_words = len(tokenizer.tokenize(gold))
    if num_gold_words == 0:
        return Verdict(None, f"gold answer {shorten(sample.answer)} has no words that ROUGE reads")
    measures = ("rouge1", "rougeL") if num_gold_words == 1 else ("rouge1", "rouge2", "rougeL")
    readings = dict.fromkeys((_core(answer), _core(boxed_statement(answer) or answer)))
    means = [
        sum(float(scores[measure].fmeasure) for measure in measures) / len(measures)
        for scores in (scorer.score(gold, text) for text in readings)
    ]
    return Verdict(max(means))


def _core(text: str) -> str:
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
