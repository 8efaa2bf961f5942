"""How often one has to come back to a room to follow a prompt's ids and pixels from the question to the loss."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image

import vlm_pg
from tests.support.processes import ROOT
from tests.support.short_run import short_run, train_here
from vlm_pg.training.trainer import Trainer
from vlm_pg.types import Prompt

HOME = Path(vlm_pg.__file__).parent
MOST_RETURNS = {"ids": 8, "pixels": 6}
MOST_MODULES = 300


def test_a_prompt_comes_back_to_few_rooms(tmp_path: Path) -> None:
    """Of calls within vlm_pg whose arguments hold it; types.py, where the records are, counts as no room."""
    here = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_walk", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert here.returncode == 0, here.stderr[-3000:]
    found = json.loads(here.stdout.splitlines()[-1])
    for cargo, most in MOST_RETURNS.items():
        rooms = found[cargo]
        assert rooms[0] == "prompts" and rooms[-1] == "training" and set(rooms) >= {"models", "rollout"}
        assert len(rooms) - len(set(rooms)) <= most, f"{cargo}: {' -> '.join(rooms)}"
    assert found["modules"] <= MOST_MODULES


class Walk:
    """Calls that the first prompt with pixels of a step passes: those whose arguments hold its token ids, also within a
    packed stream, or share memory with its pixels."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._prompt: Prompt | None = None

    def begin(self, prompt: Prompt) -> None:
        if self._prompt is None and prompt.pixel_values is not None:
            self._prompt = prompt
            sys.setprofile(self._profile)

    def rooms(self, cargo: str) -> list[str]:
        return [room for room, _ in groupby(room for room, found in self.calls if found == cargo)]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(HOME) or code.co_name.startswith("<"):
            return
        room = file.relative_to(HOME).parts[0]
        if room != "types.py":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            with without_profile(self._profile):
                held = set().union(*(self._held(frame.f_locals[name]) for name in names if name in frame.f_locals))
            self.calls += [(room, cargo) for cargo in held]

    def _held(self, value: Any, depth: int = 0) -> set[str]:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            assert self._prompt is not None and self._prompt.pixel_values is not None
            pixels = self._prompt.pixel_values.untyped_storage().data_ptr()
            same = value.device.type == "cpu" and value.untyped_storage().data_ptr() == pixels
            return {"pixels"} if same else {"ids"} if contains(value, self._prompt.input_ids) else set()
        if depth > 3:
            return set()
        parts: list[Any] = []
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        elif isinstance(value, list | tuple | dict):
            parts = list(value.values() if isinstance(value, dict) else value)[:64]
        return set().union(*(self._held(part, depth + 1) for part in parts))


@contextlib.contextmanager
def without_profile(profile: Any) -> Any:
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)


def contains(stream: torch.Tensor, ids: torch.Tensor) -> bool:
    if stream.dtype != torch.int64 or stream.dim() != 1 or len(stream) < len(ids):
        return False
    return bool((stream.unfold(0, len(ids), 1) == ids).all(1).any())


def main(folder: Path) -> None:
    walk, step, init = Walk(), Trainer._step, Prompt.__init__
    watched = [False]

    def noted(prompt: Prompt, *args: Any, **kwargs: Any) -> None:
        init(prompt, *args, **kwargs)
        if watched[0]:
            walk.begin(prompt)

    def watched_step(trainer: Trainer, number: int) -> Any:
        watched[0] = number == 2
        try:
            return step(trainer, number)
        finally:
            sys.setprofile(None)

    Prompt.__init__ = noted  # type: ignore[assignment,method-assign]
    Trainer._step = watched_step  # type: ignore[assignment,method-assign]
    config = short_run(folder, model={"train": ["tower", "merger", "language"]}, data={"media_root": str(folder)})
    records = json.loads((folder / "records.json").read_text())
    for number, record in enumerate(records):
        colour = np.full((56, 84, 3), 40 * number, dtype=np.uint8)
        Image.fromarray(colour).save(folder / f"{number}.png")
        record |= {"data_type": "image", "path": f"{number}.png"}
    (folder / "records.json").write_text(json.dumps(records))
    ended = train_here(config)
    assert ended.code == 0, ended.printed
    modules = sum(name.split(".")[0] == "vlm_pg" for name in sys.modules)
    print(json.dumps({"ids": walk.rooms("ids"), "pixels": walk.rooms("pixels"), "modules": modules}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
