"""Damages of a run's folder with three checkpoints, generated: each says how resuming must end and what must be named.

``continued``: as if nothing had happened. ``passed over``: the newest checkpoint is named and the one before it taken.
``refused``: exit status 2, a message that names the file, every file as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from vlm_pg.training.checkpoints import MANIFEST, STATE, _sha256

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


def renew_manifest(checkpoint: Path) -> None:
    """As somebody would who changes a checkpoint on purpose: sizes and hashes are those of its files again."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"] = {
        str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def renewed(name: str, change: Change) -> Change:
    """A change of a file of the newest checkpoint that its manifest agrees with."""

    def changed(run: Path) -> None:
        change(run / NEWEST / name)
        renew_manifest(run / NEWEST)

    return changed


def json_change(edit: Callable[[Any], Any]) -> Change:
    return lambda path: void(path.write_text(json.dumps(edit(json.loads(path.read_text())))))


def tensors_change(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    def changed(path: Path) -> None:
        tensors = edit({name: tensor.clone() for name, tensor in load_file(path).items()})
        save_file(tensors, path, metadata={"format": "pt"})

    return changed


def without_first(tensors: dict[str, Any]) -> dict[str, Any]:
    first = sorted(name for name in tensors if "layers" in name)[0]
    return {name: tensor for name, tensor in tensors.items() if name != first}


def first_cut(tensors: dict[str, Any]) -> dict[str, Any]:
    first = sorted(name for name in tensors if tensors[name].numel() > 1)[0]
    return tensors | {first: tensors[first][:-1].clone()}


def set_entry(key: str, value: Any) -> Change:
    return json_change(lambda state: state | {key: value})


def of_single_files() -> Iterator[Damage]:
    """Every file of the newest checkpoint, in every way: it is passed over. Of older ones: nobody needs them."""
    for name in CHECKPOINT_FILES:
        for what, change in FILE_CHANGES.items():
            harmless = name == MANIFEST and what == "grown"
            ends: Ends = "continued" if harmless else "passed over"
            # A flipped bit in the manifest may be in the digest of another file, which is named then.
            names = "" if name == MANIFEST and what in ("grown", "one bit flipped") else name
            yield Damage(f"newest {name} {what}", in_file(f"{NEWEST}/{name}", change), ends, names)
    for step in STEPS[:2]:
        for name in (MANIFEST, "model.safetensors", STATE):
            for what in ("deleted", "cut in half", "one bit flipped", "a link in a circle instead"):
                path = f"checkpoints/{step}/{name}"
                yield Damage(f"older {path} {what}", in_file(path, FILE_CHANGES[what]), "continued")


def of_manifests() -> Iterator[Damage]:
    entry = {"bytes": 1, "sha256": "0"}
    values: dict[str, Any] = {
        "a list": [],
        "an empty object": {},
        "files a list": {"step": 3, "files": []},
        "files empty": {"step": 3, "files": {}},
        "files null": {"step": 3, "files": None},
        "an entry without a size": {"step": 3, "files": {STATE: {"sha256": "0"}}},
        "an entry without a hash": {"step": 3, "files": {STATE: {"bytes": 1}}},
        "an entry a number": {"step": 3, "files": {STATE: 3}},
        "a size true": {"step": 3, "files": {STATE: entry | {"bytes": True}}},
        "a size a text": {"step": 3, "files": {STATE: entry | {"bytes": "1"}}},
        "a path outside": {"step": 3, "files": {STATE: entry, "../../config.yaml": entry}},
        "an absolute path": {"step": 3, "files": {STATE: entry, "/etc/passwd": entry}},
        "an empty path": {"step": 3, "files": {STATE: entry, "": entry}},
        "a path with a zero byte": {"step": 3, "files": {STATE: entry, "a\0b": entry}},
        "a number": 7,
    }
    for what, value in values.items():
        yield Damage(
            f"manifest {what}", in_file(f"{NEWEST}/{MANIFEST}", write(json.dumps(value).encode())), "passed over"
        )
    for what, data in {"nested deeply": DEEP, "no text": b"\xff\xfe\x00{", "not closed": b'{"files": {'}.items():
        yield Damage(f"manifest {what}", in_file(f"{NEWEST}/{MANIFEST}", write(data)), "passed over", MANIFEST)
    for what, value in {"other": 9, "null": None, "a text": "3"}.items():
        change = in_file(f"{NEWEST}/{MANIFEST}", set_entry("step", value))
        yield Damage(f"manifest of step {what}", change, "passed over", "is of step")


def of_renewed_files() -> Iterator[Damage]:
    """Changed on purpose, hashes and all: what cannot be loaded is passed over by what is wrong with it."""
    for name in ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        for what, data in {"a list": b"[]", "no JSON": b"{", "nested deeply": DEEP, "empty": b""}.items():
            yield Damage(f"renewed {name} {what}", renewed(name, write(data)), "passed over")
    another = renewed("config.json", set_entry("model_type", "llama"))
    yield Damage("renewed: another kind of model", another, "refused", "model_type llama instead of qwen2_5_vl")
    one = torch.zeros(1)
    weights: dict[str, Change] = {
        "a tensor missing": tensors_change(without_first),
        "a tensor cut": tensors_change(first_cut),
        "all tensors missing": tensors_change(lambda tensors: {}),
        "garbage": write(b"\xff" * 1000),
        "a header of 2^60 bytes": write((1 << 60).to_bytes(8, "little") + b"{}"),
        "empty": write(b""),
        "gone": lambda path: path.unlink(),
    }
    odd_states: dict[str, Change] = {
        "a name without an element": tensors_change(lambda tensors: tensors | {"odd": one}),
        "an element that is none": tensors_change(lambda tensors: tensors | {"x/exp_avg/first": one}),
        "another dtype": tensors_change(lambda tensors: {name: t.double() for name, t in tensors.items()}),
        "elements moved": tensors_change(lambda tensors: {f"{n[:-1]}1": t for n, t in tensors.items()}),
    }
    for what, change in odd_states.items():
        yield Damage(f"renewed {STATES}: {what}", renewed(STATES, change), "passed over")
    for name in ("model.safetensors", STATES):
        for what, change in weights.items():
            yield Damage(f"renewed {name}: {what}", renewed(name, change), "passed over")
    contents: dict[str, Change] = {
        "a list": write(b"[]"),
        "no JSON": write(b"{"),
        "nested deeply": write(DEEP),
        "empty": write(b""),
        "gone": lambda path: path.unlink(),
        "updates negative": set_entry("updates", -1),
        "updates a text": set_entry("updates", "3"),
        "no updates": set_entry("updates", 0),
        "masters a number": set_entry("masters", 1),
        "masters of fp32 weights": set_entry("masters", True),
        "weights a list": set_entry("weights", []),
        "weights empty": set_entry("weights", {}),
        "a shape a number": set_entry("weights", {"x": 3}),
        "another weight": set_entry("weights", {"x": [3]}),
    }
    for what, change in contents.items():
        yield Damage(f"renewed states.json: {what}", renewed("optimizer/states.json", change), "passed over")
    states: dict[str, tuple[str, Any]] = {
        "step negative": ("step", -1),
        "step true": ("step", True),
        "step a text": ("step", "3"),
        "step huge": ("step", 10**30),
        "questions a fraction": ("questions", 1.5),
        "updates null": ("updates", None),
        "tokens not a number": ("tokens_computed", float("nan")),
        "tokens infinite": ("tokens_repeated", float("inf")),
        "tokens a text": ("tokens_repeated", "many"),
        "seconds a list": ("seconds", []),
        "seconds a text": ("seconds", {"setup": "long"}),
        "settings null": ("settings", None),
        "settings a list": ("settings", []),
    }
    for what, (key, value) in states.items():
        yield Damage(f"renewed state: {what}", renewed(STATE, set_entry(key, value)), "passed over", STATE)
    for what, data in {"a list": b"[]", "no JSON": b"{", "nested deeply": DEEP, "an empty object": b"{}"}.items():
        yield Damage(f"renewed state: {what}", renewed(STATE, write(data)), "passed over", STATE)
    yield Damage("data of the state a list", renewed(STATE, set_entry("data", [])), "continued")


def of_values() -> Iterator[Damage]:
    """One number of a tensor, behind its first."""

    def with_last(key: str, value: float) -> Change:
        def edit(tensors: dict[str, Any]) -> dict[str, Any]:
            name = sorted(name for name in tensors if key in name)[-1]
            tensors[name].view(-1)[-1] = value
            return tensors

        return tensors_change(edit)

    for value in (float("nan"), float("-inf")):
        weights = renewed("model.safetensors", with_last("norm", value))
        yield Damage(f"renewed model.safetensors: {value}", weights, "passed over", " in model.safetensors), with")
        for kind in ("exp_avg/", "exp_avg_sq/"):
            states = renewed(STATES, with_last(kind, value))
            yield Damage(f"renewed {STATES}: {value} in {kind}", states, "passed over", f"/{kind}0, which would")
    negative = renewed(STATES, with_last("exp_avg_sq/", -1.0))
    yield Damage(f"renewed {STATES}: a negative square", negative, "passed over", f"{STATES} has values from -1.0 to")


def of_all_checkpoints() -> Iterator[Damage]:
    """All three in the same way: nothing is left to go on from, and nothing is erased."""
    for name in (MANIFEST, STATE, "model.safetensors"):
        for what, change in FILE_CHANGES.items():
            if name == MANIFEST and what == "grown":
                continue

            def everywhere(run: Path, name: str = name, change: Change = change) -> None:
                for step in STEPS:
                    change(run / "checkpoints" / step / name)

            yield Damage(f"all: {name} {what}", everywhere, "refused", "step-000001")


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


def all_damages() -> list[Damage]:
    parts = (of_single_files, of_manifests, of_renewed_files, of_all_checkpoints)
    folders = (of_checkpoint_folders, of_odd_entries, of_logs, of_settings_and_faults, of_values)
    return [damage for part in (*parts, *folders) for damage in part()]
