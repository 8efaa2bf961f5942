"""Kinds of servers: how to recognize one, what it cannot do, and the sampling settings as its request fields."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from vlm_pg.errors import AnswerError, ServerError
from vlm_pg.http.client import json_of
from vlm_pg.http.keys import without_key
from vlm_pg.models.settings import PositionRule
from vlm_pg.rollout.server.answers import ModelEntry, parse_part
from vlm_pg.rollout.server.client import ServerClient
from vlm_pg.rollout.settings import RolloutSettings

# vlm_pg: this package (``engine_server``), which is sent prompts as tensors.
Kind = Literal["vlm_pg", "vllm", "sglang", "openai"]

# Largest rate of the video files sent to vLLM: by default it samples so many frames per second, all of a slower file.
# Versions that ignore a file's rate assume this one.
VLLM_FRAMES_PER_SECOND = 2
# Head sizes of vLLM's attention on a CPU (0.32, v1/attention/backends/cpu_attn.py).
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Rule of rotary positions of each kind; other kinds' is unknown.
POSITION_RULES: dict[Kind, PositionRule] = {"vllm": "qwen", "sglang": "qwen"}
# Kinds that report log-probabilities.
REPORTING: tuple[Kind, ...] = ("vlm_pg", "vllm", "sglang")
_LISTED = 8
_CACHE_COUNT = re.compile(r"(?m)^vllm:((?:prefix|mm)_cache_(?:queries|hits))_total\{[^}]*\} ([0-9.e+]+)$")


@dataclass(frozen=True)
class ServerInfo:
    """What a server is. ``models`` is empty for one that loads whatever a request names.

    ``key``: the key it was sent, which a model's name may repeat. ``paths``: of its endpoints, as far as it lists them.
    ``version``: of vLLM.
    """

    kind: Kind
    models: tuple[str, ...] = ()
    key: str | None = field(default=None, repr=False)
    paths: frozenset[str] = field(default=frozenset(), repr=False)
    version: str | None = None

    def shown(self, name: str) -> str:
        """A model's name with the key masked."""
        return without_key(name, self.key)

    @property
    def takes_n(self) -> bool:
        """Whether one request may sample all rollouts of a group.

        SGLang draws the choices of one seeded request from equal seeds.
        """
        return self.kind in ("vllm", "openai")

    def check_model(self, name: str | None) -> str:
        """The model that requests name: ``name``, or the first one listed.

        Raises:
            ServerError: the server does not list it.
        """
        if name is None:
            return self.models[0]
        if name not in self.models:
            others = ", ".join(map(self.shown, self.models[:_LISTED])) + (", ..." if len(self.models) > _LISTED else "")
            raise ServerError(
                f"rollout.server.model is {name!r}, which the server does not serve. It lists: {others}. Set "
                "rollout.server.model to one of them, or leave it out for the first."
            )
        return name


async def recognize(client: ServerClient) -> ServerInfo:
    """Query the kind of server and its models.

    Raises:
        ServerError: it is no OpenAI-compatible server, or lists no model.
    """
    response = await client.response(f"{client.root}/openapi.json")
    schema = json_of(response) if response.status_code == 200 else None
    listed_paths = schema.get("paths") if isinstance(schema, dict) else None
    paths = frozenset(listed_paths) if isinstance(listed_paths, dict) else frozenset()
    if {"/load_model", "/v1/chat/completions"} <= paths:
        raise ServerError(
            "This is transformers serve, which resizes media, rewrites responses by a template, and reports neither "
            "tokens nor log-probabilities. Use vLLM, SGLang, rollout.server.launch.engine=vlm_pg, or "
            "rollout.engine=in_process."
        )
    response = await client.response(f"{client.url}/models")
    if response.status_code != 200:
        raise ServerError(
            f"{client.url}/models answers with status {response.status_code}. rollout.server.url must be the base URL "
            "of an OpenAI-compatible server with its version, for example http://127.0.0.1:8000/v1; status 401 or 403 "
            "asks for a key in the environment variable that rollout.server.api_key_variable names."
        )
    listed = client.json_object(response).get("data")
    entries = []
    for entry in listed if isinstance(listed, list) else []:
        with suppress(AnswerError):
            entries.append(parse_part(ModelEntry, entry, "a model"))
    if not entries:
        raise ServerError(
            f"{client.url}/models lists no model. rollout.server.url must be the base URL of an OpenAI-compatible "
            "server that serves one."
        )
    owner = entries[0].owned_by
    known: dict[str | None, Kind] = {"vlm_pg": "vlm_pg", "vllm": "vllm", "sglang": "sglang"}
    kind = known.get(owner, "openai")
    version = None
    if kind == "vllm" and "/version" in paths:
        version = str((await client.control("/version")).get("version"))
    return ServerInfo(kind, tuple(entry.id for entry in entries), client.key, paths, version)


async def cache_counts(client: ServerClient) -> Counter[str]:
    """Queries and hits of vLLM's caches since its start, by their names in its metrics; empty without metrics.

    Of the prefix cache in prompt tokens, of the multimodal cache in media.
    """
    response = await client.response(f"{client.root}/metrics")
    found = _CACHE_COUNT.findall(response.text) if response.status_code == 200 else []
    counts = Counter[str]()
    for name, value in found:
        counts[name] += int(float(value))
    return counts


def check_settings(kind: Kind, settings: RolloutSettings) -> None:
    """Raise ServerError for what this kind of server cannot do."""
    if kind == "vlm_pg":
        raise ServerError(
            "This is a server of vlm_pg, which samples for the updates of a training run alone. Evaluate with "
            "rollout.engine=in_process."
        )
    if kind == "openai" and (settings.stop_strings or settings.stop_token_ids):
        raise ServerError(
            "rollout.stop_strings or rollout.stop_token_ids is set, but a server of unknown kind does not say what "
            "ended a response, so that its last token would be a guess. Leave both out, use vLLM or SGLang, or "
            "rollout.engine=in_process."
        )


def request_fields(
    kind: Kind, settings: RolloutSettings, stop_token_ids: tuple[int, ...], ruled_out_ids: tuple[int, ...]
) -> dict[str, Any]:
    """The sampling settings as fields of a chat completion request.

    Every setting is sent to servers that know it, neutral or not: they fill gaps from the model's
    ``generation_config.json``, and those of Qwen-VL checkpoints are far from neutral. ``ruled_out_ids`` get a bias
    that prevents them.
    """
    fields: dict[str, Any] = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_new_tokens,
        "logit_bias": {str(token): -100 for token in ruled_out_ids},
        # Those of the policy that sampled: the denominator of the loss's ratio.
        "logprobs": True,
    }
    if kind == "openai":
        # Extras, by vLLM's names, only where they matter: it may refuse them.
        names = {"min_new_tokens": "min_tokens"}
        return fields | {names.get(name, name): value for name, value in settings.extras.items()}
    if settings.stop_strings:
        fields["stop"] = list(settings.stop_strings)
    fields |= {
        "top_k": settings.top_k or -1,
        "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "min_tokens": settings.min_new_tokens,
        "stop_token_ids": list(stop_token_ids),
        "skip_special_tokens": False,
    }
    if kind == "sglang":
        return fields | {"no_stop_trim": True}
    return fields | {
        "include_stop_str_in_output": True,
        "spaces_between_special_tokens": False,
        "return_token_ids": True,
    }


def tokens_in(
    messages: Sequence[Mapping[str, Any]], token_ids: Sequence[int], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Body of vLLM's ``/inference/v1/generate``, which says of each token which weights sampled it.

    Args:
        messages: chat messages with the prompt's media.
        token_ids: of the prompt, with one token for each medium.
        fields: ``request_fields``.
    """
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if part["type"] != "text"]
    sampling = {name: value for name, value in fields.items() if name != "return_token_ids"}
    return {
        "token_ids": list(token_ids),
        "content_parts": [{"type": part["type"], "url": part[part["type"]]["url"]} for part in parts] or None,
        "sampling_params": sampling | {"logprobs": 0},
        "return_token_ids": True,
    }
