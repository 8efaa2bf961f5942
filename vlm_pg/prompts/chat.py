"""The model's chat template: rendering it, and the tokens that only it and the processor may write."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from types import FrameType
from typing import Any

from vlm_pg.errors import ModelError
from vlm_pg.types import CONTROL_TOKEN

_DELIMITER = re.compile(r"<\|.+\|>")
# Lines, calls and returns of Python in one rendering. Qwen2-VL's template has some 200 for an image of a conversation,
# and 90,000 when it is compiled.
_MOST_EVENTS = 10_000_000


class _Endless(BaseException):
    """No ``Exception``: jinja2 drops those in some places, and a trace function that has raised is not called again."""


def render_chat(processor: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """A conversation as the model's chat template writes it.

    Args:
        options: as ``apply_chat_template`` takes them.

    Raises:
        ModelError: the template cannot be rendered. transformers renders it in jinja2's sandbox, which refuses private
            attributes and long ranges. Nested loops and macros that call themselves are stopped by a count of what
            Python runs, the same on every rank; one operation without end, such as a power of large numbers, is not.
    """
    events = count(1)

    def limit(frame: FrameType, event: str, argument: Any) -> Any:
        if next(events) > _MOST_EVENTS:
            raise _Endless
        return limit

    before = sys.gettrace()
    try:
        sys.settrace(limit)  # of this thread
        try:
            text = processor.apply_chat_template(messages, tokenize=False, **options)
        finally:
            sys.settrace(before)
    except _Endless:
        problem = f"loops: one conversation takes more than {_MOST_EVENTS:,} steps of Python"
        raise _unusable(processor, problem) from None
    except Exception as error:  # a template can raise anything
        raise _unusable(processor, f"cannot be rendered: {type(error).__name__}: {error}") from error
    if not isinstance(text, str):
        raise _unusable(processor, f"gives a {type(text).__name__} instead of a text")
    return text


def check_placeholders(processor: Any, text: str, kinds: Sequence[str]) -> None:
    """Raise ModelError if a rendered conversation does not have one placeholder for each of its media."""
    for kind in ("image", "video"):
        token = getattr(processor, f"{kind}_token", None)
        if token and text.count(token) != kinds.count(kind):
            what = f"writes {text.count(token)} times {token} for {kinds.count(kind)} {kind}s of a conversation"
            raise _unusable(processor, what)


def control_tokens(processor: Any) -> tuple[str, ...]:
    """Tokens that structure a conversation: media tokens, ends of texts, and special tokens the chat template writes.

    Added tokens that are none of these, such as those a model was taught, may stand in any text.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    named = {getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad", "unk")}
    named |= {getattr(processor, f"{kind}_token", None) for kind in ("image", "video")}
    template = str(processor.chat_template)
    return tuple(
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.content in named
        or CONTROL_TOKEN.fullmatch(token.content)
        or ((token.special or _DELIMITER.fullmatch(token.content)) and token.content in template)
    )


def _unusable(processor: Any, problem: str) -> ModelError:
    name = getattr(getattr(processor, "tokenizer", processor), "name_or_path", "")
    return ModelError(
        f"The chat template of the model {name or 'in memory'} {problem}. Copy chat_template.jinja (or "
        "chat_template in tokenizer_config.json) from the checkpoint the model comes from."
    )
