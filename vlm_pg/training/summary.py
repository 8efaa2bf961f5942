"""summary.json: the results of a run, written whenever there is something new in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from vlm_pg.distributed import RankLayout
from vlm_pg.files import find_non_finite
from vlm_pg.observe.run_folder import RunFolder


class RunSummary:
    """The growing content of summary.json. Only rank 0 writes; every rank may ask."""

    def __init__(self, folder: RunFolder, ranks: RankLayout, values: dict[str, Any], was_finished: bool = False):
        self._folder, self._ranks = folder, ranks
        self._values = values
        self.was_finished = was_finished

    @classmethod
    def open(
        cls, folder: RunFolder, ranks: RankLayout, resumed: bool, warn: Callable[[str], None] = print
    ) -> RunSummary:
        """Empty for a new run; a resumed run keeps its evaluation before training, if the file can be read."""
        if not resumed or not folder.summary.is_file():
            return cls(folder, ranks, {})
        try:
            earlier = json.loads(folder.summary.read_bytes())
        except FileNotFoundError:  # another rank has just moved a damaged one
            return cls(folder, ranks, {})
        except (ValueError, RecursionError):
            earlier = None
        evaluated = earlier.get("eval_before", {}) if isinstance(earlier, dict) else None
        if not isinstance(earlier, dict) or not isinstance(evaluated, dict) or find_non_finite(evaluated) is not None:
            if ranks.is_first:
                moved = folder.summary.rename(folder.summary.with_name(f"{folder.summary.name}.damaged"))
                warn(f"{folder.summary} is damaged: an evaluation before training is lost; moved it to {moved}")
            return cls(folder, ranks, {})
        values = {"eval_before": evaluated} if "eval_before" in earlier else {}
        return cls(folder, ranks, values, earlier.get("finished") is True)

    def has(self, key: str) -> bool:
        return key in self._values

    def set(self, key: str, value: Any) -> None:
        """Add one entry and write the file."""
        self.write(**{key: value})

    def write(self, **values: Any) -> None:
        """Add entries and write the file."""
        self._values.update(values)
        self._values.setdefault("finished", False)
        if self._ranks.is_first:
            self._folder.write_summary(self._values)
