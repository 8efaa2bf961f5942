"""summary.json: the results of a run, written whenever there is something new in it."""

from __future__ import annotations

import json
from typing import Any

from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.training.distributed import rank


class RunSummary:
    """The growing content of summary.json. Only rank 0 writes; every rank may ask."""

    def __init__(self, folder: RunFolder, values: dict[str, Any], was_finished: bool = False):
        self._folder = folder
        self._values = values
        self.was_finished = was_finished

    @classmethod
    def open(cls, folder: RunFolder, resumed: bool) -> RunSummary:
        """Empty for a new run; a resumed run keeps its evaluation before training."""
        values: dict[str, Any] = {}
        was_finished = False
        if resumed and folder.summary.is_file():
            earlier = json.loads(folder.summary.read_text())
            values = {key: earlier[key] for key in ("eval_before",) if key in earlier}
            was_finished = bool(earlier.get("finished"))
        return cls(folder, values, was_finished)

    def has(self, key: str) -> bool:
        return key in self._values

    def set(self, key: str, value: Any) -> None:
        """Add one entry and write the file."""
        self.write(**{key: value})

    def write(self, **values: Any) -> None:
        """Add entries and write the file."""
        self._values.update(values)
        self._values.setdefault("finished", False)
        if rank() == 0:
            self._folder.write_summary(self._values)
