"""Damages of what is no checkpoint: odd things among them, and files that say what a run was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.support.damage import DEEP, FILE_CHANGES, NEWEST, Change, Damage, in_file, void, write


def added(name: str, data: bytes) -> Change:
    return lambda run: void((run / NEWEST / name).write_bytes(data))


def of_checkpoint_folders() -> Iterator[Damage]:
    def checkpoints(run: Path) -> Path:
        return run / "checkpoints"

    def gone(run: Path) -> None:
        shutil.rmtree(checkpoints(run))

    def empty(run: Path) -> None:
        gone(run)
        checkpoints(run).mkdir()

    def a_file(run: Path) -> None:
        gone(run)
        checkpoints(run).write_text("x")

    def links_nowhere(run: Path) -> None:
        gone(run)
        checkpoints(run).symlink_to("nowhere")

    def in_a_circle(run: Path) -> None:
        gone(run)
        checkpoints(run).symlink_to("checkpoints")

    yield Damage("checkpoints gone", gone, "refused", "there is no checkpoint in")
    yield Damage("checkpoints empty", empty, "refused", "there is no checkpoint in")
    yield Damage("checkpoints a file", a_file, "refused", "checkpoints")
    yield Damage("checkpoints a dangling link", links_nowhere, "refused", "checkpoints")
    yield Damage("checkpoints a link in a circle", in_a_circle, "refused", "checkpoints")


def of_odd_entries() -> Iterator[Damage]:
    """What is named like a checkpoint and is none, or lies beside them."""
    odd: dict[str, Change] = {
        "a file": lambda path: void(path.write_text("x")),
        "an empty folder": lambda path: path.mkdir(),
        "a dangling link": lambda path: path.symlink_to("nowhere"),
        "a link in a circle": lambda path: path.symlink_to(path.name),
        "a pipe": lambda path: os.mkfifo(path),
        "a copy of step 3": lambda path: void(shutil.copytree(path.with_name("step-000003"), path)),
        "a link to step 3": lambda path: path.symlink_to("step-000003"),
    }
    for what, change in odd.items():
        for name in ("step-000004", "step-000099"):
            put = in_file(f"checkpoints/{name}", change)
            yield Damage(f"{name} is {what}", put, "continued", name)
    for name in (".tmp-step-000004", "step-4", "step-٠٠٠٠٠٤", "notes.txt", "step-000004.bak", "step-000004 "):
        for what in ("a file", "an empty folder", "a dangling link"):
            yield Damage(f"checkpoints/{name} is {what}", in_file(f"checkpoints/{name}", odd[what]), "continued")
    for name in ("adapter_config.json", "chat_template.json", "model-00001-of-00002.safetensors", "code.py"):
        yield Damage(f"{name} was put into the newest", added(name, b"{}"), "passed over", name)
    for name in ("notes.md", ".nfs0001"):
        yield Damage(f"{name} was put into the newest", added(name, b"x"), "continued")


def of_logs() -> Iterator[Damage]:
    """Files that say what was: whole lines stay, and the run goes on."""
    lines: dict[str, bytes] = {
        "a line that is no JSON": b"{broken\n",
        "a half line": b'{"step": 3, "pha',
        "a step not a number": b'{"step": NaN, "reward": 1}\n',
        "a huge step": b'{"step": 1' + b"0" * 40 + b', "reward": 1}\n',
        "a step of 5,000 digits": b'{"step": 1' + b"0" * 5000 + b"}\n",
        "a huge number": b'{"step": 3, "phase": "x", "reward": 1e999}\n',
        "a line nested deeply": DEEP + b"\n",
        "no text": b"\xff\xfe\xfd\n",
        "a field of a megabyte": b'{"phase": "' + b"x" * 2**20 + b'"}\n',
        "zeros": bytes(4096) + b"\n",
    }
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        for what, line in lines.items():
            change = in_file(name, lambda path, line=line: void(path.write_bytes(path.read_bytes() + line)))
            yield Damage(f"{name}: {what}", change, "continued")
        for what in ("deleted", "emptied", "cut in half", "one bit flipped", "zeros"):
            yield Damage(f"{name} {what}", in_file(name, FILE_CHANGES[what]), "continued")
        for what in ("a folder instead", "a link in a circle instead", "a dangling link instead", "a pipe instead"):
            yield Damage(f"{name} {what}", in_file(name, FILE_CHANGES[what]), "refused", name)


def of_settings_and_faults() -> Iterator[Damage]:
    for name in ("summary.json", "config.yaml"):
        for what in ("deleted", "emptied", "cut in half", "zeros"):
            yield Damage(f"{name} {what}", in_file(name, FILE_CHANGES[what]), "continued")
        for what, data in {
            "a list": b"[1]",
            "nested deeply": DEEP,
            "no text": b"\xff\xfe\xfd",
            "a text": b'"x"',
        }.items():
            yield Damage(f"{name} {what}", in_file(name, write(data)), "continued", f"{name}.damaged")
        for what in ("a folder instead", "a dangling link instead", "a pipe instead"):
            yield Damage(f"{name} {what}", in_file(name, FILE_CHANGES[what]), "refused", name)
    summaries = {
        "no number": b'{"eval_before": {"accuracy": NaN}}',
        "a text": b'{"eval_before": "x", "finished": "yes"}',
    }
    for what, data in summaries.items():
        yield Damage(f"summary.json: {what}", in_file("summary.json", write(data)), "continued", "summary.json.damaged")
    for what, data in {
        "emptied": b"",
        "nested deeply": DEEP,
        "other types": b'{"loss": {"unit": 1, "chart": []}}',
    }.items():
        yield Damage(f"curves.json: {what}", in_file("curves.json", write(data)), "continued")
    yield Damage("curves.json a pipe instead", in_file("curves.json", FILE_CHANGES["a pipe instead"]), "refused")
    faults = {"no record": b"{}\n", "nested deeply": DEEP + b"\n", "a list": b"[]\n", "no text": b"\xff\xfe\n"}
    for what, data in faults.items():
        yield Damage(
            f"bad_samples.jsonl: {what}", in_file("bad_samples.jsonl", write(data)), "refused", "bad_samples.jsonl"
        )
    yield Damage(
        "run.lock left behind", in_file("run.lock", write(b'{"process": 1, "host": "x"}')), "continued", "run.lock"
    )
    yield Damage("run.lock garbage", in_file("run.lock", write(b"\xff[")), "continued")
