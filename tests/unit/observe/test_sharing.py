"""The sentence about sharing: what was saved, and what to change when that is little."""

from __future__ import annotations

import pytest

from vlm_pg.observe.step_line import generation_line, sharing_line

VALUES = {
    "groups": 16.0,
    "tokens_computed": 52480.0,
    "tokens_repeated": 310272.0,
    "sharing_ratio": 310272 / 52480,
    "sharing_ratio_bound": 310272 / 52480,
    "questions_sharing": 0.0,
    "tokens_shared_across_questions": 0.0,
    "groups_chunked": 0.0,
    "prompt_tokens_mean": 2300.0,
    "response_tokens_mean": 122.0,
    "generations_mean": 8.0,
}


def test_what_was_saved() -> None:
    assert sharing_line(VALUES) == (
        "sharing is on: 16 groups, 52,480 tokens computed instead of 310,272 repeated "
        "(5.9x fewer through every linear layer)"
    )


def test_questions_that_share_groups_that_are_chunked_and_what_the_budget_costs() -> None:
    more = {"questions_sharing": 3.0, "tokens_shared_across_questions": 8192.0, "groups_chunked": 2.0}
    line = sharing_line(VALUES | more | {"sharing_ratio_bound": 7.0})
    assert (
        "(5.9x fewer through every linear layer, 7.0x if training.micro_batch_tokens held all groups at once)" in line
    )
    assert "; 3 questions begin like another one of their micro-batch (8,192 tokens more saved)" in line
    assert "; 2 groups are larger than training.micro_batch_tokens: their prompts run once" in line


@pytest.mark.parametrize(
    "changed, reason, change",
    [
        (
            {"prompt_tokens_mean": 90.0, "response_tokens_mean": 800.0},
            "prompts of 90 tokens are short against responses of 800.",
            "media.max_frames, media.max_pixels",
        ),
        ({"generations_mean": 1.0}, "only 1 rollout(s) share a prompt.", "a higher rollout.num_generations"),
        ({}, "few rollouts stand behind the long prompts.", "a higher rollout.num_generations"),
    ],
)
def test_little_gain_says_why_and_what_helps(changed: dict[str, float], reason: str, change: str) -> None:
    line = sharing_line(VALUES | {"sharing_ratio": 1.29} | changed)
    assert f"That is little: {reason} What helps:" in line
    assert change in line
    assert "That is little" not in sharing_line(VALUES | {"sharing_ratio": 1.3} | changed)


def test_generation_says_what_it_prefilled() -> None:
    values = {"prompt_tokens": 2288.0, "prefill_tokens": 2048.0, "tokens_per_second": 412.4, "peak_gib": 0.0132}
    named = {f"generation/{name}": value for name, value in values.items()}
    assert generation_line(named) == (
        "generation: 2,288 prompt tokens prefilled once for all rollouts, 2,048 after what prompts share; "
        "412 new tokens/s; keys and values booked up to 0.013 GiB"
    )
    assert "share" not in generation_line(named | {"generation/prefill_tokens": 2288.0})
    divided = "; those of 3 prompts lay in parts on the sequence ranks (without CUDA graphs)"
    assert generation_line(named | {"generation/prompts_divided": 3.0}).endswith(f"GiB{divided}")
    assert generation_line(named | {"generation/prompts_divided": 0.0}) == generation_line(named)
