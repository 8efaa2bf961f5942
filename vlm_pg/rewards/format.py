"""The shape of a response: one think block, then one answer block.

Plain string searches, no regular expressions: the text comes from the model, may be long and may be hostile, and every
function here takes time linear in its length.
"""

from __future__ import annotations

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
_TAGS = (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)


def format_reward(text: str) -> float:
    """1.0 if ``text`` is exactly one think block, then one answer block, and nothing else; otherwise 0.0.

    White space around and between the blocks is allowed. A tag that occurs twice, or inside the other block, is not.

        format_reward("<think>first red</think> <answer>B</answer>") -> 1.0
    """
    stripped = text.strip()
    if any(stripped.count(tag) != 1 for tag in _TAGS):
        return 0.0
    if not (stripped.startswith(THINK_OPEN) and stripped.endswith(ANSWER_CLOSE)):
        return 0.0
    think_end = stripped.index(THINK_CLOSE) + len(THINK_CLOSE)
    answer_start = stripped.index(ANSWER_OPEN)
    # A negative gap means that the answer opens inside the think block.
    blocks_in_order = think_end <= answer_start and not stripped[think_end:answer_start].strip()
    return 1.0 if blocks_in_order else 0.0


def extract_answer(text: str) -> str | None:
    """The text of the first ``<answer>`` element, stripped; None if there is no complete element.

    extract_answer("<answer> B </answer>") -> "B"
    extract_answer("the answer is B") -> None
    """
    start = text.find(ANSWER_OPEN)
    if start < 0:
        return None
    start += len(ANSWER_OPEN)
    end = text.find(ANSWER_CLOSE, start)
    return None if end < 0 else text[start:end].strip()
