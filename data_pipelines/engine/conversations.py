"""Conversations of rows, in LLaVA's form or OpenAI's, as the question and turns of a record.

[{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}, ...]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_pipelines.engine.fields import first_of, listed, opened, text_of, unusable
from vlm_pg.types import MEDIA_MARKS

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
Turn = tuple[str, str]


def turns_of(value: Any, name: str) -> list[Turn]:
    """Role ("user" or "assistant") and text of each turn of a list; images and videos among its parts as marks.

    Args:
        name: of the value in messages.

    Raises SampleError: ``bad_conversation``: a turn of another role; ``wrong_type`` or ``missing_field``.
    """
    turns = listed(opened(value), f"'{name}'")
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise unusable("wrong_type", f"'{name}' is {repr(turns)[:80]}", "A list of turns with a role and a text each")
    found = []
    for turn in turns:
        role = str(first_of(turn, "from", "role"))
        if role not in _ROLES:
            allowed = "human or user, gpt or assistant (prompt.system sets a system message)"
            raise unusable("bad_conversation", f"'{name}' has a turn of '{role[:80]}'", allowed)
        parts = first_of(turn, "value", "content")
        text = "".join(map(_part, parts)) if isinstance(parts, list) else text_of(turn, "value", "content")
        found.append((_ROLES[role], text))
    return found


def alternating(turns: list[Turn]) -> list[str]:
    """The texts of turns of the user and the assistant in alternation, the last one the assistant's.

    Raises SampleError: ``bad_conversation``.
    """
    roles = [role for role, _ in turns]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        came = f"the roles of the turns are {', '.join(roles) or 'none'}"
        raise unusable("bad_conversation", came, "The user and the assistant in alternation, the assistant last,")
    return [text for _, text in turns]


def response_of(value: Any, name: str) -> str:
    """A response that is a text, or the assistant's turn at the end of a list with no other one of it.

    Raises SampleError: as ``turns_of``; ``bad_conversation``: the list is another one.
    """
    turns = opened(value) if isinstance(value, str) else listed(value, f"'{name}'")
    has_roles = isinstance(turns, list) and all(isinstance(one, Mapping) and {*one} & {"from", "role"} for one in turns)
    if not isinstance(turns, list) or (isinstance(value, str) and not (turns and has_roles)):  # a text, maybe JSON
        return text_of({name: value}, name)
    found = turns_of(turns, name)
    roles = [role for role, _ in found]
    if roles not in (["assistant"], ["user", "assistant"]):
        came = f"the roles of the turns of '{name}' are {', '.join(roles) or 'none'}"
        allowed = "One of the assistant, or of the user and the assistant (earlier ones: the map's 'conversation'),"
        raise unusable("bad_conversation", came, allowed)
    return found[-1][1]


def _part(part: Any) -> str:
    kind = str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
    if kind == "text":
        return text_of(part, "text")
    for medium, mark in MEDIA_MARKS.items():
        if kind.startswith(medium):  # "image_url" too
            return mark
    raise unusable("wrong_type", f"a part of a turn is of type '{kind[:80]}'", "Parts of text, image or video")
