"""The one line that a training step prints, and the numbers in it with their units."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_pg.observe.text import one_line
from vlm_pg.types import RolloutGroup

Values = Mapping[str, float | None]


def format_step(step: int, total: int, values: Values) -> str:
    """One line about a step; what has no value is left out, except the reward, which then reads ``n/a``.

    step  12/300 | reward 0.61 (accuracy 0.52, format 0.90) | kl 0.012 | entropy 0.41 nat | response 14.6 tok
    | 5,120 tok/s | 0.28 s | shared prefix saved 4,816 of 7,168 tok (3.0x fewer)
    """
    segments = [
        f"step {step:>{len(str(total))}}/{total}",
        _reward(values),
        _number(values, "kl", "kl {:.3f}"),
        _number(values, "entropy", "entropy {:.2f} nat"),
        _number(values, "response_tokens_mean", "response {:.1f} tok"),
        _number(values, "tokens_per_second", "{:,.0f} tok/s"),
        _number(values, "step_seconds", "{:.2f} s"),
        _saved(values),
        _warning(values, "pruned_share", "of the rollouts pruned"),
        _count(values, "filled_groups", "{:.0f} questions in their place"),
        _count(values, "resampled_groups", "{:.0f} groups sampled for those without spread"),
        _warning(values, "truncated_share", "cut off at the length limit"),
        _warning(values, "no_value_share", "without a reward value"),
    ]
    return " | ".join(segment for segment in segments if segment)


def saved_tokens(values: Values) -> tuple[int, int] | None:
    """(tokens saved, tokens that repeating the prefix would have cost); None when the step did not count them."""
    computed, repeated = values.get("tokens_computed"), values.get("tokens_repeated")
    if computed is None or not repeated:
        return None
    return int(repeated - computed), int(repeated)


def _reward(values: Values) -> str:
    parts = []
    for key, value in values.items():
        if key.startswith("reward/"):
            parts.append(f"{key.removeprefix('reward/')} {'n/a' if value is None else format(value, '.2f')}")
    total = values.get("reward")
    text = f"reward {'n/a' if total is None else format(total, '.2f')}"
    return f"{text} ({', '.join(parts)})" if parts else text


def _number(values: Values, key: str, template: str) -> str:
    value = values.get(key)
    return "" if value is None else template.format(value)


def _count(values: Values, key: str, template: str) -> str:
    """A number worth a word only where it is not 0."""
    return _number(values, key, template) if values.get(key) else ""


def _warning(values: Values, key: str, words: str) -> str:
    """A share worth a word: from half a per cent on."""
    share = values.get(key)
    return "" if share is None or share < 0.005 else f"{100 * share:.0f} % {words}"


def _saved(values: Values) -> str:
    saved = saved_tokens(values)
    if saved is None:
        return ""
    ratio = saved[1] / max(1, saved[1] - saved[0])
    return f"shared prefix saved {saved[0]:,} of {saved[1]:,} tok ({ratio:.1f}x fewer)"


def rollout_rows(groups: list[RolloutGroup], limit: int) -> list[tuple[str, str, str, str, str]]:
    """(question, gold answer, response, rewards, advantage) of at most ``limit`` rollouts.

    From each group in turn its rollout with the highest advantage and, if it differs, the one with the lowest.
    """
    rows = []
    for group in groups:
        for index in _best_and_worst(group):
            rollout = group.rollouts[index]
            response = rollout.text if rollout.finish_reason == "stop" else f"{rollout.text} [cut off]"
            advantage = f"{group.advantages[index]:+.2f}" if group.advantages else "n/a"
            question = " ".join((group.sample.question, *group.sample.options))
            rows.append(
                (
                    one_line(question, 120),
                    one_line(group.sample.answer, 40),
                    one_line(response, 240),
                    _reward_cell(group, index),
                    advantage,
                )
            )
    return rows[:limit]


def _best_and_worst(group: RolloutGroup) -> list[int]:
    if not group.rollouts:
        return []
    if not group.advantages:
        return [0]
    order = sorted(range(len(group.rollouts)), key=lambda index: group.advantages[index])
    best, worst = order[-1], order[0]
    return [best] if group.advantages[best] == group.advantages[worst] else [best, worst]


def _reward_cell(group: RolloutGroup, index: int) -> str:
    if not group.rewards:
        return "n/a"
    reward = group.rewards[index]
    total = "no value" if reward.total is None else f"{reward.total:.2f}"
    parts = ", ".join(
        f"{name} {'n/a' if value is None else format(value, '.2f')}" for name, value in reward.parts.items()
    )
    return f"{total} ({parts})" if parts else total
