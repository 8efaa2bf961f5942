"""What a contestant of ``bench rollout`` would be asked to do, counted beside what is measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vlm_pg.bench.case import Spec, random_model, settings_of
from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.generation.case import GenerationCase
from vlm_pg.bench.paper.beside import kernel_beside
from vlm_pg.bench.paper.counter import count_laps, fake_mode
from vlm_pg.bench.paper.fake import fake_policy
from vlm_pg.bench.paper.generation import Generation, Lap, count_continuous, count_generate, count_ours
from vlm_pg.bench.paper.trees import weighted
from vlm_pg.models.loading import DTYPES


def _counting(name: str, device: str) -> Callable[[GenerationCase, Lap], Generation]:
    """
    Raises:
        CannotRun: as ``counted_rollout``.
    """
    if name in ("ours", "ours-one-by-one"):
        return partial(count_ours, as_on_cuda=device == "cuda")
    if name == "transformers-generate":
        return count_generate
    if device == "cuda":
        raise CannotRun("on a GPU its steps are CUDA graphs of its own, which are not counted")
    return count_continuous


def counted_rollout(spec: Spec, name: str, run: Any) -> dict[str, Any]:
    """Operations, bytes read and written, kernels, and peak memory in bytes above the weights, of the whole run.

    Raises:
        CannotRun: this contestant cannot be counted here; the message says why.
    """
    kernel, fakes = kernel_beside(spec), fake_mode()
    build = partial(random_model, spec["model"], dtype=DTYPES[spec["dtype"]])
    policy = fake_policy(build, settings_of(spec), fakes, kernel)
    times = 1
    if name == "ours-one-by-one":
        # The groups are alike, and nothing of one is there when the next one begins.
        spec, times = spec | {"groups": 1}, spec["groups"]
    case = GenerationCase.random(policy, spec["prefix"], spec["generations"], spec["new_tokens"], spec["groups"])
    found: list[Generation] = []
    count_laps(lambda lap: found.append(_counting(name, spec["device"])(case, lap)), fakes)
    total = weighted([(times, found[0].prefill), (times, found[0].steps)])
    return {
        "flops": sum(total["flops"].values()),
        "bytes": sum(total["bytes"].values()),
        "launches": total["launches"],
        "peak_bytes": found[0].peak_bytes,
    }
