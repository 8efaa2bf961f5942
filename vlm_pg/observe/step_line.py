"""The line that a training step prints, the numbers in it with their units, and what sharing the prefix saved."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_pg.observe.text import one_line
from vlm_pg.types import RolloutGroup

Values = Mapping[str, float | None]


def format_step(step: int, total: int, values: Values) -> str:
    """One line about a step; missing values are left out, except the reward, which then reads ``n/a``.

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
    """A number that is shown unless it is 0."""
    return _number(values, key, template) if values.get(key) else ""


def _warning(values: Values, key: str, words: str) -> str:
    """A share that is shown from half a per cent on."""
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


# Below this, sharing hardly affects a step's time, and the line says which settings to change.
LITTLE_GAIN = 1.3


def sharing_line(values: Mapping[str, float | None], share: bool = True) -> str:
    """The effect of sharing in one training step, and why it is small; ``share``: ``model.share_prefix``.

    sharing is on: 16 groups, 52,480 tokens computed instead of 310,272 repeated (5.9x fewer through every linear
    layer); 3 questions begin like another one of their micro-batch (8,192 tokens more saved)
    """
    number = {name: value or 0.0 for name, value in values.items()}
    if not share:
        return (
            f"sharing is off (model.share_prefix=false): {number['groups']:,.0f} groups, "
            f"{number['tokens_computed']:,.0f} tokens computed, every rollout's prompt among them"
        )
    line = (
        f"sharing is on: {number['groups']:,.0f} groups, {number['tokens_computed']:,.0f} tokens computed instead of "
        f"{number['tokens_repeated']:,.0f} repeated ({number['sharing_ratio']:.1f}x fewer through every linear layer"
    )
    if number["sharing_ratio_bound"] > 1.05 * number["sharing_ratio"]:
        line += f", {number['sharing_ratio_bound']:.1f}x if training.micro_batch_tokens held all groups at once"
    line += ")"
    if number["questions_sharing"]:
        line += (
            f"; {number['questions_sharing']:,.0f} questions begin like another one of their micro-batch "
            f"({number['tokens_shared_across_questions']:,.0f} tokens more saved)"
        )
    if number["groups_chunked"]:
        line += (
            f"; {number['groups_chunked']:,.0f} groups are larger than training.micro_batch_tokens: their prompts run "
            "once and their responses follow in chunks"
        )
    return line + _why_little(number)


def generation_line(values: Mapping[str, float | None], share: bool = True) -> str:
    """The effect of sharing in the first step's generation.

    generation: 2,288 prompt tokens prefilled once for all rollouts, 2,048 after what prompts share; 412 new tokens/s;
    keys and values booked up to 0.013 GiB
    """
    number = {name: value or 0.0 for name, value in values.items()}
    prompt, prefill = number["generation/prompt_tokens"], number["generation/prefill_tokens"]
    how = "once for all rollouts" if share else "by every rollout for itself"
    line = f"generation: {prompt:,.0f} prompt tokens prefilled {how}"
    if prefill < prompt:
        line += f", {prefill:,.0f} after what prompts share"
    line += (
        f"; {number['generation/tokens_per_second']:,.0f} new tokens/s; keys and values booked up to "
        f"{number['generation/peak_gib']:.2g} GiB"
    )
    divided = number.get("generation/prompts_divided", 0.0)
    if divided:
        line += f"; those of {divided:,.0f} prompts lay in parts on the sequence ranks (without CUDA graphs)"
    return line


def _why_little(number: Mapping[str, float]) -> str:
    if number["sharing_ratio"] >= LITTLE_GAIN:
        return ""
    prompt, response = number["prompt_tokens_mean"], number["response_tokens_mean"]
    rollouts = number["generations_mean"]
    reasons, changes = [], []
    if prompt < response:
        reasons.append(f"prompts of {prompt:,.0f} tokens are short against responses of {response:,.0f}")
        changes.append("more frames or pixels (media.max_frames, media.max_pixels) or shorter responses")
    if rollouts < 4:
        reasons.append(f"only {rollouts:.3g} rollout(s) share a prompt")
        changes.append("a higher rollout.num_generations")
    if not reasons:
        reasons.append("few rollouts stand behind the long prompts")
        changes.append("a higher rollout.num_generations")
    return f". That is little: {' and '.join(reasons)}. What helps: {', '.join(changes)}"
