"""A checkpoint goes on in the layout it was written in bit for bit, and in any other to the same weights.

Loaded in another layout and saved at once, every weight, moment and fp32 copy is that of the checkpoint, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.layouts import distance
from tests.support.stages import Stage, equal_checkpoints, run_stages, saved_states, saved_weights

TOLERANCE = 1e-5
STEPS = 10
# Layouts in turn, two steps in each.
CHAINS: dict[str, tuple[str, ...]] = {
    "processes": ("torch-1", "torch-2", "torch-4", "torch-1"),
    "2 to 3": ("zero2-2", "zero3-2"),
    "3 to 2 to torch": ("zero3-2", "zero2-4", "torch-1"),
    "1 to 3 offloaded": ("zero1-2", "zero3-offload-2", "zero2-offload-2"),
    "torch to 3": ("torch-1", "zero3-2"),
    "sequence to data": ("sequence2", "torch-2"),
    "data to sequence": ("zero2-2", "sequence2-zero3"),
    # Two rates, and so two of the optimizer's groups.
    "parts": ("merger+language-zero2-2", "merger+language-zero3-2", "merger+language-torch-1"),
    "lora": ("lora-zero2-2", "lora-zero3-2", "lora-torch-1", "lora-torch-2"),
}
BF16_CHAINS = {
    "bf16": ("bf16-zero1-2", "bf16-zero3-2", "bf16-torch-1", "bf16-zero2-2"),
    "bf16 lora": ("bf16-lora-torch-1", "bf16-lora-zero3-2", "bf16-lora-zero2-2", "bf16-lora-torch-1"),
}
# How layouts that train the same thing are called in common; each is compared with that of one process.
ORACLES = ("lora-", "merger+language-", "")
RESUMED_ALIKE = ("torch-1", "torch-2", "zero2-2", "zero3-2")


def stages_of(name: str, layouts: tuple[str, ...]) -> list[Stage]:
    """Before each stage but the first, the checkpoint is loaded and saved again as it is (``...-as-it-is``)."""
    stages: list[Stage] = []
    for number, layout in enumerate(layouts):
        start = stages[-1].saved if stages else None
        if start is not None:
            stages.append(Stage(f"{name}-{number}-as-it-is", layout, 2 * number, 2 * number, start))
        stages.append(Stage(f"{name}-{number}", layout, 2 * number, 2 * number + 2, start))
    return stages


def check_loaded_exactly(stages: list[Stage], folder: Path) -> None:
    loaded = [stage for stage in stages if stage.first == stage.last]
    differ = {stage.name: equal_checkpoints(folder / str(stage.start), folder / stage.saved) for stage in loaded}
    assert loaded and not any(differ.values()), differ


@pytest.mark.matrix
def test_states_pass_between_layouts(tmp_path: Path) -> None:
    """A sample: ZeRO-2 and ZeRO-3 exchange states, and the run goes on in each bit for bit."""
    stages = [
        Stage("whole", "zero2-2", 0, 2, each=True),
        Stage("again", "zero2-2", 1, 2, "whole-1"),
        Stage("as-it-is", "zero3-2", 1, 1, "whole-1"),
        Stage("three", "zero3-2", 1, 2, "whole-1"),
        Stage("back", "torch-2", 2, 2, "three-2"),
    ]
    run_stages(stages, tmp_path)
    assert not equal_checkpoints(tmp_path / "whole-2", tmp_path / "again-2")
    assert not equal_checkpoints(tmp_path / "whole-1", tmp_path / "as-it-is-1")
    assert not equal_checkpoints(tmp_path / "three-2", tmp_path / "back-2")
    assert_near(tmp_path / "three-2", tmp_path / "whole-2")


def assert_near(found: Path, expected: Path) -> None:
    """Relative to the largest element of each; B of an adapter begins at zero and is nothing but gradients."""
    weights, states = saved_weights(expected), saved_states(expected)
    apart = distance(saved_weights(found), weights)
    far = {name: value for name, value in apart.items() if not value <= TOLERANCE * (10 if "lora_B" in name else 1)}
    assert not far, far
    # Moments are sums of gradients, those of key biases nothing but rounding.
    of_states = saved_states(found)
    largest = max(float(state.abs().max()) for (_, kind), state in states.items() if kind == "exp_avg")
    for (name, kind), state in states.items():
        size = max(float(state.norm()), 1e-4 * largest if kind == "exp_avg" else 1e-8 * largest**2)
        assert float((of_states[name, kind] - state).norm()) <= 1e-3 * size, (name, kind)
    print(f"{found.name}: largest relative difference of a weight {max(apart.values()):.1e}")


@pytest.mark.matrix
def test_chains_of_layouts_train_what_one_layout_trains(tmp_path: Path) -> None:
    longest = max(map(len, CHAINS.values()))
    oracles = [Stage(f"oracle-{name}", f"{name}torch-1", 0, 2 * longest, each=True) for name in ORACLES]
    stages = [stage for name, layouts in CHAINS.items() for stage in stages_of(name, layouts)]
    run_stages([*oracles, *sorted(stages, key=lambda stage: stage.first)], tmp_path)
    check_loaded_exactly(stages, tmp_path)
    for stage in stages:
        if stage.first < stage.last:
            oracle = next(prefix for prefix in ORACLES if stage.layout.startswith(prefix))
            assert_near(tmp_path / stage.saved, tmp_path / f"oracle-{oracle}-{stage.last}")


@pytest.mark.matrix
def test_fp32_copies_of_bf16_weights_pass_between_layouts(tmp_path: Path) -> None:
    """What the steps add is rounded otherwise in every layout; what is loaded is not."""
    stages = [stage for name, layouts in BF16_CHAINS.items() for stage in stages_of(name, layouts)]
    run_stages(sorted(stages, key=lambda stage: stage.first), tmp_path)
    check_loaded_exactly(stages, tmp_path)
    kinds = {kind for _, kind in saved_states(tmp_path / stages[-1].saved)}
    assert kinds == {"master", "exp_avg", "exp_avg_sq"}
    masters = {name: state for (name, kind), state in saved_states(tmp_path / stages[-1].saved).items()}
    assert any(not torch.equal(state, state.bfloat16().float()) for state in masters.values())


@pytest.mark.matrix
@pytest.mark.parametrize("layout", RESUMED_ALIKE)
def test_resumed_after_any_step_the_end_is_the_same_bit_for_bit(layout: str, tmp_path: Path) -> None:
    stages = [Stage("whole", layout, 0, STEPS, each=True)]
    stages += [Stage(f"from-{step}", layout, step, STEPS, f"whole-{step}") for step in range(1, STEPS)]
    run_stages(stages[:1], tmp_path)
    run_stages(stages[1:], tmp_path)
    differ = {stage.name: equal_checkpoints(tmp_path / "whole-10", tmp_path / stage.saved) for stage in stages[1:]}
    assert len(differ) == STEPS - 1 and not any(differ.values()), differ
