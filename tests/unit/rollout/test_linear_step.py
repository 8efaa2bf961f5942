"""Token by token from a group's state, a linear-attention layer gives what it gives over the whole tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tests.support.tiny import tiny_model
from tests.support.traffic import TrafficBytes
from vlm_pg.models.linear_attention import LinearLayout, LinearStates, linear_attention_over_tree, route_linear_layers
from vlm_pg.rollout.linear_step import RowStates, gated_delta_step_, linear_attention_step, linear_attention_step_

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
    for token in range(NUM_TOKENS):
        out, states = linear_attention_step(mixer, own[:, token], states)
        assert (out - expected[:, token]).abs().max() < 1e-5 * expected.abs().max()
    fresh = LinearStates(torch.zeros_like(states.conv_tail), torch.zeros_like(states.recurrent))
    without, _ = linear_attention_step(mixer, own[:, 0], fresh)
    assert (without - expected[:, 0]).abs().max() > 0.01 * expected.abs().max(), "the prefix should matter"


@torch.no_grad()
def test_given_states_are_left_as_they_are() -> None:
    """They may be a group's, from which all its rollouts start."""
    mixer = tiny_mixer("qwen3_5")
    prefixes, own = random_hidden(mixer)
    _, ends = over_tree(mixer, prefixes, own)
    before = ends.conv_tail.clone(), ends.recurrent.clone()
    _, after = linear_attention_step(mixer, own[: len(PREFIX_LENGTHS), 0], ends)
    assert torch.equal(ends.conv_tail, before[0]) and torch.equal(ends.recurrent, before[1])
    assert after.recurrent.dtype == torch.float32
    assert after.conv_tail.shape == ends.conv_tail.shape and after.recurrent.shape == ends.recurrent.shape


@pytest.mark.parametrize("rule, passes, rows", [("triton", 2, 8), ("triton", 2, 32), ("torch", 5, 32)])
@torch.no_grad()
def test_a_layer_moves_little_beside_its_weights_and_states(rule: str, passes: int, rows: int) -> None:
    """Qwen3.5-9B's layer in bf16: bytes of all operators, states counted as often as the rule moves them."""
    if rule == "triton":
        pytest.importorskip("triton")
        from vlm_pg.rollout.fused.delta_rule import gated_delta_step_ as step_
    else:
        step_ = gated_delta_step_  # type: ignore[assignment]
    config = Qwen3_5TextConfig(
        hidden_size=4096,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
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
    assert least <= moved.total < 1.1 * least
