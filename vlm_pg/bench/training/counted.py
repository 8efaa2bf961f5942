"""What a contestant of ``bench step`` would be asked to do, counted beside what is measured."""

from __future__ import annotations

from functools import partial
from typing import Any

from vlm_pg.bench.case import Spec, random_model, settings_of
from vlm_pg.bench.paper.beside import kernel_beside
from vlm_pg.bench.paper.counter import count, fake_mode
from vlm_pg.bench.paper.fake import fake_policy
from vlm_pg.bench.training.case import TrainingCase
from vlm_pg.models.loading import DTYPES


def counted_step(spec: Spec, name: str, run: Any) -> dict[str, Any]:
    """Operations, bytes read and written, kernels, and peak memory in bytes above the weights.

    Raises:
        CannotRun: it cannot be counted here; the message says why.
    """
    kernel, fakes = kernel_beside(spec), fake_mode()
    build = partial(random_model, spec["model"], dtype=DTYPES[spec["dtype"]])
    policy = fake_policy(build, settings_of(spec), fakes, kernel)
    case = TrainingCase.random(policy, spec["prefix"], spec["lengths"])
    found = count(partial(case.run, run), fakes, on_gpu=spec["device"] == "cuda")
    return {
        "flops": found.total_flops,
        "bytes": found.total_bytes,
        "launches": found.total_launches,
        "peak_bytes": found.peak_bytes,
    }
