"""Damages of a run's folder with three checkpoints, generated: each says how resuming must end and what must be named.

``continued``: as if nothing had happened. ``passed over``: the newest checkpoint is named and the one before it taken.
``refused``: exit status 2, a message that names the file, every file as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.damage import (
    CHECKPOINT_FILES,
    DEEP,
    FILE_CHANGES,
    NEWEST,
    STATES,
    STEPS,
    Change,
    Damage,
    Ends,
    in_file,
    void,
    write,
)
from tests.support.folder_damages import of_checkpoint_folders, of_logs, of_odd_entries, of_settings_and_faults
from vlm_pg.training.checkpoints import MANIFEST, STATE, _sha256


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
            names = "" if harmless else name
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


def all_damages() -> list[Damage]:
    parts = (of_single_files, of_manifests, of_renewed_files, of_all_checkpoints)
    folders = (of_checkpoint_folders, of_odd_entries, of_logs, of_settings_and_faults, of_values)
    return [damage for part in (*parts, *folders) for damage in part()]
