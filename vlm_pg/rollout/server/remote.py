"""Rollouts of ``RolloutEngine`` in other processes (``engine_server.py``), on GPUs of their own.

Prompts travel as tensors: no chat template, image file or rule of positions lies between trainer and server. Random
numbers are those of an engine in the trainer's process, so rollouts are the same up to rounding.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors.torch import load, save

from vlm_pg.errors import AnswerError, ServerError
from vlm_pg.http.client import run_until_stopped
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.contracts import Answer
from vlm_pg.rollout.engine import stop_token_ids
from vlm_pg.rollout.sampling import rollout_key
from vlm_pg.rollout.server.answers import Part, Text, TokenId, parse_part
from vlm_pg.rollout.server.client import RUN_GOES_ON, ServerClient, gather_or_cancel
from vlm_pg.rollout.server.dialects import ServerInfo
from vlm_pg.rollout.server.generator import STOPPED, ServerGenerator
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt

ROLLOUTS_PATH = "/rollouts"
_TENSORS = ("input_ids", "mm_token_type_ids", "positions_3P", "grid_thw")
_VALUES = ("sample_id", "media_kinds", "content_key", "media_keys", "response_start")


@dataclass(frozen=True)
class RolloutRequest:
    """Arguments of ``RolloutEngine.generate``; requests that are equal but for ``prompts`` may be sampled together."""

    settings: RolloutSettings
    seed: int
    step: int | str
    prompts: tuple[Prompt, ...]

    def pack(self) -> bytes:
        """Safetensors with the pixels of equal media once, and everything else as JSON in the tensor ``json``."""
        settings = self.settings.model_dump(mode="json", exclude={"server", "engine"})
        values = {"settings": settings, "seed": self.seed, "step": self.step}
        prompts, tensors = list[dict[str, Any]](), dict[str, torch.Tensor]()
        for number, prompt in enumerate(self.prompts):
            prompts.append({name: getattr(prompt, name) for name in _VALUES})
            for name in _TENSORS:
                if (tensor := getattr(prompt, name)) is not None:
                    tensors[f"{name}/{number}"] = tensor.clone(memory_format=torch.contiguous_format)
            if prompt.pixel_values is not None:
                tensors[f"pixels/{prompt.content_key}"] = prompt.pixel_values.contiguous()
        tensors["json"] = torch.frombuffer(
            bytearray(json.dumps(values | {"prompts": prompts}).encode()), dtype=torch.uint8
        )
        return save(tensors)

    @classmethod
    def unpack(cls, data: bytes) -> RolloutRequest:
        """The inverse of ``pack``."""
        tensors = load(data)
        values = json.loads(tensors["json"].numpy().tobytes())
        prompts = []
        for number, of_prompt in enumerate(values["prompts"]):
            found: dict[str, Any] = {name: tensors.get(f"{name}/{number}") for name in _TENSORS}
            found |= {name: tuple(value) if isinstance(value, list) else value for name, value in of_prompt.items()}
            prompts.append(Prompt(**found, pixel_values=tensors.get(f"pixels/{of_prompt['content_key']}")))
        return cls(RolloutSettings(**values["settings"]), values["seed"], values["step"], tuple(prompts))


class _Rollout(Part):
    token_ids: list[TokenId] = Field(min_length=1)
    logprobs: list[Annotated[float, Field(le=1e-3, allow_inf_nan=False)]]
    finish_reason: Literal["stop", "length"]
    text: Text


class _Rollouts(Part):
    groups: list[list[_Rollout]]


class RemoteGenerator:
    """A ``Generator`` on servers of this package, with the attributes of a ``ServerGenerator`` that its callers read.

    Args:
        model: the policy, which checks prompts.
        settings, seed, should_stop, log, advice, server: as in ``ServerGenerator``.
    """

    prompt_echo, takes_n, model_name = "ids", True, ""

    def __init__(
        self,
        model: Policy,
        settings: RolloutSettings,
        seed: int,
        should_stop: Callable[[], bool],
        log: Callable[[str], None],
        advice: str,
        server: ServerInfo,
    ):
        self.policy, self.settings, self.server, self._seed = model, settings, server, seed
        self._should_stop, self._log, self._advice = should_stop, log, advice
        self.stop_token_ids = tuple(sorted({*stop_token_ids(model), *settings.stop_token_ids}))
        self._logged: set[str] = set()

    def generate(
        self, prompts: Sequence[Prompt], step: int | str, count: int | None = None
    ) -> list[list[Answer] | AnswerError]:
        """As ``ServerGenerator.generate``; questions are divided evenly over the servers, one request for each."""
        for prompt in prompts:
            self.policy.check_prompt(prompt, self.settings.max_new_tokens)
        urls = self.settings.server.urls
        start = rollout_key(self._seed, step, prompts[0].sample_id, 0) if prompts else 0
        of_urls = [range((number - start) % len(urls), len(prompts), len(urls)) for number in range(len(urls))]
        sampling = self.settings.model_copy(update={"num_generations": count or self.settings.num_generations})

        async def request(url: str, indices: range) -> list[list[Answer]]:
            one = self.settings.server.of_url(url)
            # Other steps, and control groups, may be sampled first.
            waits = 2 * (1 + self.settings.staleness)
            limits = {
                "timeout_seconds": one.timeout_seconds * len(indices) * waits,
                "max_answer_mb": one.max_answer_mb * len(indices),
            }
            settings = one.model_copy(update=limits)
            async with ServerClient(settings, self._log, self.log_once, self._advice) as client:
                body = RolloutRequest(sampling, self._seed, step, tuple(prompts[index] for index in indices))
                answer = await client.post(f"{client.root}{ROLLOUTS_PATH}", lambda: asyncio.to_thread(body.pack))
                return self._read(url, answer, len(indices), sampling)

        asked = [(url, indices) for url, indices in zip(urls, of_urls, strict=True) if indices]
        found = run_until_stopped(
            gather_or_cancel(request(url, indices) for url, indices in asked), self._should_stop, STOPPED
        )
        by_index = {
            i: group for (_, of_url), groups in zip(asked, found, strict=True) for i, group in zip(of_url, groups)
        }
        return [by_index[index] for index in range(len(prompts))]

    def _read(
        self, url: str, answer: dict[str, Any], num_prompts: int, sampling: RolloutSettings
    ) -> list[list[Answer]]:
        try:
            groups = parse_part(_Rollouts, answer, f"the answer of {url}{ROLLOUTS_PATH}").groups
        except AnswerError as error:
            raise ServerError(f"{error} Start the server with the trainer's version of vlm_pg.") from error
        count, most, vocabulary = sampling.num_generations, sampling.max_new_tokens, self.policy.vocab_size
        if [len(group) for group in groups] != [count] * num_prompts or any(
            len(one.token_ids) > most or len(one.logprobs) != len(one.token_ids) or max(one.token_ids) >= vocabulary
            for group in groups
            for one in group
        ):
            raise ServerError(
                f"{url} answered {num_prompts} prompts with {[len(group) for group in groups]} rollouts, or with "
                f"tokens that cannot be. Expected are {count} each, of at most {most} tokens below {vocabulary} with "
                f"log-probabilities. Start the server with the trainer's vlm_pg and the run's model. {self._advice}"
            )
        return [
            [
                Answer(tuple(one.token_ids), one.finish_reason, one.text, True, len(one.token_ids), tuple(one.logprobs))
                for one in group
            ]
            for group in groups
        ]

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise SampleError for a prompt that the model does not support."""
        self.policy.check_length(prompt, self.settings.max_new_tokens)

    def take_num_retried(self) -> int:
        """0: every answer is valid, or an error."""
        return 0

    def take_cache_counts(self) -> Counter[str]:
        """Empty: these servers have no such caches."""
        return Counter()

    def log_once(self, topic: str, line: str) -> None:
        """Log the first line of a topic."""
        if topic not in self._logged:
            self._logged.add(topic)
            self._log(line)


def make_generator(
    model: Policy,
    settings: RolloutSettings,
    seed: int,
    should_stop: Callable[[], bool],
    messages: ChatMessages,
    log: Callable[[str], None],
    server: ServerInfo,
    advice: str = RUN_GOES_ON,
    needs_logprobs: bool = False,
) -> ServerGenerator | RemoteGenerator:
    """The generator for this kind of server; arguments as in ``ServerGenerator``."""
    if server.kind == "vlm_pg":
        return RemoteGenerator(model, settings, seed, should_stop, log, advice, server)
    return ServerGenerator(model, settings, seed, should_stop, messages, log, advice, server, needs_logprobs)
