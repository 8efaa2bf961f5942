"""On a real GPU: with liger's kernels a policy says what it says without them, within bf16's precision."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import make_case, random_group
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.models.liger import Liger, liger_of
from vlm_pg.models.loading import make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings, Switch

pytestmark = pytest.mark.gpu
pytest.importorskip("liger_kernel")


def policy(liger: Switch, dtype: torch.dtype) -> Policy:
    model = tiny_model().to("cuda", dtype)
    return make_policy(model, tiny_processor(), ModelSettings(path="tiny", liger=liger))


@pytest.mark.parametrize("switch", [True, "auto"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_values_and_gradients_are_the_same(dtype: torch.dtype, bound: float, switch: Switch) -> None:
    plain = policy(False, dtype)
    plain.fused_logits = False
    case = make_case(plain, "video", 0)
    groups = [random_group(plain, case, [5, 9, 1], 1)]
    fast = policy(switch, dtype)
    assert liger_of(fast.model) == Liger(("rms_norm", "swiglu", "rope"))
    assert fast.fuses_logits(dtype) == (dtype == torch.bfloat16)
    from vlm_pg.models.liger_layers import swiglu

    assert fast.model.model.language_model.layers[0].mlp.forward.__func__ is swiglu
    results = []
    for one in (plain, fast):
        logprobs = torch.cat(one.logprobs(groups)[0])
        logprobs.sum().backward()
        gradients = {name: p.grad.float() for name, p in one.model.named_parameters() if p.grad is not None}
        results.append((logprobs.detach(), gradients))
    (expected, expected_gradients), (logprobs, gradients) = results
    assert (logprobs - expected).norm() <= bound * expected.norm()
    largest = max(gradient.norm() for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() <= bound * max(gradient.norm(), 1e-2 * largest), name
