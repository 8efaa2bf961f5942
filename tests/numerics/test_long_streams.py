"""Long streams with offloaded layer inputs, row tiles and tower pieces: same values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.groups import Outcome, check_equal, make_case, outcome, random_groups, tiny_policy
from vlm_pg.batching.plan import MicroBatch, chunk_responses
from vlm_pg.models.micro_batches import pack_micro_batch, run_micro_batch
from vlm_pg.models.offloading import FileOnDisk
from vlm_pg.models.packing import pack_chunk, pack_prefixes
from vlm_pg.models.policy import Policy
from vlm_pg.models.stream_memory import MemoryChoice
from vlm_pg.models.tower import pieces
from vlm_pg.types import ResponseGroup

SHAPES = {"video": [5, 1, 9], "images": [6, 20, 1], "text": [11, 4]}
INPUTS = MemoryChoice(offload_layer_inputs=True)
STATES = MemoryChoice(offload_prefix_states=True)
TILES = MemoryChoice(mlp_tile_rows=7)
PIECES = MemoryChoice(vision_piece_tokens=3)
ALL = MemoryChoice(True, True, 7, 3)
CHOICES = {"inputs": INPUTS, "states": STATES, "tiles": TILES, "pieces": PIECES, "all": ALL}
EVERY_FAMILY = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen2", "qwen3_moe"]


def groups_of(policy: Policy) -> list[ResponseGroup]:
    return random_groups(policy, SHAPES.items())


def use(policy: Policy, choice: MemoryChoice) -> None:
    policy.use_memory(choice)
    policy.stream_memory.least_bytes = 0  # these tensors are tiny


def check_choice(policy: Policy, choice: MemoryChoice, chunk_tokens: int | None) -> None:
    groups = groups_of(policy)
    expected = outcome(policy, groups, chunk_tokens)
    use(policy, choice)
    check_equal(outcome(policy, groups, chunk_tokens), expected)


@pytest.mark.parametrize("chunk_tokens", [None, 12], ids=["whole", "chunks"])
@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.matrix
def test_every_family(family: str, choice: MemoryChoice, train_vision: bool, chunk_tokens: int | None) -> None:
    if train_vision and family in ("qwen2", "qwen3_moe"):
        pytest.skip("no tower")
    policy = tiny_policy(family=family, train_vision=train_vision, gradient_checkpointing=True)
    check_choice(policy, choice, chunk_tokens)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5", "qwen2"])
def test_all_together_in_other_families(family: str) -> None:
    policy = tiny_policy(family=family, train_vision=family != "qwen2", gradient_checkpointing=True)
    check_choice(policy, ALL, chunk_tokens=12)


@pytest.mark.parametrize("chunk_tokens", [None, 12], ids=["whole", "chunks"])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_each_alone(choice: MemoryChoice, chunk_tokens: int | None) -> None:
    check_choice(tiny_policy(train_vision=True, gradient_checkpointing=True), choice, chunk_tokens)


@pytest.mark.parametrize("choice", [TILES, PIECES], ids=["tiles", "pieces"])
def test_without_checkpointing(choice: MemoryChoice) -> None:
    check_choice(tiny_policy(family="qwen3_vl", train_vision=True), choice, chunk_tokens=None)


@pytest.mark.parametrize("chunk_tokens", [None, 12], ids=["whole", "chunks"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_with_an_adapter(checkpointing: bool, chunk_tokens: int | None) -> None:
    policy = tiny_policy(gradient_checkpointing=checkpointing, lora={"rank": 4})
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:  # zero at first, where nothing would reach A
            torch.nn.init.normal_(parameter, std=0.2)
    groups = groups_of(policy)
    expected = outcome(policy, groups, chunk_tokens)
    assert expected[1] and all("lora" in name for name in expected[1])
    use(policy, ALL if checkpointing else TILES)
    check_equal(outcome(policy, groups, chunk_tokens), expected)


def test_frozen_features_are_the_same() -> None:
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"):
        policy = tiny_policy(family=family)
        prompts = [make_case(policy, kind, seed=i, max_side=5).prompt for i, kind in enumerate(("video", "images"))]
        expected = policy.vision.encode(prompts)
        policy.vision.forget()
        use(policy, PIECES)
        for ours, theirs in zip(policy.vision.encode(prompts), expected, strict=True):
            assert ours.features is not None and theirs.features is not None
            assert ours.features.shape == theirs.features.shape
            assert (ours.features - theirs.features).abs().max() < 1e-5


def test_two_micro_batches_share_a_tower_in_pieces() -> None:
    """Each micro-batch's gradient comes back to the same outputs, whose backward then goes through the pieces."""
    policy = tiny_policy(family="qwen3_vl", train_vision=True, gradient_checkpointing=True)
    groups = groups_of(policy)

    def by_micro_batches() -> dict[str, torch.Tensor]:
        policy.zero_grad()
        policy.vision.weights_changed()
        features = policy.vision.encode([group.prompt for group in groups], with_graph=True)
        total = torch.zeros(())
        for group, item in zip(groups, features, strict=True):
            total = total + sum((v.sum() for v in policy.logprobs([group], [item])[0]), torch.zeros(()))
        total.backward()
        return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}

    expected = by_micro_batches()
    use(policy, ALL)
    check_equal((torch.zeros(()), by_micro_batches()), (torch.zeros(()), expected))


def test_engines_that_scale_losses_get_scaled_gradients() -> None:
    """What chunks left is scaled already, and the last backward, which is scaled like the others, adds it as it is."""
    policy = tiny_policy(gradient_checkpointing=True)
    groups = groups_of(policy)
    lengths = [[len(response) - 1 for response in group.responses] for group in groups]
    chunks = tuple(chunk_responses(lengths, range(len(groups)), 12))
    streams = pack_micro_batch(policy, groups, MicroBatch(chunks), len(chunks))

    def gradients(choice: MemoryChoice, scale: float, declared: float) -> Outcome:
        use(policy, choice)
        policy.zero_grad()
        features = policy.join_features(groups, policy.vision.encode([group.prompt for group in groups]))
        backward = lambda loss: (scale * loss).backward()  # noqa: E731
        run_micro_batch(policy, streams, features, lambda _, v, __: v.sum(), backward, loss_scale=declared)
        found = {name: p.grad / scale for name, p in policy.model.named_parameters() if p.grad is not None}
        return torch.zeros(()), found

    plain = gradients(MemoryChoice(), 1.0, 1.0)
    check_equal(gradients(STATES, 4.0, 4.0), plain)
    # A factor that is not one.
    check_equal(gradients(STATES, 1.0, 4.0), gradients(MemoryChoice(), 1.0, 4.0))


def count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_sizes_of_tiles_pieces_and_offloaded_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(train_vision=True, gradient_checkpointing=True)
    use(policy, ALL)
    groups = groups_of(policy)
    rows: list[int] = []
    gate = policy.language_model.layers[0].mlp.gate_proj
    gate.register_forward_hook(lambda _module, inputs, _out: rows.append(inputs[0].shape[-2]))
    tower_calls: list[int] = []
    tower = policy.family.vision_tower(policy.model)
    tower.register_forward_pre_hook(lambda _module, inputs: tower_calls.append(inputs[0].shape[0]))
    writes, reads = count(monkeypatch, FileOnDisk, "write"), count(monkeypatch, FileOnDisk, "read")
    outcome(policy, groups, chunk_tokens=12)
    assert max(rows) == 7
    grids = torch.cat([group.prompt.grid_thw for group in groups if group.prompt.grid_thw is not None])
    cut = [piece.patches for piece in pieces(grids.tolist(), 12)]
    assert len(cut) > 3 and tower_calls == cut + cut[::-1]  # forward, then backward piece by piece
    assert len(reads) >= len(writes) > 10


def test_nothing_is_offloaded_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(gradient_checkpointing=True)
    use(policy, INPUTS)
    writes = count(monkeypatch, FileOnDisk, "write")
    with torch.no_grad():
        policy.logprobs(groups_of(policy))
    assert not writes


@pytest.mark.parametrize(
    "first, second", [(ALL, MemoryChoice()), (MemoryChoice(), ALL)], ids=["on then off", "off then on"]
)
def test_a_choice_can_be_changed(first: MemoryChoice, second: MemoryChoice) -> None:
    policy = tiny_policy(train_vision=True, gradient_checkpointing=True)
    groups = groups_of(policy)
    expected = outcome(policy, groups, 12)
    for choice in (first, second):
        use(policy, choice)
        check_equal(outcome(policy, groups, 12), expected)


def test_a_forward_without_backward_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass writes at the same offsets of the file."""
    policy = tiny_policy(gradient_checkpointing=True)
    use(policy, INPUTS)
    groups = groups_of(policy)
    ends = []
    for _ in range(3):
        logprobs = policy.logprobs(groups)
        del logprobs
        target = policy.stream_memory.target
        assert isinstance(target, FileOnDisk)
        ends.append(target.size)
    assert ends[0] > 0 and len(set(ends)) == 1


CHUNKED = {"video": [5, 1, 9, 3, 2], "image": [1, 1], "text": [70, 4], "images": [6, 130, 1]}


@pytest.mark.parametrize("train_vision, checkpointing", [(False, False), (True, True)], ids=["plain", "all"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe"])
def test_chunks_equal_the_whole(family: str, train_vision: bool, checkpointing: bool) -> None:
    policy = tiny_policy(family=family, train_vision=train_vision, gradient_checkpointing=checkpointing)
    groups = random_groups(policy, CHUNKED.items())
    expected = outcome(policy, groups, None)
    check_equal(outcome(policy, groups, chunk_tokens=12), expected)


def test_no_gradient_no_graph() -> None:
    policy = tiny_policy()
    groups = random_groups(policy, CHUNKED.items())
    expected = policy.logprobs(groups)
    with torch.no_grad():
        prefixes = pack_prefixes(groups, policy.device)
        features = policy.join_features(groups, policy.vision.encode([group.prompt for group in groups]))
        states = policy(Policy.prefix_states, prefixes, features)
        batch = pack_chunk(prefixes, groups, [[4, 0], [], [1], [0]], policy.device)
        logprobs, _ = policy(Policy.chunk_logprobs, batch, states, 1.0)
    assert not logprobs.requires_grad
    video, image, text, images = batch.split(logprobs)
    assert image == []
    wanted = [expected[0][4], expected[0][0], expected[2][1], expected[3][0]]
    for ours, theirs in zip([*video, *text, *images], wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-5
