"""LongVideoBench."""

from __future__ import annotations

from vlm_pg.answers.published.letters import first_of_five_or_drawn
from vlm_pg.answers.published.rule import Rule

RULES = (
    Rule(
        "longvideobench/lmms",
        first_of_five_or_drawn,
        "lmms-eval's rule, by its own account the paper's",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/longvideobench/utils.py",
        "The first capital A to E anywhere, some lead-ins removed: 'Answer: B' is A. An output without one gets a "
        "random option; here it is drawn by a key, so that a figure repeats. VLMEvalKit's judge is not offered.",
    ),
)
