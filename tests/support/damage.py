"""What a damage is, and what can happen to any file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlm_pg.training.checkpoints import MANIFEST, STATE

Ends = Literal["continued", "passed over", "refused"]
Change = Callable[[Path], None]
NEWEST, STEPS = "checkpoints/step-000003", ("step-000001", "step-000002", "step-000003")
STATES = "optimizer/rank-00000-00000.safetensors"
CHECKPOINT_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    MANIFEST,
    "model.safetensors",
    STATES,
    "optimizer/states.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    STATE,
)
# More brackets than any reader of JSON or YAML follows.
DEEP = b"[" * 200_000


@dataclass(frozen=True)
class Damage:
    name: str
    change: Change  # given the run's folder
    ends: Ends
    names: str = ""

    def __str__(self) -> str:
        return self.name


def write(data: bytes) -> Change:
    return lambda path: void(path.write_bytes(data))


def void(_: Any) -> None:
    return None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(bytes(data))


def link_in_a_circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What can happen to any file; of each, whether its content is lost.
FILE_CHANGES: dict[str, Change] = {
    "deleted": lambda path: path.unlink(),
    "emptied": write(b""),
    "cut in half": lambda path: void(path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])),
    "one bit flipped": flip,
    "grown": lambda path: void(path.write_bytes(path.read_bytes() + b"\n")),
    "zeros": lambda path: void(path.write_bytes(bytes(path.stat().st_size))),
    "a folder instead": folder_instead,
    "a dangling link instead": dangling_link,
    "a link in a circle instead": link_in_a_circle,
    "a pipe instead": fifo_instead,
}


def in_file(name: str, change: Change) -> Change:
    return lambda run: change(run / name)
