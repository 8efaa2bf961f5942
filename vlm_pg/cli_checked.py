"""``vlm-pg prepare NAME ... --check CONFIG``: what was prepared, looked at as a run's configuration would use it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_pg.errors import ConfigError

if TYPE_CHECKING:
    from vlm_pg.config import RunConfig

REPORT = "report.json"


@dataclass(frozen=True)
class Checked:
    """``config``: a run's YAML file. ``out``: the folder that is prepared; ``check`` in it gets the reports."""

    config: Path
    out: Path

    def check(self) -> bool:
        """Whether every prepared record can be used.

        Raises:
            ConfigError: the configuration, or the folder, is not what is expected.
            ModelError: the model's processor cannot be read.
        """
        from vlm_pg.check.command import check
        from vlm_pg.config import load_config

        return check(of_prepared(load_config(self.config), self.out), out=self.out / "check")


def split(argv: Sequence[str]) -> tuple[list[str], Checked | None]:
    """A pipeline's own arguments, and the check that is asked for beside them.

    Raises:
        ConfigError: a check of nothing.
    """
    parser = argparse.ArgumentParser(prog="vlm-pg prepare NAME", add_help=False, allow_abbrev=False)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--out", type=Path)
    known, rest = parser.parse_known_args(argv)
    if known.check is None:
        return list(argv), None
    if known.out is None:
        raise ConfigError("--check is given without --out. What is written there is checked. Give both.")
    if not known.check.is_file():  # said before hours of work, not after
        raise ConfigError(
            f"--check names '{known.check}', which is no file. A run's YAML file is expected. Correct it."
        )
    return [*rest, "--out", str(known.out)], Checked(known.check, known.out)


def of_prepared(config: RunConfig, out: Path) -> RunConfig:
    """The configuration of a run on a prepared folder: on all of it, whatever else the configuration names.

    Raises:
        ConfigError: the folder was not prepared from a published data set.
    """
    try:
        report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{out}' has no {REPORT}, so that it is not known what was prepared. --check goes with published sets "
            "and generic. Use vlm-pg check with this configuration and these records."
        ) from error
    sets = {name: _records(out, name) for name in ("train", "eval") if report[name]}
    root = Path(report["media_root"]) if "media_root" in report else None
    data = config.data.model_copy(
        update={
            "train": sets.get("train"),
            "eval": {"eval": sets["eval"]} if "eval" in sets else {},
            "media_root": root,
            "limit": None,
            "mixture": {},
        }
    )
    evaluation = config.eval.model_copy(update={"sets": None, "limit": None})
    return config.model_copy(update={"data": data, "eval": evaluation})


def _records(out: Path, name: str) -> Path:
    lines = out / f"{name}.jsonl"
    return lines if lines.is_file() else Path(f"{out}:{name}")
