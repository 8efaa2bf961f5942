"""Whether a checkpoint is one of this run's model and settings: asked of small files, before anything is loaded.

Processes, engine, ZeRO stage, offloading and sequence ranks do not matter: optimizer states go by the weights' names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.errors import ModelError
from vlm_pg.models.loading import load_config
from vlm_pg.models.lora import adapter_base
from vlm_pg.models.settings import ModelSettings
from vlm_pg.training import checkpoints

# What a checkpoint was written under that does not say: there was no choice then.
UNSAID = {"model.positions": "transformers"}
_LISTED = 4
# Ids of tokens, limits that are none of the weights'.
_NO_SIZE = re.compile(r"_id$|^max_|^chunk_size")


def checkpoint_settings(config: RunConfig) -> dict[str, Any]:
    """Settings that decide what a checkpoint holds, and at which positions its weights were trained.

    Resuming under others would lose or invent optimizer state, or change the model's input in the middle of a run.
    """
    return {
        "model.dtype": config.model.dtype,
        "model.train": f"[{', '.join(config.model.train)}]",
        "model.positions": config.model.positions,
        "model.lora": None if config.model.lora is None else config.model.lora.model_dump(mode="json"),
        "run.seed": config.run.seed,
    }


def misfit(config: RunConfig, path: Path) -> str | None:
    """Why this run does not go on from the whole checkpoint in ``path``, in words; None if it can."""
    then, now = UNSAID | checkpoints.read_state(path)["settings"], checkpoint_settings(config)
    changed = ", ".join(f"{key}={now[key]} (it has {then.get(key)})" for key in now if now[key] != then.get(key))
    if changed:
        return (
            f"{path} cannot be continued with {changed}. Resume with the settings it was written under, or start a new "
            f"run with model.path={path}."
        )
    return _other_model(config.model, path)


def _other_model(settings: ModelSettings, path: Path) -> str | None:
    try:
        of_checkpoint = _dimensions(path, settings)
        of_run = _dimensions(settings.path, settings)
    except ModelError:  # said when it is loaded
        return None
    names = [name for name in of_run if of_run[name] != of_checkpoint.get(name)]
    names.sort(key=lambda name: (not name.endswith("model_type"), name))
    if not names:
        return None
    listed = ", ".join(f"{name} {of_checkpoint.get(name)} instead of {of_run[name]}" for name in names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (
        f"{path} is of another model than model.path={settings.path}: it has {listed}{more}. Set model.path to the "
        f"model it was trained from, or resume from a checkpoint of {settings.path}."
    )


def _dimensions(path: str | Path, settings: ModelSettings) -> dict[str, Any]:
    """What decides the number and the shapes of a model's weights, by dotted names of its configuration."""
    config = load_config(str(adapter_base(path) or path), settings)
    return dict(_whole_numbers(config.to_dict(), ""))


def _whole_numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and key != "label2id":
            yield from _whole_numbers(value, f"{prefix}{key}.")
        elif key in ("model_type", "tie_word_embeddings") or (type(value) is int and not _NO_SIZE.search(key)):
            yield f"{prefix}{key}", value
