"""CPPO's dynamic completion allocation: tokens that pruning frees go to further questions.

The budget is counted in tokens, so it is met at every pruning rate: questions are added one by one while each brings
the sum nearer to the budget. It then ends within half of the cost of the last question looked at.
"""

from __future__ import annotations

import math


def fits(used: int, budget: int, cost: int) -> bool:
    """Whether a further question brings ``used`` nearer to ``budget`` than leaving it out does.

    fits(90, 100, 15) is True (105 is nearer than 90); fits(90, 100, 20) is False (110 is as far as 90).

    Args:
        used: tokens that train so far: prefixes, and responses that pruning keeps.
        budget: tokens that would train without pruning: prefixes and all responses of the step's own questions.
        cost: the same of the further question, after pruning. One that costs nothing brings nothing nearer.
    """
    return abs(used + cost - budget) < abs(used - budget)


def questions_needed(used: int, budget: int, mean_cost: float) -> int:
    """How many further questions to sample, if each costs ``mean_cost``: as many as ``fits`` would add.

    An estimate, as the cost of a question is known once it has been sampled. If the questions turn out cheaper, ask
    again; if dearer, ``fits`` leaves some of them out.

    Args:
        used: as in ``fits``.
        budget: as in ``fits``.
        mean_cost: tokens of a question after pruning, on average; those sampled so far tell.

    Raises:
        ValueError: ``mean_cost`` is not above 0.
    """
    if not mean_cost > 0.0:
        raise ValueError(
            f"The mean cost of a question is {mean_cost} tokens. It must be above 0. Count prefix and kept responses."
        )
    return max(0, math.ceil((budget - used) / mean_cost - 0.5))
