"""What sharing did in a step, in one plain sentence, and why when that was little."""

from __future__ import annotations

from collections.abc import Mapping

# Below this, sharing hardly shows in a step's time, and its owner should know what to change.
LITTLE_GAIN = 1.3


def sharing_line(values: Mapping[str, float | None], share: bool = True) -> str:
    """From the metrics of one training step; ``share``: ``model.share_prefix``.

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
    """What the first step's generation shared.

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
