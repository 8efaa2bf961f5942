"""Token by token from a group's state, a linear-attention layer gives what it gives over the whole tree."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_recurrent_gated_delta_rule

from tests.support.tiny import tiny_model
from vlm_pg.models.linear_attention import LinearLayout, LinearStates, linear_attention_over_tree, route_linear_layers
from vlm_pg.rollout import linear_step
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.linear_step import (
    DeltaRule,
    RowStates,
    delta_rule_for,
    gated_delta_step_,
    linear_attention_step,
    linear_attention_step_,
)
from vlm_pg.rollout.ragged import OwnStates

# Shorter than the convolution, about a chunk of the chunked rule, and beyond it.
PREFIX_LENGTHS = (2, 9, 64, 70)
ROLLOUTS_PER_GROUP = 2
NUM_TOKENS = 6


def tiny_mixer(family: str) -> Any:
    language_model = tiny_model(family).model.language_model
    route_linear_layers(language_model)
    return language_model.layers[0].linear_attn


@torch.no_grad()
def over_tree(mixer: Any, prefixes: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, LinearStates]:
    """Outputs [rollouts, tokens, D] of the rollouts' own tokens, and the states at the end of the prefixes."""
    groups = len(PREFIX_LENGTHS)
    lengths = [*PREFIX_LENGTHS, *[NUM_TOKENS] * own.shape[0]]
    parents = [-1] * groups + [group for group in range(groups) for _ in range(ROLLOUTS_PER_GROUP)]
    layout = LinearLayout(lengths, parents, (), own.device)
    out, states = linear_attention_over_tree(mixer, torch.cat([prefixes, own.flatten(0, 1)]), layout)
    ends = LinearStates(states.conv_tail[:groups], states.recurrent[:groups])
    return out[len(prefixes) :].unflatten(0, own.shape[:2]), ends


def random_hidden(mixer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    prefixes = torch.randn(sum(PREFIX_LENGTHS), mixer.hidden_size, generator=generator)
    rollouts = len(PREFIX_LENGTHS) * ROLLOUTS_PER_GROUP
    return prefixes, torch.randn(rollouts, NUM_TOKENS, mixer.hidden_size, generator=generator)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_steps_equal_the_whole_tree(family: str) -> None:
    mixer = tiny_mixer(family)
    prefixes, own = random_hidden(mixer)
    expected, ends = over_tree(mixer, prefixes, own)
    of_group = torch.arange(len(PREFIX_LENGTHS)).repeat_interleave(ROLLOUTS_PER_GROUP)
    states = LinearStates(ends.conv_tail[of_group], ends.recurrent[of_group])
    first, before = states, (states.conv_tail.clone(), states.recurrent.clone())
    for token in range(NUM_TOKENS):
        out, states = linear_attention_step(mixer, own[:, token], states)
        assert (out - expected[:, token]).abs().max() < 1e-5 * expected.abs().max()
    # Given states are left as they are: they may be a group's, from which all its rollouts start.
    assert torch.equal(first.conv_tail, before[0]) and torch.equal(first.recurrent, before[1])
    fresh = LinearStates(torch.zeros_like(states.conv_tail), torch.zeros_like(states.recurrent))
    without, _ = linear_attention_step(mixer, own[:, 0], fresh)
    assert (without - expected[:, 0]).abs().max() > 0.01 * expected.abs().max(), "the prefix should matter"


# They move nothing: views that are not called so, and a question about a device.
_NO_KERNEL = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::empty_like", "prim::device")


class TrafficBytes(TorchDispatchMode):
    """Bytes that operators read and write, each tensor once an operator; what is repeated by strides is read once.

    Args:
        least: tensors of fewer bytes do not count.
    """

    def __init__(self, least: int = 0):
        super().__init__()
        self._least, self.read, self.written = least, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name in _NO_KERNEL:
            return out
        # What an operator changes without returning it, as an operator of one's own does, is written as well.
        for index, argument in enumerate(func._schema.arguments):
            given = args[index] if index < len(args) else (kwargs or {}).get(argument.name)
            changed = argument.alias_info is not None and argument.alias_info.is_write
            if not (changed and func._schema.name == "aten::copy_"):
                self.read += self._bytes(given)
            if changed:
                self.written += self._bytes(given)
        if not any(argument.alias_info is not None for argument in func._schema.returns):
            self.written += self._bytes(out)
        return out

    def _bytes(self, tree: Any) -> int:
        sizes = [
            min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            for x in tree_leaves(tree)
            if isinstance(x, torch.Tensor)
        ]
        return sum(size for size in sizes if size >= self._least)


@pytest.mark.parametrize("rule, passes, rows", [("triton", 2, 8), ("torch", 5, 32)])
@torch.no_grad()
def test_a_layer_moves_little_beside_its_weights_and_states(rule: str, passes: int, rows: int) -> None:
    """Qwen3.5-9B's layer in bf16: bytes of all operators, states counted as often as the rule moves them."""
    if rule == "triton":
        pytest.importorskip("triton")
        from vlm_pg.rollout.fused.delta_rule import gated_delta_step_ as step_
    else:
        step_ = gated_delta_step_  # type: ignore[assignment]
    sizes = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    config = Qwen3_5TextConfig(hidden_size=4096, linear_key_head_dim=128, linear_value_head_dim=128, **sizes)
    with FakeTensorMode():
        mixer = Qwen3_5GatedDeltaNet(config, 0)
        for name, weight in mixer.named_parameters():
            module = mixer.get_submodule(name.rpartition(".")[0])
            setattr(module, name.rpartition(".")[2], torch.nn.Parameter(weight.bfloat16()))
        route_linear_layers(torch.nn.ModuleList([mixer]))
        states = RowStates(torch.empty(rows, 8192, 3, dtype=torch.bfloat16), torch.empty(rows, 32, 128, 128))
        with TrafficBytes() as moved:
            linear_attention_step_(mixer, torch.empty(rows, 4096, dtype=torch.bfloat16), states, step_)
    weights = 2 * sum(weight.numel() for weight in mixer.parameters())
    # 4 bytes a number of a state, 2 of an input of the convolution, which is read and written.
    least = weights + passes * rows * 32 * 128 * 128 * 4 + 2 * rows * 8192 * 3 * 2
    assert least <= moved.read + moved.written < 1.1 * least


LAYER = 2


def stored(*values: float) -> PrefixStore:
    """Node i: convolution inputs [v, v + 1, v + 2] in each of 4 channels, and a state full of v."""
    store = PrefixStore()
    for node, value in enumerate(values):
        tail = (value + torch.arange(3.0))[None, :, None].expand(1, 3, 4)
        store.write_states(LAYER, node, LinearStates(tail, torch.full((1, 2, 5, 6), value)))
    return store


def first_values(states: OwnStates) -> list[float]:
    return states[LAYER].recurrent[:, 1, 2, 3].tolist()


def test_rows_start_from_the_ends_of_their_prompts_and_move_together() -> None:
    states, store = OwnStates(torch.device("cpu")), stored(10.0, 20.0)
    states.move([], 4)
    states.start([0, 1, 2], [1, 0, 1], store)
    assert first_values(states) == [20.0, 10.0, 20.0, 0.0], "an idle row is finite"
    assert states[LAYER].inputs[:, 3].tolist() == [[20, 21, 22], [10, 11, 12], [20, 21, 22], [0, 0, 0]]
    assert states[LAYER].recurrent.shape == (4, 2, 5, 6) and states[LAYER].recurrent.dtype == torch.float32
    states[LAYER].recurrent[2] = 7.0
    assert store.states[LAYER][1].recurrent.unique().tolist() == [20.0], "rows are copies"
    before = states[LAYER]
    states.move([1, 2], 8)
    states.start([2], [1], store)
    assert first_values(states) == [10.0, 7.0, 20.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert before.recurrent.shape[0] == 4, "the old ones stay for pending readers"
    states.move([], 0)
    assert states[LAYER].inputs.shape == (0, 4, 3)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_rows_in_place_step_as_rollouts_do(family: str) -> None:
    """Against the whole tree and against transformers' recurrent rule; an idle row does not disturb, nor explode."""
    mixer = tiny_mixer(family)
    prefixes, own = random_hidden(mixer)
    expected, ends = over_tree(mixer, prefixes, own)
    of_rollout = [group for group in range(len(PREFIX_LENGTHS)) for _ in range(2)]
    copies = LinearStates(ends.conv_tail[of_rollout], ends.recurrent[of_rollout])
    store, states = PrefixStore(), OwnStates(torch.device("cpu"))
    for node in range(len(PREFIX_LENGTHS)):
        store.write_states(LAYER, node, LinearStates(ends.conv_tail[node, None], ends.recurrent[node, None]))
    states.move([], 10)
    states.start(range(8), of_rollout, store)
    states[LAYER].recurrent[8], states[LAYER].inputs[8] = 1e30, -1e30
    addresses = [part.data_ptr() for part in (states[LAYER].inputs, states[LAYER].recurrent)]
    for token in range(NUM_TOKENS):
        hidden = torch.cat([own[:, token], torch.full((2, own.shape[2]), 1e4)])
        out = linear_attention_step_(mixer, hidden, states[LAYER], gated_delta_step_)
        assert (out[:8] - expected[:, token]).abs().max() < 1e-5 * expected.abs().max()
        from_copies, copies = linear_attention_step(mixer, own[:, token], copies)
        assert (out[:8] - from_copies).abs().max() < 1e-6 * expected.abs().max()
        assert (states[LAYER].recurrent[:8] - copies.recurrent).abs().max() < 1e-6 * copies.recurrent.abs().max()
        assert torch.equal(states[LAYER].inputs[:8].transpose(1, 2), copies.conv_tail)
    assert [part.data_ptr() for part in (states[LAYER].inputs, states[LAYER].recurrent)] == addresses
    for _ in range(500):
        out = linear_attention_step_(mixer, hidden, states[LAYER], gated_delta_step_)
    assert bool(out.isfinite().all()) and bool(states[LAYER].recurrent.isfinite().all())


ROWS, HEADS, KEY, VALUE = 3, 4, 16, 24


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Query, key, value, logarithm of the decay, beta."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(ROWS, HEADS, size, generator=generator).to(dtype) for size in (KEY, KEY, VALUE))
    log_decay, beta = (torch.rand(ROWS, HEADS, generator=generator) for _ in range(2))
    return query, key, value, -4 * log_decay, beta.to(dtype)


def random_state() -> torch.Tensor:
    return torch.randn(ROWS, HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(2))


def transformers_rule(state: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, log_decay, beta = (part[:, None] for part in parts)
    named = {"g": log_decay, "beta": beta, "initial_state": state}
    flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, after = torch_recurrent_gated_delta_rule(query, key, value, **named, **flags)
    return out[:, 0], after


def test_a_token_by_hand() -> None:
    """Key (3, 4) has length 5 and query (0, 2) length 2; half of the state is forgotten, half of the error learned."""
    state = torch.tensor([[10.0, 0.0], [0.0, 20.0]])[None, None]
    query, key, value = (torch.tensor([[numbers]]) for numbers in ([0.0, 2.0], [3.0, 4.0], [13.0, 18.0]))
    log_decay, beta = torch.tensor([[math.log(0.5)]]), torch.tensor([[0.5]])
    out = gated_delta_step_(state, query, key, value, log_decay, beta)
    # k = (0.6, 0.8). Decayed: [[5, 0], [0, 10]]; read: (3, 8); delta: ((13 - 3) / 2, (18 - 8) / 2) = (5, 5).
    expected = torch.tensor([[5.0 + 3.0, 3.0], [4.0, 10.0 + 4.0]])
    assert torch.allclose(state[0, 0], expected, rtol=1e-6)
    # q = (0, 1) / sqrt(2): the second row.
    assert torch.allclose(out[0, 0], torch.tensor([4.0, 14.0]) / math.sqrt(2.0), rtol=1e-6)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_many_tokens_are_transformers(dtype: torch.dtype, bound: float) -> None:
    """In bf16 transformers rounds the output, and nothing else."""
    state, expected_state = random_state(), random_state()
    parts = operands(dtype)
    for token in range(50):
        rolled = tuple(part.roll(token, dims=1) for part in parts)
        out = gated_delta_step_(state, *rolled)
        expected, expected_state = transformers_rule(expected_state, *rolled)
        assert (out - expected.float()).abs().max() < bound * expected.abs().max()
        assert (state - expected_state).abs().max() < 2e-6 * expected_state.abs().max()


def test_autocast_does_not_round_the_state() -> None:
    state, expected = random_state(), random_state()
    gated_delta_step_(expected, *operands())
    with torch.autocast("cpu", torch.bfloat16):
        gated_delta_step_(state, *operands())
    assert torch.equal(state, expected)


def traffic(rule: Any) -> tuple[int, int]:
    state, parts = random_state(), operands()
    with TrafficBytes(least=4 * state.numel()) as counted:
        rule(state, *parts)
    size = 4 * state.numel()
    return counted.read // size, counted.written // size


def test_a_state_is_read_three_times_and_written_twice() -> None:
    """transformers' torch code reads tensors of its size seven times and writes five (5.23)."""
    assert traffic(gated_delta_step_) == (3, 2)
    assert traffic(transformers_rule) > (5, 3)


def test_the_triton_kernel_gives_what_torch_gives() -> None:
    """In Triton's interpreter; torch's operators give what transformers gives, see above."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.support.interpreted_delta"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == 4 and max(errors) < 2e-6


def without_decay(state: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    value, log_decay, beta = rest
    return gated_delta_step_(state, query, key, value, 0.0 * log_decay, beta)


def test_a_rule_is_compared_before_it_is_used() -> None:
    cpu = torch.device("cpu")
    assert linear_step._difference(gated_delta_step_, cpu, KEY, VALUE) is None
    assert "differs from torch's operators by" in str(linear_step._difference(without_decay, cpu, KEY, VALUE))
    unknown = linear_step._difference(lambda *parts: gated_delta_step_(*parts) * torch.nan, cpu, KEY, VALUE)
    assert "by nan" in str(unknown)


def test_the_triton_kernel_is_taken_where_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    choose = delta_rule_for.__wrapped__
    assert choose(torch.device("cpu"), KEY, VALUE) == DeltaRule("torch", gated_delta_step_)

    def no_compiler(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    cuda, found = torch.device("cuda", 0), {}
    for case, compared in {"same": lambda *_: None, "other": lambda *_: "differs", "broken": no_compiler}.items():
        monkeypatch.setattr(linear_step, "_difference", compared)
        found[case] = choose(cuda, KEY, VALUE)
    assert found["same"].name == "triton" and found["same"].step_ is not gated_delta_step_
    assert found["other"] == DeltaRule("torch (Triton kernel: differs)", gated_delta_step_)
    assert found["broken"].name == "torch (Triton kernel: RuntimeError: Failed to find C compiler.)"
