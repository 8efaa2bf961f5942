"""The record of what an evaluation depended on, the folder that it is kept in, and comparison with a repetition.

protocol.json    the record, while an evaluation is unfinished
result.json      when it is finished: the figures, and the record under "protocol"
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from vlm_pg.config import RunConfig
from vlm_pg.data.digests import data_digests
from vlm_pg.errors import ConfigError
from vlm_pg.eval.answer_files import RESULT, answers_path, read_answers
from vlm_pg.eval.judging.judge import judge_record
from vlm_pg.eval.protocols.protocol import Protocol
from vlm_pg.eval.readers import own_sources
from vlm_pg.files import write_json_atomic
from vlm_pg.models.digests import numerics_digest, weights_digest
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.observe.run_folder import free_name
from vlm_pg.observe.run_lock import LOCK
from vlm_pg.observe.text import dotted
from vlm_pg.rollout.engine import stop_token_ids
from vlm_pg.versions import versions

SCHEMA = 1
PROTOCOL = "protocol.json"
# A checkpoint lies at RUN/checkpoints/NAME; weights may lie one folder below that.
_MAX_PARENTS = 3
_MAX_DIFFERENCES, _MAX_LINES = 6, 12
_SECTIONS = ("media", "prompt", "rollout", "reward", "eval")
# Of ``rollout``, in sampling as in training.
_NOT_SAMPLING = (
    *("server", "logprobs", "mismatch_every", "keep_forward_gb", "staleness", "in_flight", "gather", "split"),
    "divide_prefix",
)
# Settings by section that change how something is computed or where it is written, and not the answers.
_NOT_DECIDING = {
    "media": ("workers", "deadline_seconds", "worker_memory_bytes", "remote_timeout_seconds", "max_remote_bytes"),
    "rollout": ("server", "logprobs", "mismatch_every", "num_generations", "temperature", "top_p", "top_k"),
    "eval": (
        *("before", "after", "every", "headline_set", "sets", "resume", "thumbnails", "lmms_samples", "protocols"),
        "judge",
    ),
}


def protocol_record(
    config: RunConfig, checkpoint: Path, policy: Policy | WeightlessPolicy, server: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that determines an evaluation's answers and scores, as JSON has it.

    ``decides``: with equal values two evaluations give the same answers, bit for bit where ``machine`` is equal too.
    ``checkpoint`` and ``config``: to repeat it (``vlm-pg eval --like``).

    Args:
        policy: without weights where a server answers.
        server: what is known of that server; its weights and dtype are unknown, and null.
    """
    chosen = config.eval.chosen_sets(list(config.data.eval))
    records = {key: entry["sha256"] for key, entry in data_digests(config.data).items()}
    protocols = {name: protocol for name in chosen if (protocol := config.eval.protocol_of(name)) is not None}
    decides = {
        "media_roots": {name: str(config.data.root_for(config.data.eval[name], name)) for name in chosen},
        "records": {name: records.get(f"data.eval.{name}") for name in chosen},
        "settings": _settings(config, _NOT_DECIDING, _SECTIONS),
        "protocols": {name: protocol.model_dump(mode="json") for name, protocol in protocols.items()},
        **own_functions(protocols.values()),
    }
    # The judge stands beside the figures of the rules, which it does not change.
    return _record(config, checkpoint, policy, server, decides) | {"judge": judge_record(config.eval.judge)}


def sampling_record(
    config: RunConfig, policy: Policy | WeightlessPolicy, server: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """As ``protocol_record``, of rollouts of the training records (``vlm-pg sample``)."""
    data = config.data.model_copy(update={"eval": {}, "difficulty": None})
    decides = {
        "media_roots": {name or "train": str(data.root_for(path, name)) for name, path in data.train_sets.items()},
        "records": {key: entry["sha256"] for key, entry in data_digests(data).items()},
        "data": {"limit": data.limit, "left_out": sorted(data.weightless)},
        "settings": _settings(config, _NOT_DECIDING | {"rollout": _NOT_SAMPLING}, _SECTIONS[:-1]),
    }
    return _record(config, Path(config.model.path), policy, server, decides)


def _settings(config: RunConfig, left_out: Mapping[str, Sequence[str]], sections: Sequence[str]) -> dict[str, Any]:
    whole = config.model_dump(mode="json")
    return {
        section: {key: value for key, value in whole[section].items() if key not in left_out.get(section, ())}
        for section in sections
    }


def _record(
    config: RunConfig,
    checkpoint: Path,
    policy: Policy | WeightlessPolicy,
    server: Mapping[str, Any] | None,
    decides: Mapping[str, Any],
) -> dict[str, Any]:
    """The record of ``decides`` and of all that the answers of a model depend on beside questions and settings."""
    template = getattr(policy.processor, "chat_template", None)
    weights: dict[str, Any] = dict.fromkeys(("weights", "dtype", "share_prefix"))
    machine: dict[str, Any] = {"device": "a server's", "url": config.rollout.server.url}
    if not isinstance(policy, WeightlessPolicy):
        weights["weights"] = weights_digest(policy.model)
        weights |= {"dtype": config.model.dtype, "share_prefix": config.model.share_prefix}
        machine = {
            "device": torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else "cpu",
            "attention_kernel": policy.kernel.name,
            "threads": torch.get_num_threads(),
            "numerics": numerics_digest(policy.device),
        }
    return {
        "schema": SCHEMA,
        "checkpoint": str(checkpoint),
        "decides": {
            **weights,
            **({} if server is None else {"server": server}),
            "positions": config.model.positions,
            "chat_template": hashlib.sha256(str(template).encode()).hexdigest(),
            "processor": _processor_digest(policy.processor),
            "end_tokens": sorted(stop_token_ids(policy)),
            "allow_remote": config.data.allow_remote,
            **decides,
            "seed": config.run.seed,
            "versions": versions(),
        },
        "machine": machine,
        "config": config.model_dump(mode="json"),
    }


def own_functions(protocols: Iterable[Protocol]) -> dict[str, dict[str, str]]:
    """Under "functions" digests of the user's own readers and aggregations; nothing without any."""
    sources = own_sources(name for protocol in protocols for name in (protocol.reader, protocol.aggregation))
    return {"functions": sources} if sources else {}


def _processor_digest(processor: Any) -> str:
    """Of the conversion of images to patches, and of the vocabulary; paths are left out."""
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
    """A line for each value of two parts of records (``decides``, ``machine``) that differs or is in one alone:
    "settings.media.fps: 2.0 then, 4.0 now".
    """
    then, here = dict(dotted(before)), dict(dotted(now))
    return [
        f"{name}: {then.get(name, 'nothing')} then, {here.get(name, 'nothing')} now"
        for name in dict.fromkeys([*then, *here])
        if name not in then or name not in here or then[name] != here[name]
    ]


def read_record(path: Path) -> dict[str, Any]:
    """The record in ``result.json``, or in the ``protocol.json`` of an unfinished evaluation.

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


def run_above(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in; None: it lies in none."""
    # The path as it was given first, so that messages name the folder as the user does.
    for parent in [*list(checkpoint.parents)[:_MAX_PARENTS], *list(checkpoint.resolve().parents)[:_MAX_PARENTS]]:
        if (parent / "config.yaml").is_file() and (parent / "checkpoints").is_dir():
            return parent
    return None


@dataclass(frozen=True)
class ResultKind:
    """What a folder holds. ``result``: the file of a finished one. ``begun``: pattern of files of an unfinished one.
    ``advice``: how to start anew."""

    name: str
    result: str
    begun: str
    advice: str


EVALUATION = ResultKind("evaluation", RESULT, "answers_*", "set eval.resume=never, which moves it aside")


def prepare_folder(
    folder: Path,
    record: dict[str, Any],
    resume: Literal["auto", "never"],
    announce: Callable[[str], None],
    kind: ResultKind = EVALUATION,
) -> list[dict[str, Any]]:
    """Prepare a locked folder for an evaluation with this record, and write the record there.

    A finished evaluation in it is moved aside, an unfinished one of the same protocol resumed.

    Returns:
        The machines on which the resumed evaluation ran before.

    Raises:
        ConfigError: an unfinished evaluation had another protocol.
    """
    before = _resumed(folder, record, resume, kind)
    machines: list[dict[str, Any]] = []
    if before is None:
        if entries := [entry for entry in folder.iterdir() if entry.name != LOCK]:
            move_aside(folder, entries, announce, kind.name)
    else:
        for line in differences(before["machine"], record["machine"]):
            announce(f"answers so far were given on another machine, which may round otherwise: {line}")
        for machine in (*before.get("machines_before", []), before["machine"]):
            if machine != record["machine"] and machine not in machines:
                machines.append(machine)
    write_json_atomic(folder / PROTOCOL, record | {"machines_before": machines})
    return machines


def move_aside(
    folder: Path, entries: Iterable[Path], announce: Callable[[str], None], what: str = "evaluation"
) -> None:
    """Move the files of an earlier evaluation in ``folder`` to a folder of its own beside it, and announce it."""
    aside = free_name(folder, datetime.now().strftime("%Y%m%d-%H%M%S"))
    aside.mkdir()
    for entry in sorted(entries):
        entry.rename(aside / entry.name)
    announce(f"{folder} holds an earlier {what}: moved it to {aside}")


def _resumed(
    folder: Path, record: dict[str, Any], resume: Literal["auto", "never"], kind: ResultKind
) -> dict[str, Any] | None:
    """The record of the unfinished evaluation to resume; None: there is none."""
    if resume == "never" or not (folder / PROTOCOL).exists() or (folder / kind.result).exists():
        return None
    if not any(folder.glob(kind.begun)):  # refused or killed before the first answer
        for name in (PROTOCOL, "bad_samples.jsonl"):
            (folder / name).unlink(missing_ok=True)
        return None
    before = read_record(folder / PROTOCOL)
    found = differences(before["decides"], record["decides"])
    if not found:
        return before
    shown = "; ".join(found[:_MAX_DIFFERENCES])
    further = f" and {len(found) - _MAX_DIFFERENCES} more" if len(found) > _MAX_DIFFERENCES else ""
    raise ConfigError(
        f"{folder} holds an unfinished {kind.name} with another protocol: {shown}{further}. "
        f"Answers under different protocols are not put together. Repeat it as it was, or {kind.advice}."
    )


def compare_results(before: Path, now: Path) -> tuple[bool, list[str]]:
    """Compare two results (``result.json``) of the same sets, their answers beside them.

    Returns:
        Whether all figures and answers are equal, and lines about each set and what else differs.

    Raises:
        ConfigError: one of them is no result, or both are the same file.
    """
    if before.resolve() == now.resolve():
        raise ConfigError(f"{before} would be compared with itself. Two results are expected. Give another one.")
    then, here = read_record(before), read_record(now)
    lines = []
    if served := [one for one, record in (("earlier", then), ("later", here)) if "server" in record["decides"]]:
        lines.append(
            f"not known to be equal: weights and program of the server that gave the {' and the '.join(served)} answers"
        )
    for what in ("decides", "machine"):
        found = differences(then[what], here[what])
        lines += [f"not made equal: {line}" for line in found[:_MAX_LINES]]
        if len(found) > _MAX_LINES:
            lines.append(f"not made equal: {len(found) - _MAX_LINES} more values")
    figures = [json.loads(path.read_text("utf-8"))["sets"] for path in (before, now)]
    is_equal = True
    for name in dict.fromkeys([*figures[0], *figures[1]]):
        is_set_equal, line = _compare_set(name, before, now, figures)
        is_equal = is_equal and is_set_equal
        lines.append(line)
    return is_equal, lines


def _compare_set(name: str, before: Path, now: Path, figures: list[dict[str, Any]]) -> tuple[bool, str]:
    if name not in figures[0] or name not in figures[1]:
        return False, f"{name}: only in the {'earlier' if name in figures[0] else 'later'} result"
    scores = [one[name]["accuracy"] for one in figures]
    shown = " and ".join("none" if score is None else f"{score:.4f}" for score in scores)
    paths = [answers_path(path.parent, name) for path in (before, now)]
    if not all(path.is_file() for path in paths):
        return scores[0] == scores[1], f"{name}: accuracy {shown}; the answers do not lie beside both results"
    answers = [{one.sample_id: one for one in read_answers(path)} for path in paths]
    same = sum(answers[1].get(key) == one for key, one in answers[0].items())
    total = len(answers[0].keys() | answers[1].keys())
    return same == total and scores[0] == scores[1], f"{name}: accuracy {shown}; {same} of {total} questions equal"
