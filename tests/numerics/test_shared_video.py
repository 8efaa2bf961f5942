"""Prompts that begin alike are computed alike: sharing across questions equals transformers' repeated forward.

Two questions on one video, and conversations that continue one another, put what they have in common into the language
model once. Values and every gradient are those of transformers' own forward over each prompt + response by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_pipelines.embedded import main as prepare_embedded
from tests.support.groups import (
    Case,
    check_equal,
    chunk_loss,
    continued_case,
    gradient_errors,
    make_case,
    outcome,
    plain_model,
    random_group,
    repeated_logprobs,
    tiny_policy,
    weighted_sum,
)
from tests.support.runs import ROOT, read_lines
from vlm_pg.config import load_config
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.packing import pack, pack_chunk, pack_prefixes, packed_tokens, repeated_tokens
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.training.main import train
from vlm_pg.types import ResponseGroup

LENGTHS = ([5, 1, 9], [4, 4], [2, 7, 1, 3], [1], [6, 2], [3])
# Media that are long enough to be worth a node of their own.
VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}


def text(policy: Policy, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([t for t in range(policy.vocab_size) if t not in policy.media_token_ids])
    return allowed[torch.randint(len(allowed), (tokens,), generator=generator)]


def two_questions(policy: Policy) -> list[Case]:
    return [make_case(policy, seed=seed, **VIDEO) for seed in (1, 2)]


def three_questions_and_another_video(policy: Policy) -> list[Case]:
    other = make_case(policy, "video", seed=9, media_seed=6, max_side=8)
    first, *others = (make_case(policy, seed=seed, **VIDEO) for seed in (1, 2, 3))
    return [first, other, *others]


def follow_ups(policy: Policy) -> list[Case]:
    """A long question, its continuation, two continuations of that, and a second question on the video."""
    first, second = (make_case(policy, seed=seed, max_words=words, **VIDEO) for seed, words in ((1, 80), (2, 20)))
    more = continued_case(policy, first, text(policy, 80, 1))
    return [continued_case(policy, more, text(policy, 70, seed)) for seed in (2, 3)] + [more, first, second]


def same_prompt_twice(policy: Policy) -> list[Case]:
    first, second = two_questions(policy)
    return [first, second, first]


def first_of_two_media(policy: Policy) -> list[Case]:
    """The same pictures behind different words, and other pictures behind the same words."""
    return [make_case(policy, "images", seed=s, media_seed=m, max_side=8) for s, m in ((1, 3), (2, 3), (1, 4))]


# Builder of cases -> levels of their tree, the responses' included.
LAYOUTS = {
    two_questions: 3,
    three_questions_and_another_video: 3,
    follow_ups: 5,
    same_prompt_twice: 3,
    first_of_two_media: 3,
}


def build(policy: Policy, cases: Sequence[Case]) -> list[ResponseGroup]:
    return [random_group(policy, case, LENGTHS[index], seed=index) for index, case in enumerate(cases)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_values_and_every_gradient(layout: object) -> None:
    policy = tiny_policy(train_vision=layout is not same_prompt_twice)
    oracle = plain_model(policy)
    cases = layout(policy)  # type: ignore[operator]
    groups = build(policy, cases)
    batch = pack(groups, policy.device)
    assert len(batch.tree.level_nodes) == LAYOUTS[layout]  # type: ignore[index]
    assert batch.num_tokens < pack(groups, policy.device, share=False).num_tokens
    logprobs = policy.logprobs(groups)
    expected = [repeated_logprobs(oracle, case, g.responses) for case, g in zip(cases, groups, strict=True)]
    for ours, theirs in zip(logprobs, expected, strict=True):
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(ours, theirs, strict=True))
    for values in (logprobs, expected):
        weighted_sum(values).backward()
    errors = gradient_errors(policy.model, oracle)
    assert len(errors) > 20 and max(errors.values()) < 1e-4, max(errors, key=lambda name: errors[name])


@pytest.mark.parametrize("chunked", [False, True], ids=["one pass", "chunks"])
def test_a_video_of_two_questions_passes_the_language_model_once(chunked: bool) -> None:
    """Counted where it costs: rows that enter a decoder layer."""
    policy = tiny_policy()
    cases = two_questions(policy)
    groups = build(policy, cases)
    first, second = (case.prompt for case in cases)
    shorter = min(first.num_tokens, second.num_tokens)
    common = int((first.input_ids[:shorter] != second.input_ids[:shorter]).nonzero()[0])
    visual = int((first.mm_token_type_ids != 0).nonzero()[-1]) + 1
    assert 64 <= visual <= common
    rows: list[int] = []
    policy.language_model.layers[0].mlp.register_forward_hook(lambda m, args, out: rows.append(args[0].shape[-2]))
    features = policy.join_features(groups, policy.vision.encode([case.prompt for case in cases]))
    if chunked:
        prefixes = pack_prefixes(groups, policy.device)
        states = policy(Policy.prefix_states, prefixes, features)
        for chosen in ([[0, 1], []], [[2], [0]], [[], [1]]):
            policy(Policy.chunk_logprobs, pack_chunk(prefixes, groups, chosen, policy.device), states, 1.0)
    else:
        policy(Policy.stream_logprobs, policy.pack(groups), features, 1.0)
    responses = sum(len(r) - 1 for group in groups for r in group.responses)
    assert sum(rows) == first.num_tokens + second.num_tokens - common + responses


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_chunks_behind_shared_prompts_equal_one_pass(layout: object) -> None:
    """The prompts once, responses in chunks (one of them without rows of its own), one backward through the prompts."""
    policy = tiny_policy(train_vision=True, gradient_checkpointing=LAYOUTS[layout] == 3)  # type: ignore[index]
    groups = build(policy, layout(policy))  # type: ignore[operator]
    expected = outcome(policy, groups, None)
    policy.zero_grad()
    policy.vision.weights_changed()
    prefixes = pack_prefixes(groups, policy.device)
    features = policy.vision.encode([group.prompt for group in groups], with_graph=True)
    states = policy(Policy.prefix_states, prefixes, policy.join_features(groups, features))
    ones = [[i for i, r in enumerate(group.responses) if len(r) == 1] for group in groups]
    rest = [[i for i, r in enumerate(group.responses) if len(r) > 1] for group in groups]
    total = torch.zeros(())
    for chosen in ([of_group[:1] for of_group in rest], [of_group[1:] for of_group in rest], ones):
        if any(chosen):
            chunk = pack_chunk(prefixes, groups, chosen, policy.device)
            logprobs = chunk.split(policy(Policy.chunk_logprobs, chunk, states, 1.0)[0])
            loss = chunk_loss([list(zip(*pair, strict=True)) for pair in zip(chosen, logprobs, strict=True)])
            loss.backward()
            total += loss.detach()
    states.surrogate_loss(1.0).backward()
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    check_equal((total, gradients), expected, 1e-4)


@pytest.mark.parametrize("kind, lengths", [("video", [7]), ("video", [1]), ("image", [1, 1, 1])])
def test_single_responses_and_single_tokens(kind: str, lengths: list[int]) -> None:
    """Streams in which few or no rows are a response's own."""
    policy = tiny_policy(train_vision=True)
    oracle = plain_model(policy)
    case = make_case(policy, kind, seed=1)
    group = random_group(policy, case, lengths, seed=0)
    logprobs, expected = policy.logprobs([group])[0], repeated_logprobs(oracle, case, group.responses)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    for values in (logprobs, expected):
        weighted_sum([values]).backward()
    assert max(gradient_errors(policy.model, oracle).values()) < 1e-4


REPEATED_LENGTHS = ([5, 1, 9], [4, 4], [3, 8, 2])
LONG_VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}


def groups_of(policy: Policy) -> list[ResponseGroup]:
    """Two questions on one video and one without media."""
    cases = [
        make_case(policy, seed=0, **LONG_VIDEO),
        make_case(policy, seed=1, **LONG_VIDEO),
        make_case(policy, "text", 2),
    ]
    return [random_group(policy, case, lengths, 3) for case, lengths in zip(cases, REPEATED_LENGTHS, strict=True)]


def towers_seen(policy: Policy) -> list[int]:
    """Grows with every call of the tower by the patches it is shown."""
    patches: list[int] = []
    tower = policy.family.vision_tower(policy.model)
    assert tower is not None
    tower.register_forward_hook(lambda module, args, out: patches.append(len(args[0])))
    return patches


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_scoring_repeats_everything_and_gives_the_same(family: str, train_vision: bool) -> None:
    shared, repeated = (tiny_policy(train_vision, family=family, share_prefix=share) for share in (True, False))
    groups = groups_of(shared)
    shapes = [(group.prompt.num_tokens, [len(response) for response in group.responses]) for group in groups]
    batch = repeated.pack(groups)
    assert batch.num_tokens == sum(repeated_tokens(*shape) for shape in shapes)
    assert batch.tree.parents.count(-1) == 8 and (batch.tokens_shared, batch.num_sharing) == (0, 0)
    assert shared.pack(groups).num_tokens < sum(packed_tokens(*shape) for shape in shapes)
    once, often = towers_seen(shared), towers_seen(repeated)
    ours, theirs = repeated.logprobs(groups), shared.logprobs(groups)
    video = len(groups[0].prompt.pixel_values)  # type: ignore[arg-type]
    assert (sum(once), sum(often)) == (video, 5 * video)
    for mine, expected in zip(ours, theirs, strict=True):
        assert [len(response) for response in mine] == [len(response) for response in expected]
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(mine, expected, strict=True))
    weighted_sum(ours).backward()
    weighted_sum(theirs).backward()
    errors = gradient_errors(repeated.model, shared.model)
    assert len(errors) > 20 and max(errors.values()) < 1e-4


def test_scoring_in_passes_keeps_to_its_budget() -> None:
    policy = tiny_policy(share_prefix=False)
    groups = groups_of(policy)
    budget = max(group.prompt.num_tokens for group in groups) + 20
    seen: list[int] = []
    policy.language_model.layers[0].register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    found = PolicyScorer(policy, budget).score(groups, 1.0)
    assert len(seen) > 3 and max(seen) <= budget
    for mine, expected in zip(found, tiny_policy().logprobs(groups), strict=True):
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(mine, expected, strict=True))


def test_running_prefixes_once_is_refused() -> None:
    policy = tiny_policy(share_prefix=False)
    message = r"model\.share_prefix is false, but backward_in_chunks runs every prefix once"
    with pytest.raises(ValueError, match=message):
        backward_in_chunks(policy, groups_of(policy), lambda chunk: chunk[0][0][1].sum(), 10)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clips")
    prepare_embedded(["--out", str(path), "--train", "24", "--eval", "8"])
    return path


FROZEN = {"model.train": "[language]", "rollout.logprobs": "recompute"}
# Nothing is pruned here: a KL that is zero but for rounding would decide between rollouts of equal reward.
KL_IN_REWARD = {"preset": "null", "kl_in": "reward", "prune_rate": 0.0, "num_iterations": 2}
FROZEN |= {f"algorithm.{name}": str(value) for name, value in KL_IN_REWARD.items()}
SAME = ["loss", "grad_norm", "reward", "entropy", "kl", "questions", "tokens_repeated", "pruned_share"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="training tower", marks=pytest.mark.matrix),
        pytest.param(FROZEN, id="frozen tower, KL in the reward, recomputed"),
    ],
)
def test_a_whole_run_gives_the_same(
    changes: dict[str, str], clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CPPO: pruning, further questions; a KL in the reward, two updates a step. Generation, scoring and update without
    sharing."""
    printed = {}
    for share in ("true", "false"):
        values: dict[str, Any] = {
            "data.train": clips / "train.jsonl",
            "data.eval": "{}",
            "eval.headline_set": "null",
            "run.dir": tmp_path / share,
            "model.share_prefix": share,
            "training.steps": 2,
            "training.prompts_per_step": 3,
            "rollout.num_generations": 4,
            "rollout.max_new_tokens": 14,
            "media.workers": 0,
            "observe.trackers": "[]",
            "observe.report": "false",
        }
        config = load_config(
            ROOT / "configs/algorithms/cppo.yaml", [f"{key}={value}" for key, value in (values | changes).items()]
        )
        assert train(config) == 0
        printed[share] = capsys.readouterr().out
    assert "model.share_prefix=false: nothing is shared" in printed["false"] and "sharing is off" in printed["false"]
    assert "share_prefix" not in printed["true"] and "sharing is on" in printed["true"]
    lines = {share: read_lines(tmp_path / share / "metrics.jsonl") for share in printed}
    for repeated, shared in zip(lines["false"], lines["true"], strict=True):
        for name in SAME:
            assert repeated[name] == pytest.approx(shared[name], rel=1e-3, abs=1e-5), name
        assert repeated["tokens_computed"] == repeated["tokens_repeated"] > 1.5 * shared["tokens_computed"]
        assert repeated["generation/prefill_tokens"] > 3 * shared["generation/prefill_tokens"]
    answers = [[row["response"] for row in read_lines(tmp_path / share / "rollouts.jsonl")] for share in printed]
    assert answers[0] == answers[1]
    weights, expected = (
        load_file(tmp_path / share / "checkpoints/step-000002/model.safetensors") for share in ("false", "true")
    )
    # Adam's first steps are as large as the learning rate whatever the gradient: where that is rounding, so are they.
    far = sum(int(((weights[name] - tensor).abs() > 1e-4).sum()) for name, tensor in expected.items())
    assert far <= 0.01 * sum(tensor.numel() for tensor in expected.values())
