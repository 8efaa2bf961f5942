"""How lmms-eval's task wants answers generated, as settings of our rollouts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlm_pg.errors import ConfigError
from vlm_pg.rollout.settings import RolloutSettings

# lmms-eval's default where a task names no strings. Its own classes of Qwen's models do not stop there either, because
# they write paragraphs (models/simple/qwen2_5_vl.py).
PARAGRAPH = "\n\n"
_KNOWN = ("max_new_tokens", "max_gen_toks", "temperature", "do_sample", "top_p", "top_k", "num_beams", "until")


@dataclass(frozen=True)
class Generation:
    """Of one request. ``max_new_tokens`` None: as the settings say. ``until``: strings that end an answer and are no
    part of it. Requests with equal ones are answered together."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    until: tuple[str, ...]

    def settings(self, base: RolloutSettings, samples: int) -> RolloutSettings:
        """``base`` with what the task says, ``samples`` answers a question.

        Raises:
            ConfigError: the values go beyond what is possible.
        """
        changes = {
            "num_generations": samples,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_strings": self.until,
            "max_new_tokens": self.max_new_tokens or base.max_new_tokens,
        }
        try:
            return RolloutSettings.model_validate({**base.model_dump(), **changes})
        except ValueError as error:
            raise ConfigError(f"The task's generation_kwargs cannot be used: {error}") from None

    def without_stop(self, text: str) -> str:
        """``text`` up to the first of the strings that end it."""
        ends = [place for stop in self.until if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


def generation_of(arguments: Mapping[str, Any], name: str) -> Generation:
    """Read a task's ``generation_kwargs``.

    Args:
        name: of the question, for messages.

    Raises:
        ConfigError: beam search, or a value of a wrong kind.
    """
    for key in sorted(set(arguments) - set(_KNOWN)):
        warnings.warn(f"generation_kwargs.{key}={arguments[key]} is not used by the model vlm_pg", stacklevel=2)
    beams = arguments.get("num_beams")
    if beams not in (None, 1):
        raise ConfigError(
            f"{name}: generation_kwargs.num_beams is {beams}, and answers are sampled or greedy here. Set num_beams=1 "
            "(--gen_kwargs num_beams=1)."
        )
    temperature = arguments.get("temperature")
    if temperature is None:
        temperature = 1.0 if arguments.get("do_sample") else 0.0
    if arguments.get("do_sample") is False:
        temperature = 0.0  # tasks leave a temperature beside it, which transformers passes over too
    until = arguments.get("until") or ()
    until = [until] if isinstance(until, str) else until
    length = arguments.get("max_new_tokens", arguments.get("max_gen_toks"))
    is_sampled = temperature > 0
    return Generation(
        max_new_tokens=None if length is None else int(length),
        temperature=float(temperature),
        top_p=float(arguments.get("top_p") or 1.0) if is_sampled else 1.0,
        top_k=int(arguments.get("top_k") or 0) if is_sampled else 0,
        until=tuple(str(stop) for stop in until if stop and stop != PARAGRAPH),
    )
