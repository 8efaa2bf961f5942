"""How often one has to come back to a room to follow a prompt's ids from the question to the loss."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from vlm_pg.training.passes import Passes

import vlm_pg
from tests.support.short_run import short_run, train_here
from vlm_pg.training.trainer import Trainer

HOME = Path(vlm_pg.__file__).parent
# What a prompt's ids go through; training is the corridor that hands them from one to the next.
ROOMS = ("prompts", "models", "attention", "rollout", "rewards", "algorithms", "batching")
MOST_RETURNS = 2


def room_of(frame: FrameType | None) -> str | None:
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(HOME):
            return file.relative_to(HOME).parts[0]
        frame = frame.f_back  # of a library or of Python, on its behalf
    return None


def is_property(frame: FrameType) -> bool:
    owner = type(frame.f_locals.get("self"))
    return isinstance(getattr(owner, frame.f_code.co_name, None), property)


def test_a_prompts_ids_come_back_to_a_room_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk: list[str] = []
    whole_step, loss = Trainer._step, Passes._loss

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        room = room_of(frame) if event == "call" and Path(frame.f_code.co_filename).is_relative_to(HOME) else None
        if room in ROOMS and room_of(frame.f_back) == "training" and not is_property(frame):
            walk.append(str(room))

    def watched_step(trainer: Trainer, step: int) -> Any:
        sys.setprofile(profile if step == 2 else None)
        try:
            return whole_step(trainer, step)
        finally:
            sys.setprofile(None)

    def watched_loss(*arguments: Any) -> Any:
        try:
            return loss(*arguments)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Trainer, "_step", watched_step)
    monkeypatch.setattr(Passes, "_loss", watched_loss)
    ended = train_here(short_run(tmp_path))
    assert ended.code == 0, ended.printed
    rooms = [room for room, _ in groupby(walk)]
    assert rooms[0] == "prompts" and rooms[-1] == "algorithms" and set(rooms) >= set(ROOMS) - {"attention", "batching"}
    assert len(rooms) - len(set(rooms)) <= MOST_RETURNS, " -> ".join(rooms)
