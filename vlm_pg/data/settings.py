"""What the user can choose about records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vlm_pg.data.files import root_of
from vlm_pg.settings import Settings

# It begins its samples' ids, and is part of dotted keys.
_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def _one_or_named(value: Any) -> Any:
    """One message: a union's own faults name both of its types."""
    if isinstance(value, Mapping):
        wrong = [
            name
            for name, path in value.items()
            if not (isinstance(name, str) and _SET_NAME.fullmatch(name) and isinstance(path, str | Path))
        ]
    else:
        wrong = [] if value is None or isinstance(value, str | Path) else [value]
    if wrong:
        raise ValueError(
            f"not right is {wrong[0]!r}: one path is expected, or several by name (letters, digits, _ and -), as in "
            "{star: data/star:train, math: data/math:train}"
        )
    return value


OneOrNamed = Annotated[Path | dict[str, Path] | None, BeforeValidator(_one_or_named)]


class DifficultySettings(Settings):
    """Training on records that a model answers neither always nor never."""

    file: Path = Field(description="samples.jsonl of vlm-pg sample, or its folder.")
    low: float = Field(0.0, ge=0, le=1, description="Least share of right responses (p_correct) of a record.")
    high: float = Field(1.0, ge=0, le=1, description="Largest share of right responses (p_correct) of a record.")
    missing: Literal["refuse", "keep", "drop"] = Field(
        "refuse", description="Training records without a row in the file: an error, trained on, or left out."
    )

    def impossible(self) -> list[str]:
        """See ``Settings.impossible``."""
        if self.low <= self.high:
            return []
        return [
            f"data.difficulty.low is {self.low:g}, above data.difficulty.high={self.high:g}, so that no record is in "
            "between. Exchange them."
        ]


class DataSettings(Settings):
    """Which records are used and how many of them may be unusable."""

    train: OneOrNamed = Field(
        None,
        description="Training records: a file (.json, .jsonl or .parquet), or a folder of Parquet shards or saved by "
        "Hugging Face datasets (FOLDER or FOLDER:split). Or several sets: name -> records.",
    )
    eval: dict[str, Path] = Field(
        default_factory=dict, description="Evaluation sets: name -> records, in the same formats."
    )
    media_root: OneOrNamed = Field(
        None,
        description="Folder to which media paths are relative and which they must not leave; default: the folder of "
        "the records. Or one folder per set: name of a set in data.train or data.eval -> folder.",
    )
    max_bad_share: float = Field(
        0.5, ge=0, le=1, description="The run stops if more than this share of the samples seen so far was unusable."
    )
    min_seen_for_bad_share: int = Field(
        20, ge=1, description="data.max_bad_share is enforced only after this many samples."
    )
    allow_remote: bool = Field(False, description="Download media from http and https URLs.")
    shuffle: bool = Field(
        True, description="Shuffle the records in every epoch, in an order derived from the run's seed."
    )
    media_together: bool | None = Field(
        None,
        description="Questions on the same images or videos follow each other, so that a step encodes these once. "
        "Media and the questions of each come in random order. Default: with training.objective sft and dpo.",
    )
    mixture: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="Sampling weight of each source of the training records (their data_source); empty: all records "
        "are equally frequent. A source with weight 0 is left out. With several sets, each set is a source.",
    )
    limit: int | None = Field(None, ge=1, description="Use only the first N usable training records (of each set).")
    difficulty: DifficultySettings | None = Field(
        None,
        description="Train only on records whose share of right responses in vlm-pg sample is within bounds. It "
        "applies after data.limit; records without a value (none could be scored) are left out.",
    )
    prompt_cache_mb: int = Field(
        512,
        ge=0,
        description="Memory in MiB for prepared training prompts, including pixels, which later epochs then need not "
        "decode again.",
    )

    @property
    def train_sets(self) -> dict[str, Path]:
        """The sets of training records by name, in alphabetical order; a single one has the name ""."""
        if isinstance(self.train, dict):
            return dict(sorted(self.train.items()))
        return {} if self.train is None else {"": self.train}

    @property
    def weightless(self) -> frozenset[str]:
        """The names in ``data.mixture`` that are left out: of sets where there are several, else of sources."""
        return frozenset(name for name, weight in self.mixture.items() if not weight)

    @property
    def used_sets(self) -> dict[str, Path]:
        """``train_sets`` without those that ``data.mixture`` leaves out."""
        # A single path has the name "", and its sources are no sets.
        return {name: path for name, path in self.train_sets.items() if not name or name not in self.weightless}

    def left_out(self) -> list[str]:
        """Lines about training records that no step uses, for commands that prepare what a run will use."""
        names = ", ".join(sorted(self.weightless))
        what = "sets" if isinstance(self.train, dict) else "sources"
        lines = [f"data.mixture: left out are the {what} {names}, whose weight is 0"] if names and self.train else []
        if self.limit is not None and self.train:
            of_each = " of each set" if len(self.train_sets) > 1 else ""
            lines.append(f"data.limit: only the first {self.limit:,} usable training records{of_each} are asked for")
        if self.difficulty is not None and self.train:
            lines.append("data.difficulty: it chooses records in training alone, and does not count here")
        return lines

    @property
    def train_shown(self) -> str:
        """The sets of training records, for messages."""
        return ", ".join(str(path) for path in self.train_sets.values())

    def root_for(self, records: Path, name: str = "") -> Path:
        """The folder the media paths of a set's records start from."""
        if isinstance(self.media_root, dict):
            return self.media_root.get(name, root_of(records))
        return self.media_root if self.media_root is not None else root_of(records)

    def impossible(self) -> list[str]:
        """See ``Settings.impossible``."""
        known = {*self.train_sets, *self.eval} - {""}
        found = [] if self.difficulty is None else self.difficulty.impossible()
        if self.train == {}:
            found.append("data.train is empty. A path, or the name of one set at least, is expected. Add one.")
        if isinstance(self.media_root, dict) and (unknown := sorted(set(self.media_root) - known)):
            found.append(
                f"data.media_root names {', '.join(map(repr, unknown))}, which is no set of data.train or data.eval"
                + (f"; those are {', '.join(map(repr, sorted(known)))}" if known else ", whose sets have no names")
                + ". Correct the name, or give one folder for all."
            )
        return found
