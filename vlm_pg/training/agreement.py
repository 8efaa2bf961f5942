"""Ranks that were started differently, with other settings or other code, are refused before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import vlm_pg
from vlm_pg.config import RunConfig
from vlm_pg.distributed import gather_objects
from vlm_pg.errors import ConfigError, printable
from vlm_pg.versions import versions

# Settings that may differ between hosts, with all keys inside; of the DeepSpeed file the content counts.
OF_A_HOST = frozenset(
    ("data.media_root", "media.workers", "rollout.server.url", "training.torch_threads", "training.deepspeed_config")
)
SHOWN, VALUE_CHARACTERS = 12, 120
NOT_SET, UNREADABLE = "not set", "not readable"


def refuse_differences(config: RunConfig) -> None:
    """A collective: all ranks raise, or none.

    Raises:
        ConfigError: settings, versions, vlm_pg's sources or user code differ between ranks.
    """
    facts = run_facts(config)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    if len(set(gather_objects(digest))) == 1:
        return
    everywhere = gather_objects((socket.gethostname(), facts))
    hosts, of_ranks = [host for host, _ in everywhere], [facts for _, facts in everywhere]
    raise ConfigError(
        "The processes of this run were not started alike:\n  "
        + "\n  ".join(differences(hosts, of_ranks))
        + "\nAll of them need the same settings and versions. Start them with one configuration, and install the same "
        "packages everywhere."
    )


def run_facts(config: RunConfig) -> dict[str, str]:
    """Everything that must be the same on all ranks, by name."""
    facts = {f"version of {name}": found for name, found in versions().items()}
    sources, folder = hashlib.sha256(), Path(vlm_pg.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        sources.update(f"{path.relative_to(folder)}\0{_digest_of_file(path)}\0".encode())
    facts["source files of vlm_pg"] = sources.hexdigest()[:16]
    settings = dict(_flat(config.model_dump(mode="json")))
    for key, value in settings.items():
        if not any(key == own or key.startswith(f"{own}.") for own in OF_A_HOST):
            facts[key] = json.dumps(value)
    if config.training.deepspeed_config is not None:
        facts |= _deepspeed_facts(Path(config.training.deepspeed_config))
    functions = [config.algorithm.loss, config.algorithm.advantages, *(one.function for one in config.reward.functions)]
    for name in functions:
        file = name.rpartition(":")[0]
        if file.endswith(".py"):
            facts[f"content of {file}"] = _digest_of_file(Path(file).expanduser())
    return facts


def differences(hosts: Sequence[str], of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each name with differing values, with the ranks of each value.

    Args:
        hosts: of each rank.
        of_ranks: ``run_facts`` of each rank.
    """
    lines = []
    for name in sorted(set().union(*of_ranks)):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(of_ranks):
            ranks_by_value.setdefault(facts.get(name, NOT_SET), []).append(rank)
        if len(ranks_by_value) > 1:
            values = [f"{printable(v, VALUE_CHARACTERS)} on {_named(r, hosts)}" for v, r in ranks_by_value.items()]
            lines.append(f"{name}: {', '.join(values)}")
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """As "ranks 0 to 7 and 12 (node-1, node-2)"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    of_hosts = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(spans)} ({printable(of_hosts, VALUE_CHARACTERS)})"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _deepspeed_facts(path: Path) -> dict[str, str]:
    """The file's content, by key; each rank reports a faulty file later."""
    name = "training.deepspeed_config"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return {name: UNREADABLE}
    return {f"{name}, {key}": json.dumps(value) for key, value in _flat(content)}


def _digest_of_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return UNREADABLE
