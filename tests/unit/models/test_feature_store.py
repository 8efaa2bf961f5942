"""Outputs of a frozen tower on disk: what comes back is bit for bit what the tower gives, or the tower runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.groups import make_case, tiny_policy
from vlm_pg.cache.eviction import Outcome, places
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.cache.store import Entry, Store, read_entry, serialized
from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.feature_cache import keep_features
from vlm_pg.models.feature_store import KIND, FeatureStore
from vlm_pg.models.policy import Policy
from vlm_pg.models.tower import Grid
from vlm_pg.types import Prompt, VisualFeatures

SETTINGS: dict[str, Any] = {"vision_cache_mb": 0}


class Calls:
    """Counts the calls of a policy's tower."""

    def __init__(self, policy: Policy):
        self.count = 0
        self._run = policy.vision._run_tower
        policy.vision._run_tower = self

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.count += 1
        return self._run(*arguments)


def with_cache(folder: Path, **of_policy: Any) -> tuple[Policy, Calls, str | None]:
    """The same weights every time, as in another run."""
    policy = tiny_policy(**{**SETTINGS, **of_policy})
    line = keep_features(policy, CacheSettings(folder=folder))
    return policy, Calls(policy), line


def encode(policy: Policy, prompts: Sequence[Prompt], **how: Any) -> list[torch.Tensor]:
    """Copies, so that the features themselves are freed."""
    return [as_bits(features) for features in policy.vision.encode(prompts, **how)]


def as_bits(features: VisualFeatures) -> torch.Tensor:
    assert features.features is not None
    return features.features.detach().clone().view(torch.uint8)


def whole(grids: Sequence[Grid]) -> list[tuple[Grid, ...]]:
    return [tuple(grids)]


def by_frame(grids: Sequence[Grid]) -> list[tuple[Grid, ...]]:
    return [((1, h, w),) for t, h, w in grids for _ in range(t)]


def store_in(folder: Path, tower: str = "tower", calls: Any = whole, shape: tuple[int, ...] = (2,)) -> FeatureStore:
    return FeatureStore(Store(folder, KIND), tower, calls, torch.device("cpu"), shape)


def of_prompt(prompt: Prompt, *shape: int) -> torch.Tensor:
    return torch.ones(prompt.num_visual_tokens, *(shape or (2,)))


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    """A video of several frames, and an image."""
    policy = tiny_policy()
    return next(
        case.prompt
        for case in (make_case(policy, "image+video", seed) for seed in range(9))
        if case.prompt.grid_thw is not None and case.prompt.grid_thw[:, 0].max() > 2
    )


@pytest.mark.parametrize("dtype, shape", [(torch.float32, (8,)), (torch.bfloat16, (3, 8)), (torch.float16, (8,))])
def test_every_bit_comes_back(tmp_path: Path, prompt: Prompt, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """NaNs and negative zeros too, and of rows that do not lie one after the other in memory."""
    tokens = prompt.num_visual_tokens
    bits = torch.randint(0, 256, (tokens + 1, *shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    features = bits.view(dtype)[1:]
    store_in(tmp_path / "cache", shape=shape).write(prompt, features)
    found = store_in(tmp_path / "cache", shape=shape).read(prompt)
    assert found is not None and (found.dtype, found.shape) == (dtype, features.shape)
    assert torch.equal(found.view(torch.uint8), bits[1:])


def test_an_entry_is_of_its_media_its_tower_and_its_calls(tmp_path: Path, prompt: Prompt) -> None:
    folder, features = tmp_path / "cache", of_prompt(prompt)
    store_in(folder).write(prompt, features)
    assert prompt.grid_thw is not None
    other_grids = replace(prompt, grid_thw=prompt.grid_thw.flip(1))
    assert store_in(folder).read(replace(prompt, sample_id="another question")) is not None
    assert store_in(folder).read(replace(prompt, content_key="another video")) is None
    assert store_in(folder).read(other_grids) is None
    assert store_in(folder, tower="another").read(prompt) is None
    assert store_in(folder, calls=by_frame).read(prompt) is None
    host = store_in(folder).host
    assert store_in(folder).read(prompt, [host]) is not None
    assert store_in(folder).read(prompt, ["another"]) is None
    assert store_in(folder).read(prompt, [host] * 2) is None, "each process makes its frames in a call of its own"


def test_entries_say_which_process_made_which_frames(tmp_path: Path, prompt: Prompt) -> None:
    """Where two that are not alike make them together, one that is like the first finds nothing of the second's."""
    store = store_in(tmp_path / "cache")
    store.write(prompt, of_prompt(prompt), ["one", "other"])
    for hosts in (["one"] * 2, ["other"] * 2, ["other", "one"], ["one"], []):
        assert store.read(prompt, hosts) is None
    assert store.read(prompt, ["one", "other"]) is not None


SWITCHES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_what_is_switched_on_later_is_another_entry(tmp_path: Path, switch: str) -> None:
    """Around a call of the tower, long after the cache was opened."""
    policy, calls, _ = with_cache(tmp_path / "cache")
    [prompt] = [make_case(policy, "video", 0).prompt]
    [plain] = encode(policy, [prompt])
    with SWITCHES[switch]():
        [switched] = encode(tiny_policy(**SETTINGS), [prompt])
        for _ in range(2):
            assert torch.equal(encode(policy, [prompt])[0], switched)
    assert switch != "autocast" or not torch.equal(plain, switched)
    assert torch.equal(encode(policy, [prompt])[0], plain) and calls.count == 2


ODD: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "no dtype": lambda tensors, about: about.clear(),
    "a number for a dtype": lambda tensors, about: about.update(dtype=16),
    "a larger dtype": lambda tensors, about: about.update(dtype="complex128"),
    "another name": lambda tensors, about: tensors.update(other=tensors.pop("features")),
    "fewer rows": lambda tensors, about: tensors.update(features=tensors["features"][1:]),
}


@pytest.mark.parametrize("change", ODD)
def test_an_entry_that_cannot_be_these_features_is_made_anew(tmp_path: Path, prompt: Prompt, change: str) -> None:
    policy, calls, _ = with_cache(tmp_path / "cache")
    [expected] = encode(policy, [prompt])
    [entry_file] = places(tmp_path / "cache")
    whole = entry_file.path.read_bytes()
    entry = read_entry(entry_file.path, KIND, entry_file.key)
    tensors, about = dict(entry.tensors), dict(entry.about)
    ODD[change](tensors, about)
    forged = serialized(KIND, entry_file.key, Entry(tensors, about))
    assert forged is not None
    entry_file.path.write_bytes(forged)
    assert torch.equal(encode(policy, [prompt])[0], expected) and calls.count == 2
    assert entry_file.path.read_bytes() == whole


def test_a_single_frame_is_one_call_however_it_is_divided(tmp_path: Path, prompt: Prompt) -> None:
    frame, store = replace(prompt, grid_thw=torch.tensor([[1, 4, 6]])), store_in(tmp_path / "cache")
    store.write(frame, of_prompt(frame))
    assert store.read(frame, [store.host] * 4) is not None
    assert store_in(tmp_path / "cache", calls=by_frame).read(frame, [store.host] * 2) is not None
    assert store.read(frame, [store.host, "another"]) is not None, "which has no part in it"


@pytest.mark.parametrize("family, dtype", [("qwen2_5_vl", torch.float32), ("qwen3_vl", torch.bfloat16)])
def test_the_tower_is_called_once_ever(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Not in a second epoch, though memory keeps nothing, and not in a second run; to the bits of no cache at all."""
    policy = tiny_policy(family=family, dtype=dtype, **SETTINGS)
    prompts = [make_case(policy, kind, seed).prompt for seed, kind in enumerate(("video", "text", "image", "video"))]
    media = [prompt for prompt in prompts if prompt.pixel_values is not None]
    expected = encode(policy, media)
    first, calls, line = with_cache(tmp_path / "cache", family=family, dtype=dtype)
    assert line is not None and line.startswith(f"visual features: kept in {tmp_path / 'cache'}, ")
    per_token = len(expected[0].flatten()) / media[0].num_visual_tokens / 1024
    assert f", {per_token:.1f} KiB a visual token, " in line
    for _ in range(3):
        found = encode(first, media)
        assert all(map(torch.equal, found, expected))
        first.weights_changed()
    assert calls.count == len(media)
    second, calls, _ = with_cache(tmp_path / "cache", family=family, dtype=dtype)
    assert all(map(torch.equal, encode(second, media), expected))
    found = second.vision.encode(prompts)
    assert found[1].features is None and calls.count == 0
    assert all(one.weights_version == second.vision.version and not one.carries_graph for one in found)
    assert len(list(places(tmp_path / "cache"))) == len(media)


def test_pieces_of_another_size_are_entries_of_their_own(tmp_path: Path, prompt: Prompt) -> None:
    """A small piece is another call, whose sums may be divided otherwise."""
    for pieces, calls_expected in ((0, 1), (1, 1), (1, 0), (0, 0), (10**6, 0)):
        policy, calls, _ = with_cache(tmp_path / "cache", vision_piece_tokens=pieces)
        plain = tiny_policy(**SETTINGS, vision_piece_tokens=pieces)
        assert torch.equal(encode(policy, [prompt])[0], encode(plain, [prompt])[0])
        assert calls.count == calls_expected, pieces


def test_a_full_disk_costs_no_features(tmp_path: Path, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, calls, _ = with_cache(tmp_path / "cache")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "write", full)
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\): visual features are"):
        found = encode(policy, [prompt])
    assert torch.equal(found[0], encode(tiny_policy(**SETTINGS), [prompt])[0]) and calls.count == 1


def test_a_cache_in_which_others_make_room_is_not_called_full(
    tmp_path: Path, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    policy, calls, _ = with_cache(tmp_path / "cache")
    monkeypatch.setattr(Store, "write", lambda *_: Outcome.LATER)
    found = encode(policy, [prompt])
    assert torch.equal(found[0], encode(tiny_policy(**SETTINGS), [prompt])[0]) and calls.count == 1
    assert not [warning for warning in recwarn if "cache" in str(warning.message)]


def test_an_entry_beyond_memory_goes_to_disk_and_one_beyond_the_limit_nowhere(tmp_path: Path, prompt: Prompt) -> None:
    policy, calls, _ = with_cache(tmp_path / "cache")
    encode(policy, [prompt])
    assert len(list(places(tmp_path / "cache"))) == 1 and not policy.vision._cache
    small = tiny_policy(**SETTINGS)
    keep_features(small, CacheSettings(folder=tmp_path / "small", max_gb=1e-9))
    with pytest.warns(UserWarning, match="has no room for more visual features within cache.max_gb"):
        found = encode(small, [prompt])
    assert torch.equal(found[0], encode(policy, [prompt])[0])
    assert not list(places(tmp_path / "small")) and calls.count == 1


@pytest.mark.parametrize(
    "settings, of_policy, why",
    [
        ({}, {"train_vision": True}, "model.train=[tower, merger, language], so they change with every update"),
        ({}, {"train": ("merger",)}, "model.train=[merger], so they change with every update"),
        ({}, {"share_prefix": False}, "model.share_prefix=false, so all is computed anew"),
        ({}, {"family": "qwen3"}, "qwen3 reads text alone"),
        ({"features": False}, {}, "cache.features=false"),
    ],
    ids=["tower", "merger", "nothing shared", "text", "off"],
)
def test_a_line_says_why_nothing_is_cached(
    tmp_path: Path, settings: dict[str, Any], of_policy: dict[str, Any], why: str
) -> None:
    policy = tiny_policy(**of_policy)
    line = keep_features(policy, CacheSettings(folder=tmp_path / "cache", **settings))
    assert line == f"visual features: not kept in cache.folder ({why})"
    assert policy.vision.store is None and not (tmp_path / "cache").exists()
    assert keep_features(policy, CacheSettings(**settings)) is None


def test_a_tower_that_trains_never_touches_the_disk(tmp_path: Path, prompt: Prompt) -> None:
    """Nor does one that has trained: what is on disk is of the weights before."""
    policy, _, _ = with_cache(tmp_path / "cache")
    [before] = encode(policy, [prompt])
    entries = list(places(tmp_path / "cache"))
    tower = policy.family.vision_tower(policy.model).requires_grad_(True)
    policy.weights_changed(vision_trains=True)
    assert policy.vision.encode([prompt], with_graph=True)[0].carries_graph
    with torch.no_grad():
        next(tower.parameters()).mul_(2)
    policy.weights_changed(vision_trains=False)
    assert not torch.equal(encode(policy, [prompt])[0], before)
    assert list(places(tmp_path / "cache")) == entries


class Two(SequenceGroup):
    """This process among two, and whether the other one finds an entry."""

    def __init__(self, rank: int, found_there: bool):
        super().__init__(2, rank)
        self._found_there = found_there

    def gather(self, value: Any) -> list[Any]:
        return [value, self._found_there if isinstance(value, bool) else value]


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_run_the_tower_together_or_not_at_all(
    tmp_path: Path, prompt: Prompt, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has an entry runs it with the other one that lacks it; the first of them writes."""
    policy, _, _ = with_cache(tmp_path / "cache")
    ran: list[int] = []

    def together(pixels: torch.Tensor, grids: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
        ran.append(sequence.size)
        return policy.run_tower(pixels, grids)

    monkeypatch.setattr(policy.vision, "_encoded", together)
    [expected] = encode(policy, [prompt], sequence=Two(rank, found_there=False))
    assert len(ran) == 1 and len(list(places(tmp_path / "cache"))) == (1 if rank == 0 else 0)
    assert policy.vision.store is not None
    policy.vision.store.write(prompt, expected.view(torch.float32), [policy.vision.store.host] * 2)
    for found_there, runs in ((True, 1), (False, 2)):
        assert torch.equal(encode(policy, [prompt], sequence=Two(rank, found_there))[0], expected)
        assert len(ran) == runs
    encode(policy, [prompt])
    assert ran == [2, 2, 1], "alone it is another call"
