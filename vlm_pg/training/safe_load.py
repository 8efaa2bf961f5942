"""DeepSpeed's files without what a pickle can do beside data: nothing in them is executed.

DeepSpeed reads its own files as whole pickles, which may call any function. Here they are read by torch's restricted
unpickler: tensors, plain data, and the few classes that DeepSpeed itself writes (no method of theirs runs).
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from vlm_pg.errors import CheckpointError


def load_data_only(path: str, map_location: Any = None) -> Any:
    """What ``torch.load`` finds in ``path``, if that is tensors and plain data.

    Raises:
        CheckpointError: the file names anything else, or is no file of torch's.
    """
    try:
        with torch.serialization.safe_globals(_deepspeeds_own()):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds something other than tensors and plain data, and is not read: {_first_sentence(error)} "
            "DeepSpeed writes no such file; whoever made this one could run programs as you. Resume from another "
            "checkpoint."
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a file of torch's: {type(error).__name__}: {error}. Resume from another "
            "checkpoint."
        ) from error


def _deepspeeds_own() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _first_sentence(error: Exception) -> str:
    """torch's message goes on for a page, with advice to switch the restriction off."""
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line]
    return (lines[0] if lines else type(error).__name__).partition(" Please use")[0].rstrip(".") + "."
