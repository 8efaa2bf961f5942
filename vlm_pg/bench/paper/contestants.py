"""What one contestant asks of a device at one point. Run in a process of its own: what it registers stays there."""

from __future__ import annotations

import time
from typing import Any

import torch

from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.generation.case import GenerationCase
from vlm_pg.bench.paper.beside import counted_kernel
from vlm_pg.bench.paper.counter import count, count_laps, fake_mode
from vlm_pg.bench.paper.fake import fake_policy, reference_operators
from vlm_pg.bench.paper.generation import Generation, count_generate, count_ours
from vlm_pg.bench.paper.models import config_of, model_of
from vlm_pg.bench.paper.replaced import replaced
from vlm_pg.bench.paper.sequence import CountedRank
from vlm_pg.bench.paper.trees import Tree, extrapolated, tree_of, weighted
from vlm_pg.bench.paper.whole_step import TOKEN_COLUMNS, TOKEN_ROWS, whole_step
from vlm_pg.bench.training.case import TrainingCase
from vlm_pg.errors import VlmPgError
from vlm_pg.models.loading import DTYPES
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.processes import resolve

# Of rollouts: whose loop is looked into how.
_GENERATIONS = {"ours": count_ours, "transformers-generate": count_generate}


def tried(spec: dict[str, Any]) -> dict[str, Any]:
    """As ``counted``, with the processor seconds it took; or, as ``not_counted``, why it could not be."""
    torch.set_num_threads(1)
    started = time.process_time()
    try:
        found = counted(spec)
    except (CannotRun, VlmPgError) as error:
        found = {"not_counted": str(error)}
    except Exception as error:  # whatever others' code raises on fake tensors is said of it, and the next is counted
        words = str(error).strip().splitlines() or [""]
        found = {"not_counted": f"{type(error).__name__} on fake tensors: {words[0]}"}
    return found | {"count_seconds": round(time.process_time() - started, 1)}


def counted(spec: dict[str, Any]) -> dict[str, Any]:
    """The entry of one contestant at one point; of a model with ``layers`` from two that have only so many."""
    if spec["work"] == "grpo-step":
        return whole_step(spec, counted)
    config = config_of(spec["model"])
    text = config.get_text_config()
    if spec["work"] != "tower" and "linear_attention" in (getattr(text, "layer_types", None) or []):
        return _counted(spec, config) | {"linear_attention": "reference"}
    return _counted(spec, config)


def _counted(spec: dict[str, Any], config: Any) -> dict[str, Any]:
    if spec["layers"] is None:
        return _finished(_count(spec, config))
    text = config.get_text_config()
    whole, found = text.num_hidden_layers, []
    kinds = list(getattr(text, "layer_types", None) or [])
    for layers in spec["layers"]:
        text.num_hidden_layers = layers
        if kinds:
            text.layer_types = kinds[:layers]
        found.append(_count(spec, config))
    at = tuple(spec["layers"])
    return _finished(extrapolated(found[0], found[1], at, whole)) | {"layers_counted": spec["layers"]}


def _count(spec: dict[str, Any], config: Any) -> Tree:
    fakes = fake_mode()
    policy = _policy(spec, config, fakes)
    with reference_operators(policy.model):
        return _count_with(policy, spec, fakes)


def _count_with(policy: Policy, spec: dict[str, Any], fakes: Any) -> Tree:
    weights = {"weights_bytes": sum(p.numel() * p.element_size() for p in policy.model.parameters())}
    point = spec["point"]
    if spec["work"] == "tower":
        if "pairs" in point:  # of frames, in one video
            return weights | _tower(policy, point["pairs"], (TOKEN_ROWS, TOKEN_COLUMNS), 1, fakes)
        pairs = -(-point["visual_tokens"] // _FRAME_SIDE**2)
        return weights | _tower(policy, pairs, (_FRAME_SIDE, _FRAME_SIDE), point["runs"], fakes)
    if spec["work"] == "step":
        case = TrainingCase.random(policy, point["prefix"], point["lengths"])
        run = resolve(spec["run"])
        if ranks := spec.get("sequence_ranks"):
            sequence = CountedRank(ranks, spec["sequence_rank"])
            found = count(lambda: run(case, sequence=sequence), fakes)
            sequence.add_to(found)
        else:
            found = count(lambda: run(case), fakes)
        parts = {"update": tree_of(found)}
        return weights | {"parts": parts, "peak_bytes": found.peak_bytes, "end_bytes": found.end_bytes}
    made = GenerationCase.random(policy, point["prefix"], point["generations"], point["new_tokens"], point["groups"])
    return weights | _generation(spec["contestant"], made, fakes)


def _policy(spec: dict[str, Any], config: Any, fakes: Any) -> Policy:
    lora = LoraSettings(rank=spec["lora"]) if spec["lora"] else None
    settings = ModelSettings(
        path=spec["model"],
        dtype=spec["dtype"],
        gradient_checkpointing=spec["checkpointing"] and spec["work"] == "step",
        lora=lora,
        liger=spec["liger"],
    )

    def build() -> Any:
        model = model_of(config, DTYPES[spec["dtype"]])
        if lora is not None:
            _add_adapter(model, lora)
        return model

    return fake_policy(build, settings, fakes, counted_kernel(), spec["dtype"] == "bf16")


def _add_adapter(model: Any, settings: LoraSettings) -> None:
    from vlm_pg.models.lora import add_lora

    usual = torch.get_default_dtype()
    # Made as it shall be and where; peft would move it there, which fake weights do not take.
    torch.set_default_dtype(model.dtype)
    try:
        with replaced(torch.nn.Module, to=lambda module, *_, **__: module):
            add_lora(model, settings)
    finally:
        torch.set_default_dtype(usual)


def _generation(name: str, case: GenerationCase, fakes: Any) -> Tree:
    found: list[Generation] = []
    count_laps(lambda lap: found.append(_GENERATIONS[name](case, lap)), fakes)
    (one,) = found
    parts = {"prefill": one.prefill, "steps": one.steps}
    memory = {"peak_bytes": one.peak_bytes, "end_bytes": one.end_bytes}
    # Empty where every response has one token.
    graphs = {"captured_launches": one.captured, "replays": dict.fromkeys(one.graphs_on, one.replays)}
    graphs["eager_steps"] = one.eager_steps
    return {"parts": {key: part for key, part in parts.items() if part}, "middle": one.middle} | memory | graphs


def _tower(policy: Policy, pairs: int, sides: tuple[int, int], runs: int, fakes: Any) -> Tree:
    """The vision tower over one video, as often as it runs; frozen, so without gradient.

    Its output is there at the end. ``pairs``: of frames, with so many visual tokens along the ``sides`` of each.
    """
    pixels = policy.pixels
    merged = round(pixels.patches_per_token**0.5)
    grid = torch.tensor([[pairs, sides[0] * merged, sides[1] * merged]])
    patches = int(grid.prod())
    values = pixels.channels * pixels.temporal_patch_size * pixels.patch_size**2
    with fakes:
        shown = torch.empty(runs * patches, values, dtype=policy.dtype)
    grids = grid.expand(runs, -1).contiguous()
    features: list[Any] = []
    with torch.no_grad():
        found = count(lambda: features.append(policy.run_tower(shown, grids)), fakes)
    return {"parts": {"tower": tree_of(found)}, "peak_bytes": found.peak_bytes, "end_bytes": found.end_bytes}


# A frame of so many visual tokens along each side; two frames a token.
_FRAME_SIDE = 16


def _finished(found: Tree) -> dict[str, Any]:
    total = weighted((1, part) for part in found["parts"].values())
    return {**found, "counts": total}
