"""Whether the records that a command reads are there, before it imports or loads anything that takes time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vlm_pg.data.records import refuse_no_records
from vlm_pg.errors import ConfigError

if TYPE_CHECKING:
    from vlm_pg.config import RunConfig


def check_training_data(config: RunConfig) -> None:
    """Of ``data.train``; see ``check_evaluation_data``."""
    for name, path in config.data.train_sets.items():
        _check(".".join(filter(None, ("data.train", name))), path)


def check_evaluation_data(config: RunConfig) -> None:
    """Of the sets of ``data.eval`` that are chosen.

    Raises:
        ConfigError: a file or split is missing, cannot be read at its beginning, or has no records.
    """
    for name in config.eval.chosen_sets(list(config.data.eval)):
        _check(f"data.eval.{name}", config.data.eval[name])


def _check(key: str, path: Path) -> None:
    try:
        refuse_no_records(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
