"""Trainings that go on in another layout: stages from one checkpoint to the next, and what checkpoints hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.layouts import LAYOUTS, deepspeed_settings, layout_engine, layout_policy, train_steps
from tests.support.processes import launch_ranks
from tests.support.ranks import connected_ranks
from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.models.loading import DTYPES, load_policy
from vlm_pg.models.settings import LoraSettings, ModelSettings

# Of each step; every one of four data ranks has some.
QUESTIONS = 4


@dataclass(frozen=True)
class Stage:
    """Steps ``first`` to before ``last`` in one layout, from checkpoint ``start`` (None: the base model).

    A checkpoint ``<name>-<last>`` is written at the end, and with ``each`` after every step before. A stage without
    steps saves what it has loaded.
    """

    name: str
    layout: str
    first: int
    last: int
    start: str | None = None
    each: bool = False

    @property
    def saved(self) -> str:
        return f"{self.name}-{self.last}"


def run_stages(stages: Sequence[Stage], folder: Path) -> None:
    """One after the other, each with as many processes as its layout has; neighbours share a launch."""
    if not (folder / "base").exists():
        policy = layout_policy(LAYOUTS["torch-1"])
        policy.model.save_pretrained(folder / "base")
        policy.processor.save_pretrained(folder / "base")
    waiting = list(stages)
    while waiting:
        ranks = LAYOUTS[waiting[0].layout].ranks
        together = [stage for stage in waiting if LAYOUTS[stage.layout].ranks == ranks]
        # Up to the first whose starting checkpoint does not exist by its turn.
        ready = [
            s.start is None or (folder / s.start).exists() or s.start in [before.saved for before in together[:i]]
            for i, s in enumerate(together)
        ]
        together = together[: [*ready, False].index(False)]
        (folder / "stages.json").write_text(json.dumps([asdict(stage) for stage in together]))
        launch_ranks("tests.support.stages", str(folder), ranks=ranks, timeout_seconds=1800)
        waiting = [stage for stage in waiting if stage not in together]


def run_stage(stage: Stage, folder: Path, ranks: RankLayout) -> None:
    """On one rank of the stage's layout. Collective."""
    layout = LAYOUTS[stage.layout]
    start = folder / (stage.start or "base")
    lora = LoraSettings(rank=4, alpha=8) if layout.lora else None
    settings = ModelSettings(path=str(folder / "base"), dtype=layout.dtype, train=layout.trained, lora=lora)
    reading = nullcontext()
    if layout.zero is not None:
        from vlm_pg.training.deepspeed_engine import sharded_loading

        reading = sharded_loading(deepspeed_settings(layout, folder, ranks), DTYPES[layout.dtype])
    policy = load_policy(start, device="cpu", settings=settings, weights_version=stage.first, reading=reading)
    engine = layout_engine(layout, folder, ranks, policy)
    if stage.start is not None:
        engine.load_optimizer(start)

    def save(step: int) -> None:
        path = folder / f"{stage.name}-{step}"
        if ranks.is_rank0:
            path.mkdir()
        barrier()
        engine.save_weights(path)
        engine.save_optimizer(path)
        if ranks.is_rank0:
            policy.processor.save_pretrained(path)
        barrier()

    for step in range(stage.first, stage.last):
        train_steps(engine, ranks, steps=[step], questions=QUESTIONS)
        if stage.each and step + 1 < stage.last:
            save(step + 1)
    save(stage.last)


def saved_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of a model or an adapter, of one file or of many."""
    found: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        found |= load_file(file)
    return found


def saved_states(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    """(weight, kind) -> its whole state, flat: the slices of all files joined, each element exactly once."""
    slices: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for file in (checkpoint / "optimizer").glob("*.safetensors"):
        for key, values in load_file(file).items():
            weight, kind, first = key.rsplit("/", 2)
            slices.setdefault((weight, kind), []).append((int(first), values))
    joined = {}
    for key, found in slices.items():
        end, ordered = 0, sorted(found, key=lambda entry: entry[0])
        for first, values in ordered:
            assert first == end, key
            end += values.numel()
        joined[key] = torch.cat([values for _, values in ordered])
    return joined


def updates(checkpoint: Path) -> int:
    return json.loads((checkpoint / "optimizer" / "states.json").read_text())["updates"]


def equal_checkpoints(one: Path, other: Path) -> list[str]:
    """Names of weights and states that are not equal bit for bit."""
    differ = []
    for read in (saved_weights, saved_states):
        ours, theirs = read(one), read(other)
        assert ours.keys() == theirs.keys() and ours
        differ += [str(name) for name in ours if not torch.equal(ours[name], theirs[name])]
    assert updates(one) == updates(other)
    return differ


if __name__ == "__main__":  # FOLDER, whose stages.json lists stages of as many ranks as there are
    with connected_ranks():
        for values in json.loads(Path(sys.argv[1], "stages.json").read_text()):
            stage = Stage(**values)
            run_stage(stage, Path(sys.argv[1]), RankLayout.here(LAYOUTS[stage.layout].sequence))
