"""Seconds to expect of a question's rollouts and update on one GPU, by formula.

Of each kind of work the slower of computing and moving memory counts, kinds follow one another, and each kernel and
each wait of the host adds its time (a roofline: Williams, Waterman, Patterson, CACM 2009), with the shares of a
device's peaks that were reached where it was measured (``docs/benchmarks/2026-11-28-h100.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_pg.plan.devices import DEVICES, Device
from vlm_pg.plan.flops import (
    ATTENTION_BACKWARD,
    LINEAR_BACKWARD,
    causal_pairs,
    head_flops,
    pair_flops,
    parameter_count,
    shared_pairs,
    token_flops,
)
from vlm_pg.plan.setup import Setup
from vlm_pg.plan.shape import ModelShape

# Shares and times reached by one H100 SXM with torch 2.11 in bf16, taken for every device: cuBLAS, torch's
# FlashAttention-2, copies; products of few rows, which read weights; seconds from one kernel of a stream to the next,
# and that the device is idle once the host has waited for a value.
MATMUL, ATTENTION, BANDWIDTH, WEIGHTS_BANDWIDTH = 0.64, 0.33, 0.9, 0.75
KERNEL_SECONDS, WAIT_SECONDS = 3e-6, 6e-4
# Kernels a layer: of a decode step, of a prefill, of an update (fused norms and gates or not, with adapters).
DECODE_KERNELS, PREFILL_KERNELS, UPDATE_KERNELS = 27, 29, 80
# Elements that norms, rotations, gates and residual sums of a layer read and write, forward and backward: of the MLP's
# width and of the hidden one; torch's operators move so many times as much as fused ones. Bytes a logit.
FORWARD_ELEMENTS, BACKWARD_ELEMENTS, UNFUSED_TIMES, LOGIT_BYTES = (3, 9), (6, 13), 3.25, 40
# An adapter scales its own output and adds it to that of a linear layer: elements read and written.
ADAPTER_ELEMENTS = 5


@dataclass(frozen=True)
class Work:
    """FLOPs of products and of attention, bytes that other operations move, kernels and waits of the host."""

    matmul: float
    attention: float
    moved_bytes: float
    kernels: float
    waits: int = 1

    def seconds(self, device: Device, element: int) -> float:
        peak = device.flops_per_second[element]
        computing = self.matmul / (MATMUL * peak) + self.attention / (ATTENTION * peak)
        moving = self.moved_bytes / (BANDWIDTH * device.bytes_per_second)
        return computing + moving + self.kernels * KERNEL_SECONDS + self.waits * WAIT_SECONDS


def update_work(shape: ModelShape, setup: Setup, fused: bool) -> Work:
    """Forward and backward of one group; in the last layer only rows that predict a token go through the MLP.

    ``fused``: with liger-kernel's norms, rotations and gates.
    """
    text, rows = shape.language, setup.generations * (setup.response + 1)
    own = [setup.response] * setup.generations
    layer, pair = token_flops(text) / text.layers, pair_flops(text) / text.layers
    tokens = (text.layers - 1) * (setup.prefix + sum(own)) + sum(own)
    # A recomputation ends before the MLP's last product; adapters have no gradients of the weights below them.
    again = 1 - 2 * text.hidden * text.intermediate / layer if setup.checkpointing else 0.0
    backward = 1 if setup.lora else LINEAR_BACKWARD
    matmul = tokens * layer * (1 + backward + again) + rows * head_flops(text) * (1 + backward)
    pairs = (text.layers - 1) * shared_pairs(setup.prefix, own) + shared_pairs(setup.prefix, own)
    pairs -= causal_pairs(setup.prefix)
    times = (1 if fused else UNFUSED_TIMES) * setup.element
    forward, back = (
        mlp * text.intermediate + wide * text.hidden for mlp, wide in (FORWARD_ELEMENTS, BACKWARD_ELEMENTS)
    )
    passes = 1 + setup.checkpointing
    moved = tokens * times * (passes * forward + back)
    if setup.lora:
        outputs = 2 * text.query_width + 2 * text.key_width + 2 * text.intermediate + text.hidden
        moved += tokens * setup.element * ADAPTER_ELEMENTS * outputs * (passes + 1)
    moved += rows * text.vocab * LOGIT_BYTES
    return Work(matmul, pairs * pair * (1 + ATTENTION_BACKWARD), moved, UPDATE_KERNELS * text.layers * times)


def rollout_seconds(shape: ModelShape, setup: Setup, device: Device) -> float:
    """One question's prefill, then decode steps of all its rollouts, each of which reads weights, keys and values."""
    text, e, steps = shape.language, setup.element, setup.response
    layer, pair = token_flops(text) / text.layers, pair_flops(text) / text.layers
    tokens = (text.layers - 1) * setup.prefix
    moved = tokens * e * (FORWARD_ELEMENTS[0] * text.intermediate + FORWARD_ELEMENTS[1] * text.hidden)
    pairs = (text.layers - 1) * causal_pairs(setup.prefix)
    prefill = Work(tokens * layer, pairs * pair, moved, PREFILL_KERNELS * text.layers, waits=3)
    # A step halfway. Of experts no more are read than there are rows for.
    rows, active = setup.generations, parameter_count(text) - (0 if text.tied else text.hidden * text.vocab)
    read = e * min(shape.weights.language, max(1, rows if shape.weights.layer * text.layers > active else 1) * active)
    keys = setup.prefix + rows * steps / 2
    peak = device.flops_per_second[e]
    step = max(
        rows * (token_flops(text) + head_flops(text)) / (MATMUL * peak),
        read / (WEIGHTS_BANDWIDTH * device.bytes_per_second),
    )
    kv_bytes = keys * text.full_layers * 2 * text.key_width * e
    step += max(
        rows * (setup.prefix + steps / 2) * pair_flops(text) / (ATTENTION * peak),
        kv_bytes / (BANDWIDTH * device.bytes_per_second),
    )
    step += DECODE_KERNELS * text.layers * KERNEL_SECONDS + WAIT_SECONDS
    return prefill.seconds(device, e) + steps * step


def expected_line(shape: ModelShape, setup: Setup, fused: bool) -> str:
    """Expected seconds of one question with the largest prompt on one GPU, by kind of GPU; or why there are none."""
    if shape.language.linear is not None:
        return (
            "expected time: not estimated: linear-attention layers run by torch's or flash-linear-attention's kernels, "
            "which were not measured"
        )
    update = update_work(shape, setup, fused)
    times = (
        f"{name} {seconds_text(rollout_seconds(shape, setup, device))} + "
        f"{seconds_text(update.seconds(device, setup.element))}"
        for name, device in DEVICES.items()
    )
    work = "such a question's rollout + update on one GPU, without tower and optimizer"
    return f"expected time of {work}: {'; '.join(times)}"


def seconds_text(seconds: float) -> str:
    """Three digits, in ms below a second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
