"""What is added to a reward on account of the rest of the group or of the response's length."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Means of whole numbers of right answers are compared; 3 / 5 shall count as 0.8 times 3 / 4.
ROUNDING = 1e-9


def temporal_bonus(
    accuracies: Sequence[float | None],
    control_accuracies: Sequence[float | None],
    *,
    bonus: float,
    ratio: float,
    right_above: float,
) -> list[float]:
    """Bonus of each rollout of a video question (T-GRPO, Video-R1, arXiv 2503.21776, section 3).

    Right answers get ``bonus`` if the group's mean accuracy is at least ``ratio`` times that of a control group, which
    saw the same frames in a random order. Means are over what has a value. Without any valued control there is no
    bonus, as nothing shows that the order of the frames was of use.

        accuracies [1, 0, 1, 0], control [1, 0], ratio 0.8: 0.5 >= 0.4, so [bonus, 0, bonus, 0]

    Args:
        accuracies: of each rollout of the group; None: no value, no bonus.
        control_accuracies: of each rollout of the control group.
        right_above: an answer is right if its accuracy is above this.
    """
    group_mean, control_mean = _mean(accuracies), _mean(control_accuracies)
    earned = group_mean is not None and control_mean is not None and group_mean >= ratio * control_mean - ROUNDING
    return [bonus if earned and _is_right(accuracy, right_above) else 0.0 for accuracy in accuracies]


def length_bonus(
    accuracies: Sequence[float | None],
    lengths: Sequence[int],
    *,
    bonus: float,
    tokens: tuple[int, int],
    right_above: float,
) -> list[float]:
    """Bonus of each rollout for a right answer of a wanted length (Video-R1, arXiv 2503.21776, section 3).

    Only in groups with more than one right answer.

    Args:
        accuracies: of each rollout of the group; None: no value, no bonus.
        lengths: response tokens of each rollout.
        tokens: shortest and longest response that gets it, both included.
        right_above: an answer is right if its accuracy is above this.
    """
    low, high = tokens
    right = [_is_right(accuracy, right_above) for accuracy in accuracies]
    several = sum(right) > 1
    return [
        bonus if several and is_right and low <= length <= high else 0.0
        for is_right, length in zip(right, lengths, strict=True)
    ]


def overlong_penalty(length: int, max_new_tokens: int, share: float, penalty: float, truncated: bool) -> float:
    """Soft punishment of long responses, at most 0, to be added to the reward (DAPO, arXiv 2503.14476, equation 13).

    0 up to (1 - share) * max_new_tokens, from there linear to -penalty at max_new_tokens. A truncated response gets
    -penalty. With ``share`` 0 there is no punishment of any response.

        overlong_penalty(90, 100, 0.2, 1.0, False) -> -0.5

    Args:
        length: response tokens.
        share: last share of ``max_new_tokens`` in which the punishment grows, in [0, 1).
        truncated: whether the response was cut off.
    """
    if share == 0.0:
        return 0.0
    if truncated:
        return -penalty
    punished = share * max_new_tokens
    over = length - (max_new_tokens - punished)
    return -penalty * min(1.0, over / punished) if over > 0 else 0.0


def _mean(values: Sequence[float | None]) -> float | None:
    valued = [value for value in values if value is not None]
    return math.fsum(valued) / len(valued) if valued else None


def _is_right(accuracy: float | None, right_above: float) -> bool:
    return accuracy is not None and accuracy > right_above
