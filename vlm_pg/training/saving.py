"""A run's folder and checkpoints: locking, saving, the checkpoint to resume from, no loss of earlier runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError

from vlm_pg.config import RunConfig, dump_config
from vlm_pg.distributed import SINGLE_RANK, RankLayout, barrier
from vlm_pg.errors import CheckpointError, ConfigError, ModelError
from vlm_pg.files import find_non_finite, parse_json_line
from vlm_pg.models.loading import load_config
from vlm_pg.models.lora import adapter_base
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.observe.run_folder import Presence, RunFolder, free_name, refuse_no_run_folder
from vlm_pg.observe.run_lock import LOCK, RunLock
from vlm_pg.training import checkpoints
from vlm_pg.training.engines import Engine
from vlm_pg.training.optimizer_states import Contents, first_fault

# torch writes its files in C++, where a full disk is a failed stream.
_WRITE_FAILED = re.compile(r"PytorchStreamWriter|iostream|unexpected pos|write", re.IGNORECASE)


def save_checkpoint(folder: Path, step: int, policy: Policy, engine: Engine, state: dict[str, Any]) -> None:
    """A transformers checkpoint (of a LoRA adapter in peft's format) with processor and optimizer state; called on
    every rank, committed by rank 0.

    Raises:
        CheckpointError: it could not be written; earlier ones are untouched.
    """
    temporary = folder / f".tmp-step-{step:06d}"
    try:
        if engine.ranks.is_rank0:
            checkpoints.begin(folder, step)
        barrier()
        engine.save_weights(temporary)
        if engine.ranks.is_rank0:
            policy.processor.save_pretrained(temporary)
        engine.save_optimizer(temporary)
        barrier()
        if engine.ranks.is_rank0:
            checkpoints.commit(temporary, step, state)
        barrier()
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _WRITE_FAILED.search(str(error)):
            raise
        if engine.ranks.is_rank0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written to {folder}: {error}. Make room or correct the "
            "permissions there, then go on from the newest one with run.resume=auto."
        ) from error


def checkpoint_to_resume(
    config: RunConfig,
    folder: Path,
    warn: Callable[[str], None],
    refused: Mapping[Path, str] | None = None,
    ranks: RankLayout = SINGLE_RANK,
) -> Path | None:
    """The checkpoint to resume from as ``run.resume`` says, its files verified by rank 0; None to start anew.

    ``auto`` takes the newest one that is whole and warns of newer ones that are not.

    Args:
        refused: checkpoints that could not be loaded, and why.

    Raises:
        CheckpointError: a named checkpoint is missing or damaged, or was written under settings that do not fit; with
            ``auto``: the folder holds a run, and no checkpoint of it can be used.
    """
    if config.run.resume == "never":
        return None
    choice = ranks.from_rank0(lambda: _choose(config, folder, warn, refused or {}))
    if isinstance(choice, str):
        raise CheckpointError(choice)
    return choice


def _choose(
    config: RunConfig, folder: Path, warn: Callable[[str], None], refused: Mapping[Path, str]
) -> Path | str | None:
    """The checkpoint, None, or an error message."""
    if config.run.resume == "auto":
        return _newest(config, folder, warn, refused)
    path = Path(config.run.resume)
    if not path.is_dir():
        return (
            f"run.resume is {config.run.resume!r}, which is not a folder. Give never, auto, or a checkpoint folder "
            f"such as {folder}/step-000100."
        )
    problem = _problem_with(path)
    if problem is not None:
        return (
            f"{path} is not a usable checkpoint: {problem}. Choose another one of its run, or run.resume=auto to go on "
            "from the newest complete one."
        )
    return _mismatch(config, path) or path


def _newest(
    config: RunConfig, folder: Path, warn: Callable[[str], None], refused: Mapping[Path, str]
) -> Path | str | None:
    problems, run = [], folder.parent
    try:
        found = checkpoints.candidates(folder)
    except OSError as error:
        found, problems = [], [f"{folder} cannot be read ({error.strerror or error})"]
    for _, path in reversed(found):
        problem = refused.get(path) or _problem_with(path)
        if problem is None:
            return _mismatch(config, path) or path
        problems.append(f"{path}: {problem}")
        if path not in refused:
            warn(f"{path} is passed over: {problem}")
    if not problems and (reason := _why_no_new_start(run, config.training.checkpoint_every)) is not None:
        problems.append(reason)
    if not problems:
        return None
    listed = "".join(f"\n  {problem}" for problem in problems)
    return (
        f"{run} holds an earlier run that cannot be continued, and nothing in it was changed:{listed}\n"
        "Bring one of its checkpoints back (or name one with run.resume=FOLDER), or begin again in another folder with "
        f"run.dir={run}-2 run.resume=never. With run.resume=never alone this folder is moved aside first."
    )


def _problem_with(path: Path) -> str | None:
    """Why a run cannot resume from ``path``, its trainer state and optimizer states included; None if it can."""
    if (problem := checkpoints.problem_with(path, check_hashes=True)) is not None:
        return problem
    try:
        _State.model_validate_json((path / checkpoints.STATE).read_bytes())
        Contents.read(path)
    except OSError as error:
        return f"{checkpoints.STATE} cannot be read ({type(error).__name__})"
    except ValidationError as error:
        return f"{checkpoints.STATE} has {first_fault(error)}"
    except CheckpointError as error:
        return str(error)
    return None


# Larger numbers come from damaged lines.
MAX_STEP = 10**12
_Count = Annotated[int, Field(strict=True, ge=0, le=MAX_STEP)]
_Sum = Annotated[float, Field(strict=True, ge=0, lt=1e30)]


class _State(BaseModel):
    """What a run needs of the trainer's state of a checkpoint; early ones have no counts."""

    step: _Count
    questions: _Count = 0
    updates: _Count = 0
    tokens_computed: _Sum = 0.0
    tokens_repeated: _Sum = 0.0
    seconds: dict[str, _Sum] = {}
    settings: dict[str, Any]


def abandon_others(folder: Path, resumed: Path, step: int, warn: Callable[[str], None]) -> None:
    """Move checkpoints of another branch aside, whole or not: later ones than ``resumed``, which is at ``step``; all,
    if ``resumed`` itself lies elsewhere."""
    elsewhere = resumed.resolve().parent != folder.resolve()
    later = [path for number, path in checkpoints.candidates(folder) if elsewhere or number > step]
    if not later:
        return
    aside = free_name(folder / "abandoned", f"{datetime.now():%Y%m%d-%H%M%S}", "-")
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    warn(f"resuming after step {step}: moved {len(later)} checkpoint(s) of another branch to {aside}")


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings that differ between two configurations, as ``key: old -> new``."""
    old, new = dict(flat(before)), dict(flat(now))
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


def flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What lies in nested mappings, by dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_MOST_LISTED = 4
_KIND = re.compile(r"\b(model_type|tie_word_embeddings)$")
# Token ids, names of labels, and limits that do not size weights.
_NO_SIZE = re.compile(r"_id$|\bmax_|\bchunk_size|\blabel2id\b")


def checkpoint_settings(config: RunConfig) -> dict[str, Any]:
    """Settings that determine a checkpoint's content and the positions its weights were trained at.

    Resuming under others would lose or invent optimizer state, or change the model's input within a run.
    """
    return {
        "model.dtype": config.model.dtype,
        "model.train": f"[{', '.join(config.model.train)}]",
        "model.positions": config.model.positions,
        "model.lora": None if config.model.lora is None else config.model.lora.model_dump(mode="json"),
        "run.seed": config.run.seed,
    }


def _mismatch(config: RunConfig, path: Path) -> str | None:
    """Why this run cannot resume from the whole checkpoint in ``path``; None if it can."""
    # Checkpoints without positions were written when transformers' rule was the only one.
    then = {"model.positions": "transformers"} | checkpoints.read_state(path)["settings"]
    now, settings = checkpoint_settings(config), config.model
    changed = ", ".join(f"{key}={now[key]} (it has {then.get(key)})" for key in now if now[key] != then.get(key))
    if changed:
        return (
            f"{path} cannot be continued with {changed}. Resume with the settings it was written under, or start a new "
            f"run with model.path={path}."
        )
    try:
        of_checkpoint, of_run = _dimensions(path, settings), _dimensions(settings.path, settings)
    except ModelError:  # loading it reports the fault
        return None
    names = [name for name in of_run if of_run[name] != of_checkpoint.get(name)]
    names.sort(key=lambda name: (not name.endswith("model_type"), name))
    if not names:
        return None
    listed = ", ".join(f"{name} {of_checkpoint.get(name)} instead of {of_run[name]}" for name in names[:_MOST_LISTED])
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return (
        f"{path} is of another model than model.path={settings.path}: it has {listed}{more}. Set model.path to the "
        f"model it was trained from, or resume from a checkpoint of {settings.path}."
    )


def _dimensions(path: str | Path, settings: ModelSettings) -> dict[str, Any]:
    """Settings that determine number and shapes of a model's weights, by dotted names of its configuration."""
    found = flat(load_config(str(adapter_base(path) or path), settings).to_dict())
    return {name: x for name, x in found if _KIND.search(name) or (type(x) is int and not _NO_SIZE.search(name))}


def _why_no_new_start(run: Path, checkpoint_every: int) -> str | None:
    """Why a run without a checkpoint must not begin at step 1 in this folder; None if it may.

    Before the first checkpoint was due nothing is lost: the same steps are sampled again, alike. Afterwards there was
    one, which has been removed since.

    Args:
        checkpoint_every: of this run; that of the folder's own configuration takes precedence.
    """
    folder = RunFolder(run)
    try:
        last = _last_step(folder.metrics)
        has_rollouts = folder.rollouts.is_file() and folder.rollouts.stat().st_size > 0
        finished = _read_mapping(folder.summary).get("finished") is True
        settings = dict(flat(_read_mapping(folder.config)))
    except OSError as error:
        return f"{error.filename or run} cannot be read ({error.strerror or error})"
    every, resumed = settings.get("training.checkpoint_every"), settings.get("run.resume")
    every = every if type(every) is int else checkpoint_every
    if last and isinstance(resumed, str) and resumed not in ("never", "auto"):
        return (
            f"{folder.config} says that the run went on from {resumed}, and it has no checkpoint of its own yet: "
            f"name that one again, run.resume={resumed}"
        )
    if finished:
        return f"{folder.summary} says that the run is finished, but there is no checkpoint in {folder.checkpoints}"
    if last is None and has_rollouts:
        return f"{folder.rollouts} has an earlier run's rollouts, but neither its metrics nor a checkpoint is there"
    if last is not None and every and last > every:
        return (
            f"{folder.metrics} goes to step {last}, with a checkpoint every {every} steps, but there is none in "
            f"{folder.checkpoints}"
        )
    return None


def _last_step(metrics: Path) -> int | None:
    """The largest step in the file; damaged lines count as one step each. None for no file and no line."""
    if not metrics.is_file():
        return None
    largest, lines = 0, 0
    with metrics.open("rb") as file:
        for line in file:
            lines += 1
            step = (parse_json_line(line) or {}).get("step")
            if type(step) is int and 0 <= step <= MAX_STEP:
                largest = max(largest, step)
    return max(largest, lines) if lines else None


def archive_logs(run: Path) -> list[Path]:
    """Rename logs of steps that are sampled again; their new paths."""
    folder, stamp = RunFolder(run), f"{datetime.now():%Y%m%d-%H%M%S}"
    return [
        path.rename(path.with_name(f"{path.name}.begun-again-{stamp}"))
        for path in (folder.metrics, folder.rollouts)
        if path.is_file() and path.stat().st_size
    ]


def _read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; empty if absent, damaged or no mapping."""
    if not path.is_file():
        return {}
    text = path.read_bytes()
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


class OpenFolder:
    """Lock and preparation of a run's folder. Rank 0 locks and writes; methods are called on every rank.

    Args:
        stack: releases the lock when it ends.

    Raises:
        ConfigError: another run works there or has begun to, or the path holds something that is not a run.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: RankLayout,
        stack: ExitStack,
        info: Callable[[str], None] = print,
        warn: Callable[[str], None] = print,
    ):
        self._config, self._ranks, self._stack, self._info, self._warn = config, ranks, stack, info, warn
        self.path = Path(config.run.dir)
        self._lock: RunLock | None = None
        # Hold the run lock before resuming or archiving the folder.
        self._checked_on_rank0(self._lock_existing)

    def _checked_on_rank0(self, lock: Callable[[], None]) -> None:
        def problem() -> str | None:
            try:
                lock()
            except (ConfigError, OSError) as error:
                return str(error)
            return None

        if (found := self._ranks.from_rank0(problem)) is not None:
            raise ConfigError(found)

    def _lock_existing(self) -> None:
        refuse_no_run_folder(self.path)
        if self.path.is_dir():
            self._take_lock()

    def _lock_new(self) -> None:
        """Another run may have begun in the folder while this one's model was loaded."""
        if self._lock is not None or not self.path.is_dir():
            return
        self._take_lock()
        if self._config.run.resume != "never" and any(entry.name != LOCK for entry in self.path.iterdir()):
            raise ConfigError(
                f"Another run has worked in run.dir '{self.path}' while this one was starting. Start again to go on "
                "from its checkpoints, or choose another run.dir."
            )

    def _take_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = RunLock.take(self.path, self._warn)
        self._stack.callback(self._lock.release)

    def open(self, from_step_1: bool) -> tuple[RunFolder, Presence | None]:
        """Prepare the folder and write the configuration into it.

        Args:
            from_step_1: logs of an earlier start are archived.

        Returns:
            The folder, and on rank 0 the check that it still exists.
        """
        folder, presence = RunFolder(self.path), None
        self._checked_on_rank0(self._lock_new)
        if self._ranks.is_rank0:
            resuming = self._config.run.resume != "never"
            before = self._settings_before(folder) if resuming else None
            folder = RunFolder.create(self.path, resume=resuming, announce=self._info)
            if self._lock is None or not resuming:
                self._take_lock()
            for moved in archive_logs(self.path) if from_step_1 else ():
                self._warn(
                    f"no checkpoint of the run in {self.path} was finished, so it begins at step 1 again; what it had "
                    f"logged is now {moved}"
                )
            text = dump_config(self._config)
            for line in changed_settings(before, yaml.safe_load(text)) if before else ():
                if not line.startswith("run.resume:"):
                    self._warn(f"setting changed since the run began: {line}")
            folder.write_config(text)
            presence = Presence(self.path)
        barrier()
        return folder, presence

    def _settings_before(self, folder: RunFolder) -> dict[str, Any] | None:
        """The run's settings when it was last started; a damaged file is moved aside."""
        if not folder.config.is_file():
            return None
        if before := _read_mapping(folder.config):
            return before
        moved = folder.config.rename(folder.config.with_name(f"{folder.config.name}.damaged"))
        self._warn(
            f"{folder.config} is damaged, so it cannot be said which settings have changed since the run began; it is "
            f"now {moved}"
        )
        return None


class RunSummary:
    """The growing ``values`` of summary.json; rank 0 writes them."""

    def __init__(self, folder: RunFolder, ranks: RankLayout, resumed: bool, warn: Callable[[str], None] = print):
        """Empty for a new run; a resumed run keeps its evaluation before training, if the file can be read."""
        self._folder, self._ranks = folder, ranks
        self.values: dict[str, Any] = {}
        self.was_finished = False
        if not resumed or not folder.summary.is_file():
            return
        try:
            earlier = json.loads(folder.summary.read_bytes())
        except FileNotFoundError:  # another rank has just moved a damaged one
            return
        except (ValueError, RecursionError):
            earlier = None
        evaluated = earlier.get("eval_before", {}) if isinstance(earlier, dict) else None
        if not isinstance(evaluated, dict) or find_non_finite(evaluated) is not None:
            if ranks.is_rank0:
                moved = folder.summary.rename(folder.summary.with_name(f"{folder.summary.name}.damaged"))
                warn(f"{folder.summary} is damaged: an evaluation before training is lost; moved it to {moved}")
            return
        if "eval_before" in earlier:
            self.values["eval_before"] = evaluated
        self.was_finished = earlier.get("finished") is True

    def write(self, **values: Any) -> None:
        """Add entries and write the file."""
        self.values.update(values)
        self.values.setdefault("finished", False)
        if self._ranks.is_rank0:
            self._folder.write_summary(self.values)
