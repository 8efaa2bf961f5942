"""NExT-QA, multiple choice."""

from __future__ import annotations

from vlm_pg.answers.published.mmmu import last_option_text, last_placed, letters_in, options_in, trimmed
from vlm_pg.answers.published.rule import Rule, chosen, drawn, texts_of
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    """MMMU's parser: "(A)", else "A ", else "A.", else an option's text; of several the last; else one is drawn."""
    texts, text = texts_of(sample), trimmed(output)
    for form in ("({})", "{} ", "{}."):
        found = letters_in(text, (form,), list(texts))
        if found:
            return chosen(sample, last_placed(found, text, form if form == "({})" else " {} "))
    found = options_in(text, texts)
    if found:
        return chosen(sample, last_option_text(text, found, texts))
    return drawn("nextqa/lmms", sample, output)


RULES = (
    Rule(
        "nextqa/lmms",
        _lmms,
        "lmms-eval's rule for the multiple choice part",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/nextqa/utils.py, after MMMU's eval/eval_utils.py",
        "'A ' goes before 'C.', so that 'C. A cat' is A. An output without a letter gets a random option; here it is "
        "drawn by a key, so that a figure repeats. The open-ended part (WUPS, which needs WordNet) is not offered.",
    ),
)
