"""A run's folder: locked, created or reopened, and compared with the earlier start; and its summary.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from vlm_pg.config import RunConfig, dump_config
from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.errors import ConfigError
from vlm_pg.files import find_non_finite
from vlm_pg.observe.run_folder import Presence, RunFolder, refuse_no_run_folder
from vlm_pg.observe.run_lock import LOCK, RunLock
from vlm_pg.training.saving import archive_logs, changed_settings


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

    def _checked_on_rank0(self, lock: Callable[[], str | None]) -> None:
        def problem() -> str | None:
            try:
                return lock()
            except (ConfigError, OSError) as error:
                return str(error)

        if (found := self._ranks.from_rank0(problem)) is not None:
            raise ConfigError(found)

    def _lock_existing(self) -> str | None:
        refuse_no_run_folder(self.path)
        if self.path.is_dir():
            self._take_lock()
        return None

    def _lock_new(self) -> str | None:
        """Another run may have begun in the folder while this one's model was loaded."""
        if self._lock is not None or not self.path.is_dir():
            return None
        self._take_lock()
        if self._config.run.resume != "never" and any(entry.name != LOCK for entry in self.path.iterdir()):
            return (
                f"Another run has worked in run.dir '{self.path}' while this one was starting. Start again to go on "
                "from its checkpoints, or choose another run.dir."
            )
        return None

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
        try:
            before = yaml.safe_load(folder.config.read_bytes())
        except (ValueError, RecursionError, yaml.YAMLError):
            before = None
        if isinstance(before, dict):
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
