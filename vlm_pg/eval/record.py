"""What an evaluation depended on, written beside its result, so that it can be cited, gone on with and repeated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from vlm_pg.config import RunConfig
from vlm_pg.data.digests import data_digests
from vlm_pg.errors import ConfigError
from vlm_pg.eval.judging.judge import judge_record
from vlm_pg.eval.own import own_sources
from vlm_pg.eval.protocols.protocol import Protocol
from vlm_pg.models.digests import numerics_digest, weights_digest
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.engine import stop_token_ids
from vlm_pg.versions import versions

SCHEMA = 1
_SECTIONS = ("media", "prompt", "rollout", "reward", "eval")
# How something is computed, or where it is written, and not what; by section.
_NOT_DECIDING = {
    "media": ("workers", "deadline_seconds", "worker_memory_bytes", "remote_timeout_seconds", "max_remote_bytes"),
    "rollout": ("server", "logprobs", "mismatch_every", "num_generations", "temperature", "top_p", "top_k"),
    "eval": (
        "before",
        "after",
        "every",
        "headline_set",
        "sets",
        "resume",
        "thumbnails",
        "lmms_samples",
        "protocols",
        "judge",
    ),
}


def protocol_record(
    config: RunConfig, checkpoint: Path, policy: Policy | WeightlessPolicy, server: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that decides about an evaluation's answers and scores, as JSON has it.

    ``decides``: with equal values two evaluations give the same answers, bit for bit where ``machine`` is equal too.
    ``checkpoint`` and ``config``: what repeats it (``vlm-pg eval --like``).

    Args:
        policy: that answered; without weights where a server did.
        server: what is known of that server; its weights, and what it computes in, are null then: nobody here knows.
    """
    whole = config.model_dump(mode="json")
    settings = {
        section: {key: value for key, value in whole[section].items() if key not in _NOT_DECIDING.get(section, ())}
        for section in _SECTIONS
    }
    chosen = config.eval.chosen_sets(list(config.data.eval))
    records = {key: entry["sha256"] for key, entry in data_digests(config.data).items()}
    template = getattr(policy.processor, "chat_template", None)
    protocols = {name: protocol for name in chosen if (protocol := config.eval.protocol_of(name)) is not None}
    return {
        "schema": SCHEMA,
        "checkpoint": str(checkpoint),
        "decides": {
            **_of_weights(config, policy),
            **({} if server is None else {"server": server}),
            "positions": config.model.positions,
            "chat_template": hashlib.sha256(str(template).encode()).hexdigest(),
            "processor": _processor_digest(policy.processor),
            "end_tokens": sorted(stop_token_ids(policy)),
            "media_roots": {name: str(config.data.root_for(config.data.eval[name], name)) for name in chosen},
            "allow_remote": config.data.allow_remote,
            "records": {name: records.get(f"data.eval.{name}") for name in chosen},
            "settings": settings,
            "protocols": {name: protocol.model_dump(mode="json") for name, protocol in protocols.items()},
            **own_functions(protocols.values()),
            "seed": config.run.seed,
            "versions": versions(),
        },
        "machine": _machine(config, policy),
        # Beside the figures of the rules, which it does not decide about.
        "judge": judge_record(config.eval.judge),
        "config": whole,
    }


def own_functions(protocols: Iterable[Protocol]) -> dict[str, dict[str, str]]:
    """Under "functions" digests of the user's own readers and aggregations; nothing without any."""
    sources = own_sources(name for protocol in protocols for name in (protocol.reader, protocol.aggregation))
    return {"functions": sources} if sources else {}


def _of_weights(config: RunConfig, policy: Policy | WeightlessPolicy) -> dict[str, Any]:
    if isinstance(policy, WeightlessPolicy):
        return {"weights": None, "dtype": None, "share_prefix": None}
    return {
        "weights": weights_digest(policy.model),
        "dtype": config.model.dtype,
        "share_prefix": config.model.share_prefix,
    }


def _machine(config: RunConfig, policy: Policy | WeightlessPolicy) -> dict[str, Any]:
    if isinstance(policy, WeightlessPolicy):
        return {"device": "a server's", "url": config.rollout.server.url}
    return {
        "device": torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else "cpu",
        "attention_kernel": policy.kernel.name,
        "threads": torch.get_num_threads(),
        "numerics": numerics_digest(policy.device),
    }


def _processor_digest(processor: Any) -> str:
    """Of how pictures become patches, and of the vocabulary; not of where these lie."""
    digest = hashlib.sha256()
    for name in ("image_processor", "video_processor"):
        part = getattr(processor, name, None)
        values = {} if part is None else part.to_dict()
        values = {key: value for key, value in values.items() if not key.startswith("_") and "path" not in key}
        digest.update(json.dumps(values, sort_keys=True, default=str).encode())
    tokenizer = getattr(processor, "tokenizer", processor)
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    return digest.hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each value that is another one, or is in one of the two alone: "settings.media.fps: 2.0 then, 4.0
    now". Both are parts of records (``decides``, ``machine``)."""
    then, here = dict(_flat(before)), dict(_flat(now))
    names = [*then, *(name for name in here if name not in then)]
    absent = "nothing"
    return [
        f"{name}: {then.get(name, absent)} then, {here.get(name, absent)} now"
        for name in names
        if name not in then or name not in here or then[name] != here[name]
    ]


def read_record(path: Path) -> dict[str, Any]:
    """The record in a result (``result.json``), or in the file that an unfinished evaluation has of it.

    Raises:
        ConfigError: the file is missing or holds none.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). The result.json of an evaluation is expected.") from None
    record = found.get("protocol", found) if isinstance(found, dict) else None
    needed = {"schema": int, "checkpoint": str, "decides": dict, "machine": dict, "config": dict}
    if not isinstance(record, dict) or any(not isinstance(record.get(key), kind) for key, kind in needed.items()):
        raise ConfigError(
            f"{path} does not say how its evaluation was done. The result.json of an evaluation is expected, which "
            "vlm-pg eval writes."
        )
    if record["schema"] != SCHEMA:
        raise ConfigError(
            f"{path} has a record of version {record['schema']}, and this program reads version {SCHEMA}. Use the "
            "version of vlm_pg that it names."
        )
    return record


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
