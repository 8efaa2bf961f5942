"""One run's configuration: the sections of all packages, read from YAML.

A config file is a YAML mapping of sections. ``include: [base.yaml]`` names files, relative to the file that includes
them, which are merged first, in order; then the file itself; then ``key=value`` overrides with dotted keys, their
values read as YAML. Mappings merge key by key; anything else replaces what was there.

Relative paths *inside* sections (data, model, run folder, DeepSpeed file) are relative to the current directory, which
is the repository's root for the shipped configs and scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from vlm_pg.algorithms.pruning import num_kept
from vlm_pg.algorithms.settings import AlgorithmSettings, DistillationSettings, PreferenceSettings
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.config_files import COMMAND_LINE, ConfigTree, apply_override, describe, read_tree
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
    """Name and folder of the run, its seed, and how it starts."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run and of its folder."
    )
    dir: str = Field(default="", description="Folder for everything the run writes; empty: runs/NAME.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="All random numbers of the run are derived from it.")
    resume: str = Field(
        default="never",
        description="never: start a new run (the folder of an earlier run is moved aside). auto: resume from the "
        "newest checkpoint in the run's folder, if there is one. Anything else: the checkpoint folder to resume from.",
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
    """Everything a run depends on. Each section is documented beside the code it configures."""

    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings
    data: DataSettings
    media: MediaSettings = Field(default_factory=MediaSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    prompt: PromptSettings = Field(default_factory=PromptSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    preference: PreferenceSettings = Field(default_factory=PreferenceSettings)
    distillation: DistillationSettings = Field(default_factory=DistillationSettings)
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
        problems += _generation_faults(self.prompt, self.rollout, self.training, self.model)
        problems += _evaluation_faults(self.eval, self.data, self.training)
        problems += _weight_faults(self.model, self.training, self.cache)
        problems += _algorithm_faults(self.algorithm, self.rollout, self.training)
        problems += _objective_faults(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in ``path``, with its includes, and with ``key=value`` overrides on top.

    Raises:
        ConfigError: a file that is missing or no YAML mapping, an unknown key (with the nearest valid name), a value
            out of range, a missing value, or a combination that cannot be run. All faults of a kind are named at once.
    """
    return _validated(read_tree(Path(path)), overrides, Path(path))


def load_sampling_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """As ``load_config``, of a run that only samples: other objectives refuse settings of rollouts."""
    tree = read_tree(Path(path))
    for override in [*overrides, "training.objective=rl"]:
        apply_override(tree, override)
    for section in ("preference", "distillation"):
        tree.values.pop(section, None)
    return _validated(tree, (), Path(path))


def config_of(values: Mapping[str, Any], path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a file (``path``) contains in full. Raises ConfigError: as ``load_config``."""
    tree = ConfigTree()
    tree.merge(values, str(path))
    return _validated(tree, overrides, path)


def dump_config(config: RunConfig) -> str:
    """``config`` as YAML, every value written out; ``load_config`` of that text gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _validated(tree: ConfigTree, overrides: Sequence[str], path: Path) -> RunConfig:
    for override in overrides:
        apply_override(tree, override)
    values = dict(tree.values)
    for section in RunConfig.model_fields:
        # An absent or empty section ("eval:") has its defaults, and errors for required settings.
        if values.get(section) is None:
            values[section] = {}
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = describe(error, RunConfig, tree.sources, default_source=str(path))
        hint = f" (with overrides from the {COMMAND_LINE})" if COMMAND_LINE in tree.sources.values() else ""
        raise ConfigError(f"The configuration {path}{hint} cannot be run:\n  " + "\n  ".join(lines)) from None


# Combinations of settings of several sections that are impossible; those of one section: ``Settings.impossible``.
# Each function returns one message per fault.


def _found(checks: Iterable[tuple[bool, str]]) -> list[str]:
    return [message for impossible, message in checks if impossible]


def _generation_faults(
    prompt: PromptSettings, rollout: RolloutSettings, training: TrainingSettings, model: ModelSettings
) -> list[str]:
    """Generation shared by the ranks of a sequence-parallel group; lengths within the token budget."""
    longest = prompt.max_prompt_tokens + rollout.max_new_tokens
    ranks, divides = training.sequence_parallel, rollout.divide_prefix == "always"
    checks = (
        (
            rollout.split == "prompts" and (ranks == 1 or rollout.engine == "server" or not model.share_prefix),
            "rollout.split is prompts, which is for training.sequence_parallel above 1 with rollout.engine=in_process "
            "and model.share_prefix=true. Set rollout.split=auto.",
        ),
        (
            divides and (ranks == 1 or rollout.engine == "server" or not model.share_prefix),
            "rollout.divide_prefix is always, which is for training.sequence_parallel above 1 with "
            "rollout.engine=in_process and model.share_prefix=true. Set rollout.divide_prefix=auto.",
        ),
        (
            divides and (rollout.split == "questions" or rollout.gather == "layers"),
            "rollout.divide_prefix is always, so that processes sample every question together, but rollout.split is "
            f"{rollout.split} and rollout.gather is {rollout.gather}. Set rollout.split=auto and rollout.gather=all, "
            "or rollout.divide_prefix=auto.",
        ),
        (
            divides and rollout.num_generations < ranks,
            f"rollout.divide_prefix is always with training.sequence_parallel={ranks}, but there are only "
            f"{rollout.num_generations} rollouts of a question to share. Set rollout.num_generations={ranks} or more, "
            "or rollout.divide_prefix=auto.",
        ),
        (
            rollout.split == "prompts" and rollout.num_generations < ranks,
            f"rollout.split is prompts with training.sequence_parallel={ranks}, but there are only "
            f"{rollout.num_generations} rollouts of a question to share. Set rollout.num_generations={ranks} or more, "
            "or rollout.split=questions.",
        ),
        (
            rollout.split == "prompts" and rollout.gather == "layers",
            "rollout.split is prompts and rollout.gather is layers: a process that waits for another one's prompt "
            "would hold up its weights. Set rollout.split=questions or rollout.gather=all.",
        ),
        (
            training.micro_batch_tokens < longest,
            f"training.micro_batch_tokens is {training.micro_batch_tokens}, but one prompt "
            f"(prompt.max_prompt_tokens={prompt.max_prompt_tokens}) with one response "
            f"(rollout.max_new_tokens={rollout.max_new_tokens}) may need {longest}. "
            f"Set training.micro_batch_tokens={longest} or more, or lower the other two.",
        ),
    )
    return _found(checks)


def _weight_faults(model: ModelSettings, training: TrainingSettings, cache: CacheSettings) -> list[str]:
    """Trained parts, their learning rates, and cached features."""
    checks = (
        *(
            (
                part not in model.train,
                f"training.learning_rates.{part} is {rate}, but model.train is [{', '.join(model.train)}], so "
                f"that part is frozen and has no rate. Add {part} to model.train, or leave its rate out.",
            )
            for part, rate in training.learning_rates.items()
        ),
        (
            bool(cache.features) and model.trains_vision,
            f"cache.features is true and model.train is [{', '.join(model.train)}], so that visual features "
            "change with every update and none could be used again. Set cache.features=false or leave it out, or leave "
            "tower and merger out of model.train.",
        ),
        (
            bool(cache.features) and not model.share_prefix,
            "cache.features is true and model.share_prefix is false, where everything is computed anew for comparison. "
            "Set cache.features=false or leave it out, or model.share_prefix=true.",
        ),
    )
    return _found(checks)


def _evaluation_faults(evaluation: EvalSettings, data: DataSettings, training: TrainingSettings) -> list[str]:
    """Evaluation sets and their schedule."""
    checks = (
        (
            bool(evaluation.every) and not evaluation.chosen_sets(list(data.eval)),
            f"eval.every is {evaluation.every} and there is no evaluation set to run. Name sets in data.eval, or set "
            "eval.every=0.",
        ),
        (
            training.keep_best == "eval/accuracy"
            and (
                not evaluation.every
                or training.checkpoint_every % evaluation.every != 0
                or training.steps % evaluation.every != 0
            ),
            f"training.keep_best is eval/accuracy, with eval.every={evaluation.every}, "
            f"training.checkpoint_every={training.checkpoint_every} and training.steps={training.steps}: "
            "every checkpoint needs an accuracy of its own, the last one too. Set eval.every so that it divides both.",
        ),
        (
            evaluation.sets == () and bool(data.eval),
            "eval.sets is empty, so that nothing would be evaluated. Name sets of data.eval in it, or set it to null "
            "for all; without evaluation, eval.before=false and eval.after=false.",
        ),
    )
    named = [("eval.sets", name) for name in evaluation.sets or ()]
    named += [("eval.control_sets", name) for name in evaluation.control_sets or ()]
    named += [("eval.protocols", name) for name in evaluation.protocols]
    if evaluation.headline_set is not None:
        named.append(("eval.headline_set", evaluation.headline_set))
    known = ", ".join(data.eval) or "none"
    return _found(checks) + [
        f"{key} names {name!r}, which is not an evaluation set. Sets in data.eval: {known}. "
        f"Add data.eval.{name}=PATH or change {key}."
        for key, name in named
        if name not in data.eval
    ]


def _algorithm_faults(algorithm: AlgorithmSettings, rollout: RolloutSettings, training: TrainingSettings) -> list[str]:
    """The algorithm with rollout and training settings."""
    if training.objective != "rl":
        return []
    checks = (
        (
            rollout.num_generations < 2 and algorithm.baseline != "none" and not algorithm.own_advantages,
            f"rollout.num_generations is {rollout.num_generations}, and algorithm.baseline="
            f"{algorithm.baseline} compares the rollouts of a group, so at least 2 are needed. Set "
            "rollout.num_generations=2 or more, or algorithm.preset=reinforce_pp.",
        ),
        (
            algorithm.importance_cap is not None and rollout.logprobs != "recompute",
            f"algorithm.importance_cap is {algorithm.importance_cap} and rollout.logprobs is {rollout.logprobs}, so "
            "that both log-probabilities it compares are the same ones. Set rollout.logprobs=recompute.",
        ),
        (
            rollout.staleness > 0 and rollout.logprobs == "recompute" and algorithm.importance_cap is None,
            f"rollout.staleness is {rollout.staleness} and rollout.logprobs is recompute, which takes the ratio to the "
            "weights before the update and not to those that sampled. Set algorithm.importance_cap=2, which corrects "
            "for the difference, or rollout.logprobs=reuse.",
        ),
        (
            rollout.staleness > 0
            and (algorithm.resample_rounds > 0 or (algorithm.prune_rate > 0 and algorithm.prune_fill)),
            f"rollout.staleness is {rollout.staleness}, and algorithm.resample_rounds or prune_fill takes further "
            "questions once the rewards of a step are known, while the next steps are sampled already. Set "
            "rollout.staleness=0, or algorithm.resample_rounds=0 and algorithm.prune_fill=false.",
        ),
        (
            algorithm.length_bonus > 0 and algorithm.length_bonus_tokens[0] > rollout.max_new_tokens,
            f"algorithm.length_bonus goes to responses of {algorithm.length_bonus_tokens[0]} tokens and more, and "
            f"rollout.max_new_tokens is {rollout.max_new_tokens}, so no response can earn it. Set "
            "algorithm.length_bonus_tokens to shorter ones, or algorithm.length_bonus=0.",
        ),
        (
            algorithm.resample_rounds > 0 and rollout.num_generations < 2,
            "algorithm.resample_rounds replaces groups whose rewards are all equal, and rollout.num_generations is 1: "
            "one reward always is. Set algorithm.resample_rounds=0.",
        ),
        (
            algorithm.minibatches > training.prompts_per_step,
            f"algorithm.minibatches is {algorithm.minibatches}, more than training.prompts_per_step="
            f"{training.prompts_per_step}. Set it to that or less.",
        ),
    )
    problems = _found(checks)
    if algorithm.prune_rate > 0:
        try:
            num_kept(rollout.num_generations, algorithm.prune_rate)
        except ValueError as error:
            problems.append(f"algorithm.prune_rate with rollout.num_generations: {error}")
    return problems


# Settings of rollouts that evaluation does not read.
_OF_ROLLOUTS = ("engine", "num_generations", "temperature", "logprobs", "keep_forward_gb", "staleness", "in_flight")


def _objective_faults(config: RunConfig) -> list[str]:
    """Settings of one objective beside another."""
    objective, algorithm, rollout = config.training.objective, config.algorithm, config.rollout
    problems = []
    if objective != "dpo" and config.preference != PreferenceSettings():
        problems.append(
            f"training.objective is {objective}, and section preference is for dpo. Leave that section out, or set "
            "training.objective=dpo."
        )
    samples, teaches = objective in ("rl", "distill"), config.distillation.teacher is not None
    if (objective == "distill" and not teaches) or (not samples and teaches):
        problems.append(
            f"training.objective is {objective} and distillation.teacher is {config.distillation.teacher}. A teacher "
            "is needed for distill, may be given with rl, and reads no records' responses. Set "
            "training.objective=distill and distillation.teacher=PATH, or leave both out."
        )
    elif not teaches and config.distillation != DistillationSettings():
        problems.append(
            "Section distillation has settings and no teacher. Set distillation.teacher=PATH, or leave them out."
        )
    if objective == "rl":
        return problems
    usual = RolloutSettings()
    changed = {f"algorithm.{name}": value for name, (value, _) in algorithm.differences_from_preset.items()}
    changed |= {"algorithm.preset": algorithm.preset} if algorithm.preset else {}
    if objective != "dpo":
        changed.pop("algorithm.loss_average", None)
    unread = ("logprobs",) if samples else _OF_ROLLOUTS
    differing = [name for name in unread if getattr(rollout, name) != getattr(usual, name)]
    changed |= {f"rollout.{name}": getattr(rollout, name) for name in differing}
    if changed:
        problems.append(
            f"training.objective is {objective}, which trains on "
            f"{'a teacher and no rewards' if samples else 'responses of the records and samples no rollouts'}, and "
            f"{', '.join(f'{key}={value}' for key, value in changed.items())} is for rl. Leave that out, or set "
            "training.objective=rl."
        )
    if config.training.keep_best == "reward" and not samples:
        problems.append(
            f"training.keep_best is reward, and training.objective={objective} has none. Set "
            "training.keep_best=eval/accuracy or null."
        )
    if objective == "dpo":
        longest = config.prompt.max_prompt_tokens + 2 * rollout.max_new_tokens
        if config.training.micro_batch_tokens < longest:
            problems.append(
                f"training.micro_batch_tokens is {config.training.micro_batch_tokens}, but a prompt "
                f"(prompt.max_prompt_tokens) with both responses of a pair (rollout.max_new_tokens each) may need "
                f"{longest}, and they are computed together. Set training.micro_batch_tokens={longest} or more, or "
                "lower the other two."
            )
        if not config.model.share_prefix:
            problems.append(
                "training.objective is dpo and model.share_prefix is false: both responses of a pair are computed "
                "behind one prompt. Set model.share_prefix=true."
            )
    return problems
