"""Free-form answers: overlap with the gold answer by ROUGE."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer


def check_free_form(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L on stemmed words.

    A gold answer of one word has no word pairs; ROUGE-2 is then left out of the mean, so that repeating the gold answer
    earns 1. A gold answer without Latin letters or digits has no words that ROUGE reads, and no value.
    """
    tokenizer, scorer = _rouge()
    num_gold_words = len(tokenizer.tokenize(sample.answer))
    if num_gold_words == 0:
        return Verdict(None, f"gold answer {shorten(sample.answer)} has no words that ROUGE reads")
    measures = ("rouge1", "rougeL") if num_gold_words == 1 else ("rouge1", "rouge2", "rougeL")
    scores = scorer.score(sample.answer, answer)
    return Verdict(sum(float(scores[measure].fmeasure) for measure in measures) / len(measures))


@cache
def _rouge() -> tuple[DefaultTokenizer, RougeScorer]:
    # Imported here: it is heavy, and most runs have no such answers.
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    tokenizer = DefaultTokenizer(use_stemmer=True)
    return tokenizer, RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=tokenizer)
