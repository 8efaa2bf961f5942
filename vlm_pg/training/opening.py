"""The folder a run works in: locked, opened or made, and compared with what an earlier start has left there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from vlm_pg.config import RunConfig, dump_config
from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.errors import ConfigError
from vlm_pg.observe.run_folder import Presence, RunFolder, refuse_no_run_folder
from vlm_pg.observe.run_lock import LOCK, RunLock
from vlm_pg.training import history
from vlm_pg.training.saving import changed_settings


class OpenFolder:
    """One run's hold on its folder. Rank 0 locks and writes; every rank may ask.

    Args:
        stack: gives the lock back when it ends.

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
        # Nobody else may train in a folder that is continued or moved aside.
        problem = ranks.first_says(self._lock_earlier_run)
        if problem is not None:
            raise ConfigError(problem)

    def _lock_earlier_run(self) -> str | None:
        try:
            refuse_no_run_folder(self.path)
            if self.path.is_dir():
                self._take_lock()
        except (ConfigError, OSError) as error:
            return str(error)
        return None

    def _lock_what_came_since(self) -> str | None:
        """Another run may have begun in the folder while this one's model was loaded."""
        if self._lock is not None or not self.path.is_dir():
            return None
        try:
            self._take_lock()
        except (ConfigError, OSError) as error:
            return str(error)
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

    def open(self, begins_again: bool) -> tuple[RunFolder, Presence | None]:
        """Make the folder ready and write the configuration into it.

        Args:
            begins_again: the run starts at step 1: what an earlier start has logged of such steps is moved aside.

        Returns:
            The folder, and on rank 0 how to tell that it is still there.
        """
        folder = RunFolder(self.path)
        presence = None
        problem = self._ranks.first_says(self._lock_what_came_since)
        if problem is not None:
            raise ConfigError(problem)
        if self._ranks.is_first:
            resuming = self._config.run.resume != "never"
            before = self._settings_before(folder) if resuming else None
            folder = RunFolder.create(self.path, resume=resuming, announce=self._info)
            if self._lock is None or not resuming:
                self._take_lock()
            for moved in history.set_aside(self.path) if begins_again else ():
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
        """The run's settings when it was last started; a file that does not hold them is moved aside."""
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
