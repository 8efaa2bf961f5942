"""The choice of ``auto``, from sizes and free memory alone, and its line."""

from __future__ import annotations

import errno
import gc
import os
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.support.live_bytes import LiveBytes
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.bench.case import text_prompt
from vlm_pg.errors import ModelError
from vlm_pg.memory import GIB
from vlm_pg.models import offloading
from vlm_pg.models.loading import make_policy
from vlm_pg.models.memory_choice import Need, decide, smallest
from vlm_pg.models.memory_sizes import LanguageShape, LanguageSizes, TowerShape, TowerSizes
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.offloading import FileOnDisk, HostMemory, OffloadLane, offload_target, pinned_pieces
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import PARTS, ModelSettings
from vlm_pg.models.stream_memory import MemoryChoice, RowTiles
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.types import Prompt, ResponseGroup

# Qwen2.5-VL-7B in bf16.
LANGUAGE = LanguageSizes(LanguageShape(3584, 28, 28, 4, 128, 18944, 152064), element=2)
TOWER = TowerSizes(TowerShape(32, 1280, 3420, patches_per_token=4, pixels=1176, out=3584), element=2)
HOUR = 230_000


def settings(**values: object) -> ModelSettings:
    return ModelSettings.model_validate({"path": "x", "gradient_checkpointing": True} | values)


def need(free_gib: float, rows: int = HOUR, tower: TowerSizes | None = TOWER) -> Need:
    return Need(LANGUAGE, tower, rows, rows, int(free_gib * GIB), "cuda:0")


def test_sizes_of_an_hour() -> None:
    """As one counts by hand: 28 x 3,584 numbers of 2 bytes a token, and 56 KiB a token of keys and values."""
    assert LANGUAGE.layer_inputs(1) == 28 * 3584 * 2
    assert LANGUAGE.keys_values(1) == 56 * 1024
    assert LANGUAGE.gradient_sums(1) == 2 * LANGUAGE.keys_values(1)
    assert LANGUAGE.attention_results(1) == 28 * (3584 * 2 + 28 * 4)
    everything = MemoryChoice(True, True, 4096, 0)
    assert LANGUAGE.offloaded(HOUR, everything) / GIB == pytest.approx(43 + 43.7 + 12.3 + 24.6, rel=0.01)


def test_what_fits_stays_as_it_is() -> None:
    decision = decide(settings(), need(1000))
    assert decision.choice == MemoryChoice() and decision.fits
    assert decision.line.startswith("memory: 1,000.0 GiB free on cuda:0; a stream of 230,000 tokens needs about ")
    assert decision.line.endswith(": nothing is offloaded or split")


def test_measures_come_one_by_one_and_are_named() -> None:
    """Less free memory, more measures; each set holds the one before it."""
    choices = [decide(settings(), need(free, tower=None)).choice for free in range(400, 20, -2)]
    counts = [bool(c.mlp_tile_rows) + c.offload_layer_inputs + c.offload_prefix_states for c in choices]
    assert counts == sorted(counts) and set(counts) == {0, 1, 2, 3}
    assert all(c.mlp_tile_rows for c, count in zip(choices, counts, strict=True) if count)
    line = decide(settings(), need(70)).line
    assert "layer inputs offloaded (auto), keys and values of prefixes offloaded (auto)" in line
    assert "MLPs in tiles of 4,096 rows (auto)" in line and "GiB offloaded; the stream then needs " in line


def test_an_hour_fits_one_gpu() -> None:
    """What 80 GB leave beside weights and moments of an adapter."""
    decision = decide(settings(), need(62))
    assert decision.fits, decision.line
    assert decision.choice.offload_layer_inputs and decision.choice.mlp_tile_rows
    assert not decide(settings(offload_layer_inputs=False), need(62)).fits


def test_given_settings_stay() -> None:
    chosen = decide(settings(mlp_tile_rows=64, offload_layer_inputs=False, vision_piece_tokens=0), need(30)).choice
    assert (chosen.mlp_tile_rows, chosen.offload_layer_inputs, chosen.vision_piece_tokens) == (64, False, 0)
    assert chosen.offload_prefix_states
    line = decide(settings(mlp_tile_rows=64), need(1000)).line
    assert "MLPs in tiles of 64 rows (as set)" in line


def test_the_smallest_choice_is_all_that_settings_allow() -> None:
    assert smallest(settings()) == MemoryChoice(True, True, 4096, 1024)
    assert smallest(settings(gradient_checkpointing=False)) == MemoryChoice(False, False, 4096, 1024)
    fixed = {"offload_layer_inputs": False, "mlp_tile_rows": 0, "vision_piece_tokens": 0}
    assert smallest(settings(**fixed)) == MemoryChoice(offload_prefix_states=True)
    assert decide(settings(), need(5, tower=None)).choice == replace(smallest(settings()), vision_piece_tokens=0)


def test_what_does_not_fit_says_what_to_change() -> None:
    assert decide(settings(), need(5)).line.endswith("That may not fit: lower training.micro_batch_tokens")
    plain = decide(settings(gradient_checkpointing=False), need(62))
    assert not plain.fits and plain.choice == replace(MemoryChoice(), mlp_tile_rows=plain.choice.mlp_tile_rows)
    assert "That may not fit: set model.gradient_checkpointing=true, or lower training.mic" in plain.line


def test_pieces_get_smaller_with_memory() -> None:
    sizes = [decide(settings(train=PARTS), need(free)).choice.vision_piece_tokens for free in (3000, 62, 30, 20)]
    assert sizes[0] == 0 and sizes[1:] == sorted(sizes[1:], reverse=True) and sizes[-1] >= 1024


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3"])
def test_sizes_of_every_family(family: str) -> None:
    config = tiny_model(family).config
    known = family_of(config)
    shape, tower = LanguageShape.of(known, config), TowerShape.of(known, config)
    assert shape.hidden == 64 and shape.full_layers == (1 if family.startswith("qwen3_5") else shape.layers)
    assert shape.intermediate == {"qwen3_vl_moe": 64, "qwen3_5_moe": 96}.get(family, 128)
    if family == "qwen3":
        assert tower is None
    else:
        assert tower is not None and tower.blocks == 2 and tower.hidden == 32 and tower.intermediate == 64
        assert tower.out == 64 * (3 if family == "qwen3_vl_moe" else 1)


def test_settings_without_effect_are_refused() -> None:
    for name in ("offload_layer_inputs", "offload_prefix_states"):
        with pytest.raises(ValidationError, match=f"model.{name} is true and model.gradient_checkpointing is false"):
            ModelSettings.model_validate({"path": "x", name: True})


FRAME_TOKENS = 16
ROWS = 256


def policy_of(choice: MemoryChoice, family: str = "qwen2", train_vision: bool = False, **text: int) -> Policy:
    # Blocks of a trained tower are not recomputed by themselves: a piece has to be.
    settings = ModelSettings(
        path="tiny", train=PARTS if train_vision else ("language",), gradient_checkpointing=not train_vision
    )
    policy = make_policy(tiny_model(family, text=text), tiny_processor(family), settings)
    policy.use_memory(choice)
    policy.stream_memory.least_bytes = 2**12
    return policy


def video(policy: Policy, frames: int) -> Prompt:
    ids = torch.full((frames * FRAME_TOKENS,), policy.model.config.video_token_id)
    ids = torch.nn.functional.pad(ids, (1, 1), value=20)
    inputs = {"input_ids": ids[None], "mm_token_type_ids": 2 * (ids != 20)[None].long()}
    inputs |= {"pixel_values_videos": torch.randn(frames * 64, 3 * 2 * 14 * 14)}
    inputs |= {"video_grid_thw": torch.tensor([[frames, 8, 8]])}
    return prompt_from_processor(inputs | {"second_per_grid_ts": [1.0]}, policy.positions, "video")


def prepare(policy: Policy) -> None:
    """Gradients of weights are there beforehand: they count as nothing."""
    policy.vision.weights_changed()
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def peak(policy: Policy, group: ResponseGroup, chunk_tokens: int | None) -> int:
    """Most bytes alive in forward and backward of one group."""
    prepare(policy)
    with LiveBytes() as live:
        backward_in_chunks(
            policy, [group], lambda chunk: torch.stack([v.sum() for _, v in chunk[0]]).sum(), chunk_tokens
        )
    return live.peak


def group_of(tokens: int) -> ResponseGroup:
    """Two answers to a long prompt; of text, so that no pixels are the largest tensor."""
    ids = torch.arange(tokens) % 300 + 20
    return ResponseGroup(text_prompt("long", ids), (torch.arange(30, 34), torch.arange(40, 44)))


def test_one_tile_of_an_mlp_is_alive() -> None:
    """An MLP 64 times as wide as a hidden state would be all there is."""
    whole, tiled = (
        policy_of(MemoryChoice(), intermediate_size=4096),
        policy_of(MemoryChoice(mlp_tile_rows=32), intermediate_size=4096),
    )
    group = group_of(256)
    assert peak(tiled, group, None) < peak(whole, group, None) / 3
    # One tile: twice as many of them need no more for their intermediates.
    one_tensor = 256 * 4096 * 4
    assert peak(tiled, group_of(512), None) - peak(tiled, group, None) < one_tensor / 2


def per_layer(choice: MemoryChoice, chunk_tokens: int | None, **text: int) -> float:
    """By how many bytes the peak grows with each further layer."""
    few, many = (policy_of(choice, num_hidden_layers=layers, **text) for layers in (3, 7))
    group = group_of(ROWS)
    return (peak(many, group, chunk_tokens) - peak(few, group, chunk_tokens)) / 4


def test_inputs_of_further_layers_take_nothing() -> None:
    one_input = ROWS * 64 * 4
    assert per_layer(MemoryChoice(), None) > one_input  # and attention's result, which is as large
    assert per_layer(MemoryChoice(offload_layer_inputs=True), None) < one_input / 8


def test_keys_and_values_of_further_layers_take_nothing() -> None:
    keys_values = 2 * ROWS * 4 * 16 * 4
    heads = {"num_key_value_heads": 4}
    inputs_away = MemoryChoice(offload_layer_inputs=True)
    all_away = MemoryChoice(offload_layer_inputs=True, offload_prefix_states=True)
    assert per_layer(inputs_away, 3, **heads) > 0.9 * keys_values
    assert per_layer(all_away, 3, **heads) < keys_values / 8


def test_one_piece_of_a_trained_tower_is_alive() -> None:
    def tower_peak(policy: Policy, frames: int) -> int:
        prompt = video(policy, frames)
        prepare(policy)
        with LiveBytes() as live:
            (features,) = policy.vision.encode([prompt], with_graph=True)
            assert features.features is not None
            features.features.sum().backward()
        return live.peak

    for family in ("qwen2_5_vl", "qwen2_vl"):
        whole = policy_of(MemoryChoice(), family, train_vision=True)
        cut = policy_of(MemoryChoice(vision_piece_tokens=2 * FRAME_TOKENS), family, train_vision=True)
        patches, outputs = 64 * 3 * 2 * 14 * 14 * 4, FRAME_TOKENS * 64 * 4
        growth = [(tower_peak(policy, 24) - tower_peak(policy, 8)) / 16 for policy in (whole, cut)]
        # Each further frame: its pixels (moved to the device in one tensor), and its outputs with their gradient.
        assert growth[1] < 1.2 * (patches + 4 * outputs) < growth[0]


def test_a_copied_module_in_tiles_has_its_own_weights() -> None:
    mlp = policy_of(MemoryChoice(mlp_tile_rows=2)).language_model.layers[0].mlp
    hidden = torch.randn(1, 7, 64)
    expected = mlp.vlm_pg_whole_forward(hidden)
    copied = deepcopy(mlp)
    for parameter in mlp.parameters():
        parameter.data.zero_()
    assert torch.allclose(copied(hidden), expected, atol=1e-6) and not mlp(hidden).any()


def test_modules_that_are_never_cut_are_left_alone() -> None:
    layer = policy_of(MemoryChoice(offload_layer_inputs=True)).language_model.layers[0]
    assert all("forward" not in vars(module) for module in (layer.mlp, layer.input_layernorm))


def test_an_mlp_that_returns_more_than_a_tensor_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"returned tuple; in tiles of rows it must be a tensor\. Set model.mlp_tile_ro"
    ):
        RowTiles(2).run(lambda rows: (rows, rows), torch.randn(5, 3))  # type: ignore[arg-type, return-value]


TENSORS = {
    "fp32": torch.randn(3, 5),
    "bf16": torch.randn(3, 5).bfloat16(),
    "int64": torch.arange(7),
    "transposed": torch.randn(3, 4, 5).transpose(0, 2),
    "with gaps": torch.randn(6, 8)[::2, 1:5],
    "expanded": torch.randn(1, 5).expand(4, 5),
    "one number": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_every_get_returns_the_tensor(tensor: torch.Tensor, tmp_path: Path) -> None:
    stored = offload_target(torch.device("cpu"), tmp_path).put(tensor)
    stored.fetch()
    for _ in range(2):
        back = stored.get()
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)
        assert back.stride() == torch.empty_like(tensor).stride() and not back.requires_grad
    assert back.data_ptr() != stored.get().data_ptr() or not tensor.numel()


class FakeStream:
    """Copies are made at once; waits are recorded."""

    def __init__(self, *_: object) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    wait_event = wait_stream

    def record_event(self) -> object:
        return object()


@pytest.fixture
def fake_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeStream, list[object]]:
    """The current stream, and those for which tensors' memory is reserved."""
    here, recorded = FakeStream(), []
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: here)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: recorded.append(stream))
    monkeypatch.setattr(offloading, "_pinned", lambda size: torch.full((size,), 77, dtype=torch.uint8))
    return here, recorded


@pytest.mark.parametrize("tensor", [*TENSORS.values(), torch.randn(70_001)], ids=[*TENSORS, "several pieces"])
def test_host_memory_on_fake_streams(tensor: torch.Tensor, fake_streams: tuple[FakeStream, list[object]]) -> None:
    here, recorded = fake_streams
    target: Any = HostMemory(torch.device("cpu"))
    stored: Any = target.put(tensor)
    assert target.offload_stream.waited == [here] and recorded == [target.offload_stream]
    for _ in range(2):
        back = stored.get()
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)
        assert back.stride() == torch.empty_like(tensor).stride()
    # The copy home begins after the one away, and is waited for where its result is used.
    assert target.prefetch_stream.waited == 2 * [stored._copied] and len(here.waited) == 2
    assert recorded == [target.offload_stream, here, here]


def test_host_memory_is_written_to_again_behind_what_reads_it(fake_streams: object) -> None:
    target: Any = HostMemory(torch.device("cpu"))
    first: Any = target.put(torch.ones(70_001))
    pieces = [piece.data_ptr() for piece in first._pieces]
    first.get(), first.get()
    last_read = first._reads[0]
    del first
    target.offload_stream.waited.clear()
    second: Any = target.put(torch.zeros(70_000))
    assert [piece.data_ptr() for piece in second._pieces] == pieces and len(pieces) > 1
    assert target.offload_stream.waited[:-1] == len(pieces) * [last_read]
    assert torch.equal(second.get(), torch.zeros(70_000))
    third: Any = target.put(torch.full((70_000,), 3.0))  # the second one is still there
    assert not {piece.data_ptr() for piece in third._pieces} & set(pieces)
    assert torch.equal(second.get(), torch.zeros(70_000)) and torch.equal(third.get(), torch.full((70_000,), 3.0))


def test_pinned_memory_is_little_more_than_what_lies_in_it() -> None:
    """torch rounds each piece up to a power of two, and finds it again by that."""
    for size in [*range(5000), 2**20 - 1, 2**20, 2**20 + 1, 940 * 2**20, 3 * 2**30 + 5, 131_072 * 3584 * 2]:
        pieces = pinned_pieces(size)
        assert all(piece.bit_count() == 1 and piece >= 4096 for piece in pieces) and len(pieces) <= 5
        assert size <= sum(pieces) <= max(size * 17 / 16, -(-size // 4096) * 4096)


def test_room_is_used_again(tmp_path: Path) -> None:
    target = FileOnDisk(tmp_path)
    first = target.put(torch.ones(8))
    for value in range(5):
        passing = target.put(torch.full((8,), float(value)))
        del passing
        gc.collect()
    assert target.size == 2 * 8 * 4
    assert torch.equal(first.get(), torch.ones(8))
    assert not list(tmp_path.iterdir())  # the file has no name


def test_a_copy_has_a_file_of_its_own(tmp_path: Path) -> None:
    target = FileOnDisk(tmp_path)
    stored = target.put(torch.ones(4))
    deepcopy(target).put(torch.zeros(4))
    assert torch.equal(stored.get(), torch.ones(4))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"No file can be made in .*nowhere.* Set model.offload_folder to a folder on"):
        FileOnDisk(tmp_path / "nowhere")


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = FileOnDisk(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        ModelError, match=r"No space left on device in .*Set model.offload_folder to a folder with more"
    ):
        target.put(torch.ones(4))


def test_writes_and_reads_may_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, values, offset: pwrite(file, values[:3], offset))
    monkeypatch.setattr(os, "preadv", lambda file, values, offset: preadv(file, [values[0][:5]], offset))
    tensor = torch.randn(11)
    assert torch.equal(FileOnDisk(tmp_path).put(tensor).get(), tensor)


class _Recorded:
    """A tensor that records its prefetches and reads."""

    def __init__(self, events: list[str], tensor: torch.Tensor):
        self._events, self._tensor = events, tensor

    def fetch(self) -> None:
        self._events.append(f"fetch {int(self._tensor[0])}")

    def get(self) -> torch.Tensor:
        self._events.append(f"get {int(self._tensor[0])}")
        return self._tensor


def test_the_layer_before_is_on_its_way() -> None:
    """A read of layer 2 prefetches its other tensors and those of layer 1, once."""
    events: list[str] = []
    target: Any = SimpleNamespace(put=partial(_Recorded, events))
    lane = OffloadLane(target, least_bytes=8)
    layers = []
    for layer in range(3):
        lane.next_layer()
        layers.append([lane.put(torch.full((4,), 10 * layer + part)) for part in range(2)])
    small = lane.put(torch.tensor([7], dtype=torch.int32))
    layers[2][0].get()
    assert sorted(events[:-1]) == ["fetch 10", "fetch 11", "fetch 21"] and events[-1] == "get 20"
    events.clear()
    layers[2][1].get()
    layers[1][0].get()
    assert "fetch 20" not in events and "fetch 21" not in events
    assert events[-1] == "get 10" and {"fetch 0", "fetch 1", "fetch 11"} <= set(events)
    events.clear()
    assert int(small.get()) == 7 and not events  # too small to be moved
