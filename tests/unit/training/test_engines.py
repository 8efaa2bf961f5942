"""Engines, and learning rates by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.groups import tiny_policy
from vlm_pg.distributed import RankLayout
from vlm_pg.errors import CheckpointError, NotFiniteError
from vlm_pg.training.engines import TorchEngine, learning_rate
from vlm_pg.training.optimizer_states import TorchStates, read_states, write_states
from vlm_pg.training.settings import TrainingSettings

SETTINGS = TrainingSettings(steps=2, learning_rate=1e-2, weight_decay=0.1)


def engine_and_parts(dtype: torch.dtype = torch.float32) -> tuple[TorchEngine, torch.nn.Parameter, torch.nn.Parameter]:
    """The engine, a weight of the tower and one of the language model."""
    policy = tiny_policy(train_vision=True, dtype=dtype)
    weights = dict(policy.model.named_parameters())
    tower = next(p for name, p in weights.items() if "visual" in name)
    language = next(p for name, p in weights.items() if "language_model.layers.0.mlp" in name)
    return TorchEngine(policy, SETTINGS), tower, language


def test_a_weight_without_a_gradient_is_updated_with_zero() -> None:
    """As in ZeRO's flat buffers, where what no backward reached is zero: momentum moves it on, decay shrinks it."""
    engine, tower, language = engine_and_parts()
    oracle = tower.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([oracle], lr=1e-2, betas=SETTINGS.betas, weight_decay=0.1)
    engine.backward(tower.sum() * 1e-4 + language.sum() * 1e-4, last=True)
    engine.step(1e-2)
    oracle.grad = torch.full_like(oracle, 1e-4)
    optimizer.step()
    before = tower.detach().clone()
    engine.backward(language.sum() * 1e-4, last=True)
    engine.step(1e-2)
    oracle.grad = torch.zeros_like(oracle)
    optimizer.step()
    assert not torch.equal(tower, before)
    torch.testing.assert_close(tower, oracle, rtol=1e-6, atol=1e-7)


def test_an_update_that_leaves_nan_ends_before_anything_reads_the_weights() -> None:
    engine, tower, language = engine_and_parts(torch.bfloat16)
    engine.backward(tower.sum() + language.sum(), last=True)
    engine.step(1e-2)
    next(piece for piece in engine.states.slices() if piece.kind == "exp_avg").values[0] = torch.nan
    engine.backward(tower.sum() + language.sum(), last=True)
    with pytest.raises(NotFiniteError, match=r"Update 2 has left NaN or infinities in 1 weights \(the first is .*\)"):
        engine.step(1e-2)
    assert engine.policy.weights_version == 1


def test_optimizer_states_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    engine, tower, language = engine_and_parts()
    engine.backward(tower.sum() + language.sum(), last=True)
    engine.step(1e-2)
    engine.save_optimizer(tmp_path)
    file = tmp_path / "optimizer" / "rank-00000-00000.safetensors"
    whole = load_file(file)
    first = next(name for name in whole if name.endswith("/exp_avg/0"))
    rest, size = {name: tensor for name, tensor in whole.items() if name != first}, whole[first].numel()
    for tensors, words in (
        (rest, f"lacks exp_avg of .* 0 to {size - 1}"),
        (whole | {first: whole[first][:-1].clone()}, f"lacks exp_avg of .* from element {size - 1} to {size - 1}"),
        (rest | {f"{first[:-1]}1": whole[first][1:].clone()}, f"lacks exp_avg of .* 0 to {size - 1}"),
        (whole | {first: whole[first].double()}, "is no run of fp32 numbers"),
        (whole | {first: whole[first][None]}, "is no run of fp32 numbers"),
    ):
        save_file(tensors, file)
        again, *_ = engine_and_parts()
        with pytest.raises(CheckpointError, match=words):
            again.load_optimizer(tmp_path)
    file.write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"rank-00000-00000\.safetensors cannot be read"):
        engine.load_optimizer(tmp_path)


def test_states_of_weights_that_do_not_lie_in_order_come_back(tmp_path: Path) -> None:
    """As of a linear layer whose weight is another one's, transposed."""
    torch.manual_seed(0)
    held = []
    for _ in range(2):
        weight = torch.nn.Parameter(torch.randn(3, 4).t())
        optimizer = torch.optim.AdamW([weight])
        held.append((weight, optimizer, TorchStates({"w": weight}, optimizer, masters=True, ranks=RankLayout())))
    weight, optimizer, states = held[0]
    weight.grad = torch.randn(4, 3)
    optimizer.step()
    write_states(tmp_path, states, RankLayout())
    again, its_optimizer, its_states = held[1]
    assert read_states(tmp_path, its_states) == 1 and not again.is_contiguous()
    assert torch.equal(again, weight)
    for kind in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(its_optimizer.state[again][kind], optimizer.state[weight][kind]), kind


def test_states_of_no_update_are_refused_behind_one(tmp_path: Path) -> None:
    engine, *_ = engine_and_parts()
    engine.save_optimizer(tmp_path)
    again, *_ = engine_and_parts()
    again.load_optimizer(tmp_path)
    again.policy.weights_changed()
    with pytest.raises(CheckpointError, match="its weights have had 1 updates"):
        again.load_optimizer(tmp_path)


def test_a_run_that_has_seen_text_only_can_be_resumed(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        engine, _, language = engine_and_parts(dtype)
        engine.backward(language.float().sum(), last=True)
        engine.step(1e-2)
        engine.save_optimizer(tmp_path)
        resumed, *_ = engine_and_parts(dtype)
        resumed.policy.load_state_dict(engine.policy.state_dict())
        resumed.load_optimizer(tmp_path)
        for each in (engine, resumed):
            parts = dict(each.policy.model.named_parameters())
            loss = sum((p.float().square().sum() for p in parts.values()), start=torch.zeros(()))
            each.backward(loss, last=True)
            each.step(1e-2)
        for ours, theirs in zip(engine.policy.parameters(), resumed.policy.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 4, "schedule": "linear"}, [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"schedule": "linear", "min_learning_rate_ratio": 0.2}, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
        ({"schedule": "cosine"}, [0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381, 0.0]),
    ],
    ids=str,
)
def test_learning_rates_of_a_schedule(settings: dict[str, object], expected: list[float]) -> None:
    training = TrainingSettings(steps=8, learning_rate=1.0, **settings)
    assert [learning_rate(training, step) for step in range(1, 9)] == pytest.approx(expected, abs=1e-4)
