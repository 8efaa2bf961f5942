"""What a decode step asks of a GPU: weights, keys and values once, and one look at the device.

A step's counts are linear in the number of layers, so two small numbers of them give those of the whole model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from scripts.bench.counting import fake_mode, fake_policy
from scripts.bench.decode import count_decoding
from scripts.bench.models import config_of, model_of
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.bench import case as cases
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.plan.shape import PUBLISHED
from vlm_pg.rollout.admission import TokenCosts
from vlm_pg.rollout.graphs import DecodeGraph
from vlm_pg.rollout.ragged import OwnRows

pytestmark = pytest.mark.usefixtures("thawed")

RESPONSE, LONGEST = 300, 512
H100_MULTIPROCESSORS = 132
SHAPES = [(prefix, generations) for prefix in (4096, 16384, 65536) for generations in (8, 32)]
NAMES = ("Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3.5-9B")
# What is nearest to the bound always, the rest in the matrix.
POINTS = [
    pytest.param(name, *shape, marks=[] if shape == (16384, 32) else pytest.mark.matrix)
    for name in NAMES
    for shape in SHAPES
]
# Of a layer with attention four are products; the rest: queries, keys and values put where they are read, attention to
# own tokens and to the prompt, their merging, two sums with norms, and a gate.
# Of the third most layers are linear.
LAUNCHES = {"Qwen2.5-VL-7B": 11, "Qwen3-VL-8B": 11, "Qwen3.5-9B": 32}
# What is beyond the least: queries that are repeated for the pieces of a prompt, the pieces' results, and each operand
# between two kernels.
BOUNDS = {"Qwen2.5-VL-7B": 1.065, "Qwen3-VL-8B": 1.065, "Qwen3.5-9B": 1.07}
# Layers are alike in so many at a time: of Qwen3.5's four the last attends to all tokens.
ALIKE = {"Qwen2.5-VL-7B": 1, "Qwen3-VL-8B": 1, "Qwen3.5-9B": 4}

pytest.importorskip("triton")


@dataclass(frozen=True)
class Step:
    """A step's bytes, the least possible, its kernels and waits."""

    bytes: float
    least: float
    launches: float
    waits: Counter[str]

    @property
    def ratio(self) -> float:
        return self.bytes / self.least


def least_step_bytes(policy: Policy, prefix: int, generations: int, response: int) -> int:
    """The minimum: each weight and each key and value read once, the new ones and the logits written.

    States of linear-attention layers are read and written. Of the embedding one row a rollout is read, unless its
    weights are the output head's too. Tokens of a response are ``response`` old ones and the one whose hidden state is
    computed.
    """
    model = policy.model
    weights = {id(w): w for w in [*policy.language_model.parameters(), *model.lm_head.parameters()]}
    embedding = policy.language_model.embed_tokens.weight
    if embedding is not model.lm_head.weight:
        del weights[id(embedding)]
    read = sum(weight.nbytes for weight in weights.values()) + generations * embedding[0].nbytes
    costs = TokenCosts.of(policy)
    keys_values = costs.per_token * (prefix + generations * (response + 1)) + 2 * generations * costs.per_state
    return read + keys_values + generations * policy.vocab_size * policy.dtype.itemsize


def qwen3_vl(layers: int) -> Any:
    config = config_of("Qwen3-VL-8B")
    config.get_text_config().num_hidden_layers = layers
    config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 1, [0]
    return model_of(config, torch.bfloat16)


def qwen2_5_vl(layers: int) -> Any:
    whole = cases.SIZES["7b"]
    cases.SIZES["7b"] = replace(whole, layers=layers)
    try:
        return cases.random_model("7b", dtype=torch.bfloat16)
    finally:
        cases.SIZES["7b"] = whole


def _read_at_once(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    """In place of transformers' loop over chunks of 64 tokens: results of its shapes. What a step costs is the same."""
    heads, state = value.shape[2], (key.shape[-1], value.shape[-1])
    after = torch.empty(len(value), heads, *state) if options.get("output_final_state") else None
    return torch.empty_like(value), after


def qwen3_5(layers: int) -> Any:
    config = config_of("Qwen3.5-9B")
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = layers, text.layer_types[:layers]
    config.vision_config.depth = 1
    model = model_of(config, torch.bfloat16)
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            module.chunk_gated_delta_rule = _read_at_once
    return model


MODELS = {"Qwen2.5-VL-7B": qwen2_5_vl, "Qwen3-VL-8B": qwen3_vl, "Qwen3.5-9B": qwen3_5}


def counted(name: str, layers: int, prefix: int, generations: int, share: bool = True) -> Step:
    fakes, kernel = fake_mode(), CudaFlashKernel()
    kernel.multiprocessors = H100_MULTIPROCESSORS
    settings = ModelSettings(path=name, dtype="bf16", share_prefix=share)
    policy = fake_policy(partial(MODELS[name], layers), settings, fakes, kernel)
    step = count_decoding(policy, fakes, prefix, generations, RESPONSE, LONGEST).step
    least = least_step_bytes(policy, prefix, generations, RESPONSE)
    return Step(step.bytes.total(), least, step.launches.total(), step.waits)


def whole_model(name: str, prefix: int, generations: int, share: bool = True) -> Step:
    alike = ALIKE[name]
    times = PUBLISHED[name].layers // alike
    one, two = (counted(name, alike * count, prefix, generations, share) for count in (1, 2))
    assert one.waits == two.waits

    def at(first: float, second: float) -> float:
        return first + (times - 1) * (second - first)

    return Step(at(one.bytes, two.bytes), at(one.least, two.least), at(one.launches, two.launches), two.waits)


@pytest.mark.parametrize("name, prefix, generations", POINTS)
def test_a_step_reads_everything_once(name: str, prefix: int, generations: int) -> None:
    step = whole_model(name, prefix, generations)
    assert 1.0 < step.ratio <= BOUNDS[name]
    assert step.launches <= LAUNCHES[name] * PUBLISHED[name].layers + 40
    # The new tokens, which say who has finished.
    assert step.waits.total() == 1 and [where.split(" ")[1] for where in step.waits] == ["_sample"]


def test_few_launches_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host launches for a token beside the graph: sampling, and what the next step reads."""

    def replayed(graph: DecodeGraph) -> None:
        width = graph._policy.model.config.get_text_config().hidden_size
        graph._hidden = torch.empty(len(graph._tokens), width, dtype=torch.bfloat16)

    monkeypatch.setattr(DecodeGraph, "_forward", replayed)
    assert counted("Qwen2.5-VL-7B", 1, 4096, 8).launches == 17


def test_the_least_by_hand() -> None:
    """One layer of Qwen2.5-VL-7B, a prompt of 1,000 tokens, 2 rollouts of 100 tokens and a new one."""
    layer = 3584 * 3584 * 2 + 3584 * 512 * 2 + 3 * 3584 * 18944  # q and o, k and v, gate, up and down
    small = (3584 + 512 * 2) + 2 * 3584 + 3584  # biases, norms of the layer and the last one
    head = 152064 * 3584
    keys_values = 2 * 512 * (1000 + 2 * 101)
    settings = ModelSettings(path="7b", dtype="bf16")
    policy = fake_policy(partial(qwen2_5_vl, 1), settings, fake_mode(), CudaFlashKernel())
    expected = 2 * (layer + small + head + 2 * 3584 + keys_values + 2 * 152064)
    assert least_step_bytes(policy, 1000, 2, 100) == expected


def test_a_copied_cache_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = OwnRows.slots
    monkeypatch.setattr(OwnRows, "slots", lambda *args: tuple(x.clone() for x in slots(*args)))
    assert whole_model("Qwen2.5-VL-7B", 4096, 32).ratio > 1.15


def test_another_wait_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = OwnRows.slots

    def waiting(rows: OwnRows, layer_index: int) -> Any:
        found = slots(rows, layer_index)
        assert found[0].sum().item() == 0
        return found

    monkeypatch.setattr(OwnRows, "slots", waiting)
    waits = counted("Qwen2.5-VL-7B", 2, 64, 2).waits
    (where,) = (where for where in waits if not where.endswith(" _sample"))
    assert where.endswith(" waiting") and waits[where] == 2  # once a layer


def test_a_repeated_prefix_shows() -> None:
    assert whole_model("Qwen2.5-VL-7B", 4096, 32, share=False).ratio > 1.4


def test_a_wide_copy_of_weights_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = functional.linear
    monkeypatch.setattr(
        functional,
        "linear",
        lambda x, weight, bias=None: (
            linear(x.float(), weight.float()).to(x.dtype) if weight.shape[0] == 152064 else linear(x, weight, bias)
        ),
    )
    assert whole_model("Qwen2.5-VL-7B", 4096, 8).ratio > 1.2


@pytest.mark.matrix
def test_counts_are_linear_in_layers() -> None:
    expected, got = whole_model("Qwen2.5-VL-7B", 4096, 8), counted("Qwen2.5-VL-7B", 28, 4096, 8)
    assert (expected.bytes, expected.least, expected.launches) == (got.bytes, got.least, got.launches)
