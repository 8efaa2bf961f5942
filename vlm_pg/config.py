"""One run's configuration: the sections of all packages, read from YAML.

A config file is a YAML mapping of sections. ``include: [base.yaml]`` names files, relative to the file that includes
them, which are merged first, in order; then the file itself; then ``key=value`` overrides with dotted keys, their
values read as YAML. Mappings merge key by key; anything else replaces what was there.

Relative paths *inside* sections (data, model, run folder, DeepSpeed file) are relative to the current directory, which
is the repository's root for the shipped configs and scripts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.config_checks import (
    algorithm_faults,
    budget_faults,
    evaluation_faults,
    generation_faults,
    weight_faults,
)
from vlm_pg.config_errors import describe
from vlm_pg.config_files import COMMAND_LINE, ConfigTree, apply_override, read_tree
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError
from vlm_pg.eval.settings import EvalSettings
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.settings import ModelSettings
from vlm_pg.observe.settings import ObserveSettings
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.settings import Settings
from vlm_pg.training.settings import LORA_LEARNING_RATE, TrainingSettings


class RunSettings(Settings):
    """What this run is called, where it lies, and how it starts."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run and of its folder."
    )
    dir: str = Field(default="", description="Folder of everything the run writes; empty means runs/<name>.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="All random numbers of the run derive from it.")
    resume: str = Field(
        default="never",
        description="never: start anew (an earlier run's folder is moved aside). auto: go on from the newest "
        "checkpoint of the run's folder, if there is one. Anything else: the checkpoint folder to go on from.",
    )

    @field_validator("resume")
    @classmethod
    def _resume_is_not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("resume is empty; it must be never, auto or a checkpoint folder. Leave it out for never.")
        return value

    @model_validator(mode="before")
    @classmethod
    def _default_dir(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("dir"):
            return values | {"dir": f"runs/{values.get('name', 'run')}"}
        return values


class RunConfig(Settings):
    """Everything one run depends on. Each section is documented beside the code it configures."""

    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings
    data: DataSettings
    media: MediaSettings = Field(default_factory=MediaSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    prompt: PromptSettings = Field(default_factory=PromptSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    training: TrainingSettings
    eval: EvalSettings = Field(default_factory=EvalSettings)
    observe: ObserveSettings = Field(default_factory=ObserveSettings)

    @field_validator("training")
    @classmethod
    def _default_learning_rate(cls, training: TrainingSettings, info: ValidationInfo) -> TrainingSettings:
        model: ModelSettings | None = info.data.get("model")  # None: it has faults of its own
        if model is None or model.lora is None or "learning_rate" in training.model_fields_set:
            return training
        return training.model_copy(update={"learning_rate": LORA_LEARNING_RATE})

    @model_validator(mode="after")
    def _combinations_are_possible(self) -> Self:
        sections: list[Settings] = [getattr(self, name) for name in type(self).model_fields]
        problems = [problem for section in sections for problem in section.impossible()]
        problems += generation_faults(self.rollout, self.training, self.model)
        problems += budget_faults(self.prompt, self.rollout, self.training)
        problems += evaluation_faults(self.eval, self.data, self.training)
        problems += weight_faults(self.model, self.training, self.cache)
        problems += algorithm_faults(self.algorithm, self.rollout, self.training)
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in ``path``, with its includes, and with ``key=value`` overrides on top.

    Raises:
        ConfigError: a file that is missing or no YAML mapping, an unknown key (with the nearest valid name), a value
            out of range, a missing value, or a combination that cannot be run. All faults of a kind are named at once.
    """
    return _overridden(read_tree(Path(path)), overrides, Path(path))


def config_of(values: Mapping[str, Any], path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a file (``path``) has written down whole among other things.

    Raises:
        ConfigError: as ``load_config``.
    """
    tree = ConfigTree()
    tree.merge(values, str(path))
    return _overridden(tree, overrides, path)


def _overridden(tree: ConfigTree, overrides: Sequence[str], path: Path) -> RunConfig:
    for override in overrides:
        apply_override(tree, override)
    return _validate(tree, path)


def dump_config(config: RunConfig) -> str:
    """``config`` as YAML, every value written out; ``load_config`` of that text gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _validate(tree: ConfigTree, path: Path) -> RunConfig:
    values = dict(tree.values)
    for section in RunConfig.model_fields:
        # A section that is absent or left empty ("eval:") has its defaults, and is asked for what has none.
        if values.get(section) is None:
            values[section] = {}
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = describe(error, RunConfig, tree.sources, default_source=str(path))
        hint = f" (with overrides from the {COMMAND_LINE})" if COMMAND_LINE in tree.sources.values() else ""
        raise ConfigError(f"The configuration {path}{hint} cannot be run:\n  " + "\n  ".join(lines)) from None
