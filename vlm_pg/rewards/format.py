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
    """The text of the last complete ``<answer>`` element outside of all think blocks, stripped; None if there is none.

    A think block that never closes reaches to the end, unless the text ends in an answer element: then only its closing
    tag was left out. One that closes without opening begins with the text (some prompts open it).

    extract_answer("<think><answer>A</answer></think><answer> B </answer>") -> "B"
    extract_answer("the answer is B") -> None
    """
    outside = _outside_of_thoughts(text)
    answer, start = None, outside.find(ANSWER_OPEN)
    while start >= 0:
        end = outside.find(ANSWER_CLOSE, start)
        if end < 0:
            break
        # An element that opens again before it closes begins where it opens last.
        start = outside.rfind(ANSWER_OPEN, start, end) + len(ANSWER_OPEN)
        answer = outside[start:end].strip()
        start = outside.find(ANSWER_OPEN, end)
    return answer


def _outside_of_thoughts(text: str) -> str:
    """``text`` without its think blocks; a space is left where one was."""
    parts: list[str] = []
    place = 0
    while True:
        closing = text.find(THINK_CLOSE, place)
        # Searched up to the closing tag only, so that no part of the text is looked at twice.
        opening = text.find(THINK_OPEN, place, len(text) if closing < 0 else closing)
        if opening >= 0:
            parts.append(text[place:opening])
        elif closing < 0:
            return " ".join([*parts, text[place:]])
        else:
            parts = []  # it was a thought from the beginning
        if closing < 0:
            ends_in_answer = text.rstrip().endswith(ANSWER_CLOSE)
            return " ".join([*parts, text[opening:]] if ends_in_answer else parts)
        place = closing + len(THINK_CLOSE)
