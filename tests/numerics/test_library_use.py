"""What a library user does to a policy between two scorings, and what must not go wrong silently then."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.groups import make_case, random_group, repeated_logprobs, tiny_policy
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.attention import selfcheck
from vlm_pg.attention.selfcheck import check_kernel, checked_kernel
from vlm_pg.errors import ModelError
from vlm_pg.models.contexts import TreeContext
from vlm_pg.models.loading import make_policy
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.packing import pack_prefixes
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.types import ResponseGroup, VisualFeatures


def one_group(policy: Policy, kind: str = "image", seed: int = 0) -> ResponseGroup:
    return random_group(policy, make_case(policy, kind, seed=seed), [4, 6], seed=seed)


def test_another_attention_implementation_is_refused_and_can_be_set_back() -> None:
    policy = tiny_policy()
    group = one_group(policy)
    expected = policy.logprobs([group])[0]
    policy.model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="'sdpa', which would read a stream as one sequence"):
        policy.logprobs([group])
    policy.model.set_attn_implementation({"text_config": "vlm_pg_grouped"})
    assert all(torch.equal(a, b) for a, b in zip(policy.logprobs([group])[0], expected, strict=True))


def test_a_deep_copy_has_its_own_linear_attention() -> None:
    policy = tiny_policy(family="qwen3_5")
    group = one_group(policy)
    reference = make_policy(copy.deepcopy(policy.model), tiny_processor("qwen3_5"), ModelSettings(path="copy"))
    expected = reference.logprobs([group])[0]
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "linear_attn" in name:
                parameter.mul_(1.5)
    assert all(torch.equal(a, b) for a, b in zip(reference.logprobs([group])[0], expected, strict=True))
    assert not torch.allclose(policy.logprobs([group])[0][0], expected[0])


def test_a_forward_without_backward_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[weakref.ref[TreeContext]] = []
    made = TreeContext.__init__

    def remember(self: TreeContext, *args: object, **kwargs: object) -> None:
        contexts.append(weakref.ref(self))
        made(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TreeContext, "__init__", remember)
    policy = tiny_policy(gradient_checkpointing=True)
    group = one_group(policy)
    policy.logprobs([group])
    features = policy.join_features([group], policy.vision.encode([group.prompt]))
    policy(Policy.prefix_states, pack_prefixes([group], policy.device), features)
    gc.collect()
    assert len(contexts) == 2
    assert all(context() is None for context in contexts)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_reentrant_checkpointing_raises_wherever_it_wraps_a_grouped_layer(family: str) -> None:
    policy = tiny_policy(family=family)
    group = one_group(policy)
    policy.model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ModelError, match=r"runs without gradients .* use_reentrant=False"):
        policy.logprobs([group])
    with pytest.raises(ModelError, match="use_reentrant=False"):
        backward_in_chunks(policy, [group], lambda chunk: torch.zeros(()), 4)
    with torch.no_grad():
        assert torch.isfinite(policy.logprobs([group])[0][0]).all()
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.cat(policy.logprobs([group])[0]).sum().backward()


def test_a_kernel_is_checked_before_any_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast attention has another dtype; a check within a checkpointed layer would become part of it."""
    policy = tiny_policy(gradient_checkpointing=True)
    group = one_group(policy)
    checked_kernel.cache_clear()
    checked: list[tuple[torch.dtype, bool]] = []

    def record(kernel: object, device: torch.device, dtype: torch.dtype, *shape: int) -> float:
        layers_ran = bool(ran)
        checked.append((dtype, layers_ran))
        return check_kernel(kernel, device, dtype, *shape)  # type: ignore[arg-type]

    ran: list[int] = []
    for index, layer in enumerate(policy.language_model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    monkeypatch.setattr(selfcheck, "check_kernel", record)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            torch.cat(policy.logprobs([group])[0]).sum().backward()
    assert checked == [(torch.bfloat16, False)]


def test_a_check_inside_the_users_checkpoint_is_no_part_of_it() -> None:
    """A checkpoint around the first scoring under autocast has its gradients."""
    policy = tiny_policy()
    group = one_group(policy)
    checked_kernel.cache_clear()

    def score(_anchor: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cat(policy.logprobs([group])[0]).sum()

    checkpoint(score, torch.zeros((), requires_grad=True), use_reentrant=False).backward()
    assert policy.model.get_input_embeddings().weight.grad.norm() > 0


def test_a_trained_tower_is_encoded_anew_for_every_backward() -> None:
    policy = tiny_policy(train_vision=True)
    group = one_group(policy)
    for _ in range(2):
        torch.cat(policy.logprobs([group])[0]).sum().backward()


def test_deepstack_in_a_model_with_as_few_layers_as_features() -> None:
    model = tiny_model("qwen3_vl", num_hidden_layers=2)
    policy = make_policy(model, tiny_processor("qwen3_vl"), ModelSettings(path="tiny"))
    plain = tiny_model("qwen3_vl", num_hidden_layers=2)
    plain.set_attn_implementation("sdpa")
    assert len(model.config.vision_config.deepstack_visual_indexes) == 2
    case = make_case(policy, "video", seed=3)
    group = random_group(policy, case, [4, 6], seed=3)
    for ours, theirs in zip(policy.logprobs([group])[0], repeated_logprobs(plain, case, group.responses), strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def test_autocast_scores_as_transformers_does_under_it() -> None:
    policy = tiny_policy()
    case = make_case(policy, "image", seed=1)
    group = random_group(policy, case, [4, 6], seed=1)
    plain = tiny_model()
    exact = torch.cat(repeated_logprobs(plain, case, group.responses))
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch.cat(policy.logprobs([group])[0])
        theirs = torch.cat(repeated_logprobs(plain, case, group.responses))
    ours.sum().backward()
    assert 0 < (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_ids_pixels_and_features_that_do_not_belong_together() -> None:
    policy = tiny_policy()
    small, large = one_group(policy), one_group(policy, "images")
    assert small.prompt.num_visual_tokens != large.prompt.num_visual_tokens
    media = {"pixel_values": large.prompt.pixel_values, "grid_thw": large.prompt.grid_thw, "content_key": "x"}
    swapped = replace(small, prompt=replace(small.prompt, **media))
    with pytest.raises(ValueError, match="Take ids, pixels and grids from one processor call"):
        policy.logprobs([swapped])
    with pytest.raises(ValueError, match="0 patches of pixels"):
        policy.logprobs([replace(small, prompt=replace(small.prompt, pixel_values=None, grid_thw=None))])
    with pytest.raises(ValueError, match="no content_key"):
        policy.logprobs([replace(small, prompt=replace(small.prompt, content_key=""))])
    features = policy.vision.encode([small.prompt, large.prompt])
    with pytest.raises(ValueError, match="in the same order"):
        policy.logprobs([small, large], features[::-1])
    with pytest.raises(ValueError, match="pass one per group"):
        policy.logprobs([small, large], features[:1])
    with pytest.raises(ValueError, match="but 0 visual features"):
        policy.logprobs([small], [VisualFeatures(None, policy.vision.version, carries_graph=False)])


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (torch.tensor([1.0, 2.0]), "token ids are int64 on the CPU"),
        (torch.tensor([True, False]), "token ids are int64 on the CPU"),
        (torch.zeros(2, 2, dtype=torch.int64), "1-D tensor"),
        (torch.tensor([1, 10_000]), "the vocabulary is 0 to"),
        (torch.tensor(tiny_policy().media_token_ids[:1]), "contains media tokens"),
    ],
)
def test_unusable_responses(response: torch.Tensor, words: str) -> None:
    policy = tiny_policy()
    group = one_group(policy)
    with pytest.raises(ValueError, match=words):
        policy.logprobs([replace(group, responses=(response,))])
