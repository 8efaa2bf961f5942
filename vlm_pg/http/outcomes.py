"""How a request ended: whether to ask again, when, and what the answer says."""

from __future__ import annotations

import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from vlm_pg.http.bodies import UnreadableAnswer

# What a proxy, or a server that is still loading, answers in place of the server.
AWAY = (502, 503, 504)


def text_of(response: httpx2.Response) -> str:
    """The body as UTF-8, whatever charset its header names: some of those Python knows are no encodings of text."""
    return response.content.decode("utf-8", "replace")


def retry_after(value: str) -> float:
    """Seconds of a Retry-After header, which has a number of them or a date; 0 for anything else."""
    with suppress(ValueError, OverflowError):
        seconds = float(value) if value.strip().isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
        return max(0.0, seconds)
    return 0.0


def may_be_away(outcome: httpx2.Response | httpx2.RequestError) -> bool:
    if isinstance(outcome, httpx2.Response):
        return outcome.status_code in AWAY
    if isinstance(outcome, UnreadableAnswer | httpx2.DecodingError):
        return False
    # A server that takes a connection and says nothing is slow; all others may be away.
    return not isinstance(outcome, httpx2.TimeoutException) or isinstance(outcome, httpx2.ConnectTimeout)


def failed(response: httpx2.Response) -> bool:
    """Whether the server is at fault, and may do better when asked again."""
    return response.status_code >= 500 or response.status_code == 429 or _aborted(response)


def _aborted(response: httpx2.Response) -> bool:
    """vLLM and SGLang end the responses of a request they drop with the reason "abort"."""
    if response.status_code != 200 or b'"abort"' not in response.content:
        return False
    answer = json_of(response)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices
    )


def json_of(response: httpx2.Response) -> Any:
    """None for what is no JSON."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None
