"""``vlm-pg export``: a checkpoint as a plain transformers folder, an adapter merged into its model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from vlm_pg.errors import CheckpointError, ConfigError, ModelError, VlmPgError
from vlm_pg.models.loading import DTYPES, load_policy
from vlm_pg.models.lora import adapter_base, merge_adapter
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.training import checkpoints
from vlm_pg.types import ResponseGroup

_PROBE_TOKENS = 48
# Relative to the largest value; merging in fp32 rounds far below it.
_TOLERANCE = 1e-3


def export(source: Path, out: Path, dtype: str | None = None) -> str:
    """Write the model in ``source`` to the new folder ``out``; a line that reports it.

    An adapter is merged in fp32. ``out`` appears atomically, and holds weights, configuration and processor, nothing
    else of the run. A merged model is loaded again, and must give a probe the log-probabilities it had before merging.

    Args:
        source: a checkpoint, or the folder of any adapter or model that could be trained.
        dtype: "fp32" or "bf16"; default: as the weights are stored, of an adapter those of its model.

    Raises:
        ConfigError: ``out`` exists, or ``source`` is no folder of a model.
        CheckpointError: ``source`` is a checkpoint that was not written whole.
        ModelError: the model, or the one the adapter belongs to, cannot be loaded, or a probe differs.
    """
    _check(source, out)
    base = adapter_base(source)
    settings = ModelSettings(path=str(source))
    stored = _stored_dtype(base or str(source))
    policy = load_policy(source, torch.float32 if base else stored, "cpu", settings)
    model = policy.model
    if base:
        adapted = _probe(policy)
        merge_adapter(model)
        _compare(adapted, _probe(policy), source)
    model.to(DTYPES[dtype] if dtype else stored)
    temporary = out.parent / f".tmp-{out.name}-{os.getpid()}"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(temporary)
        _processor(source, policy).save_pretrained(temporary)
        count = sum(parameter.numel() for parameter in model.parameters())
        name = str(model.dtype).removeprefix("torch.")
        if base:
            merged, at = _probe(policy), model.dtype
            del policy, model  # two models need not fit into memory
            _compare(merged, _probe(load_policy(temporary, at, "cpu")), source)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    kind = str(source)
    if base:
        kind = f"{base} with the adapter in {source} merged into it"
        has_state = (source / checkpoints.MANIFEST).exists()
        lora = (checkpoints.read_state(source).get("settings", {}).get("model.lora") if has_state else None) or {}
        if lora.get("quantize"):  # merged are the unquantized weights, beside which it did not train
            kind += f" as it was read (the adapter trained beside its weights in {lora['quantize']})"
    return f"{kind}: {count:,} parameters in {name}, written to {out}"


@torch.no_grad()
def _probe(policy: Policy) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of tokens from all over the vocabulary, and the tower's output for one visual token."""
    text_ids = [i for i in range(policy.vocab_size) if i not in policy.media_token_ids]
    ids = torch.tensor(text_ids[:: max(1, len(text_ids) // _PROBE_TOKENS)])
    half = len(ids) // 2
    inputs = {"input_ids": ids[None, :half], "mm_token_type_ids": torch.zeros(1, half, dtype=torch.int64)}
    prompt = prompt_from_processor(inputs, policy.positions, "probe")
    found = [policy.logprobs([ResponseGroup(prompt, (ids[half:],))])[0][0]]
    if policy.family.reads_media:
        pixels, grid = policy.pixels.empty_token(policy.device)
        pixels = torch.linspace(-1, 1, pixels.numel()).reshape(pixels.shape)
        found.append(policy.run_tower(pixels, grid).flatten())
    return tuple(tensor.float() for tensor in found)


def _compare(adapted: tuple[torch.Tensor, ...], merged: tuple[torch.Tensor, ...], source: Path) -> None:
    """Raise ModelError if the merged model does not compute the function of the model with its adapter."""
    for what, expected, got in zip(("log-probabilities", "visual features"), adapted, merged, strict=False):
        off = float((got - expected).abs().max())
        if not off <= _TOLERANCE * max(1.0, float(expected.abs().max())):
            raise ModelError(
                f"The adapter in {source} cannot be exported: merged into its model, {what} of a probe are off by "
                f"{off:.3g}. Nothing was written. Merge it with peft (merge_and_unload), or keep the adapter."
            )


def _check(source: Path, out: Path) -> None:
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists already, and nothing is overwritten. Give a folder that does not exist yet.")
    if not source.is_dir():
        raise ConfigError(f"{source} is not a folder. Give a checkpoint, such as runs/mine/checkpoints/step-000100.")
    if not any((source / name).is_file() for name in ("config.json", "adapter_config.json")):
        found = checkpoints.find_checkpoints(source / "checkpoints")
        hint = f"The newest checkpoint in it is {found[-1][1]}." if found else "Give a checkpoint's folder."
        raise ConfigError(f"{source} has neither config.json nor adapter_config.json, so it is no model. {hint}")
    problem = checkpoints.problem_with(source, check_hashes=True) if (source / checkpoints.MANIFEST).exists() else None
    if problem is not None:
        raise CheckpointError(f"{source} is not a usable checkpoint: {problem}. Export another one of its run.")


def _stored_dtype(path: str) -> torch.dtype:
    """Of the weights in a model's folder; fp32 where its configuration does not say."""
    from transformers import AutoConfig

    try:
        dtype = AutoConfig.from_pretrained(path).dtype
    except Exception:  # loading the model reports the fault
        dtype = None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _processor(source: Path, policy: Any) -> Any:
    """The checkpoint's own, where it has one: an adapter's lies beside it."""
    if adapter_base(source) is None or not (source / "tokenizer_config.json").is_file():
        return policy.processor
    try:
        return type(policy.processor).from_pretrained(str(source))
    except Exception as error:  # tokenizers raise nothing more exact
        raise VlmPgError(f"The processor in {source} cannot be read: {error}") from error
