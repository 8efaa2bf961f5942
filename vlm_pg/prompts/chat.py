"""The model's chat template: rendering it, and the tokens that only it and the processor may write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_pg.errors import ModelError
from vlm_pg.types import CONTROL_TOKEN

_DELIMITER = re.compile(r"<\|.+\|>")
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def render_chat(processor: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """A conversation as the model's chat template writes it.

    Args:
        options: as ``apply_chat_template`` takes them.

    Raises:
        ModelError: the template cannot be rendered. transformers renders it in jinja2's sandbox, which refuses private
            attributes and long ranges.
    """
    try:
        text = processor.apply_chat_template(messages, tokenize=False, **options)
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
    named = {getattr(tokenizer, name, None) for name in _NAMED}
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
