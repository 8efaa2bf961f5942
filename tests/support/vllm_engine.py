"""The weight transfer engine of ``vlm_pg_transfer`` without vLLM, of which it needs a base class and a registry."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch


class _Base:
    """Of vLLM's own, the part that the engine uses."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any):
        self.device, self.model, self.model_config = device, model, None
        self.parallel_config = vllm_config.parallel_config

    def parse_update_info(self, values: dict[str, Any]) -> Any:
        return self.update_info_cls(**values)  # type: ignore[attr-defined]


class Model:
    """Keeps what is loaded between the beginning and the end of a reload."""

    def __init__(self) -> None:
        self.tensors, self.buckets = dict[str, torch.Tensor](), 0

    def begin(self) -> None:
        self.tensors, self.buckets = {}, 0

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.tensors |= {name: tensor.clone() for name, tensor in tensors}
        self.buckets += 1


def _stub(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module


def plugin() -> ModuleType:
    """The plugin's module, imported where ``vllm`` is a few stubs."""
    base = "vllm.distributed.weight_transfer"
    reload = "vllm.model_executor.model_loader.reload"
    infos = {"WeightTransferInitInfo": object, "WeightTransferUpdateInfo": object}
    stubs = {
        f"{base}.base": _stub("base", WeightTransferEngine=_Base, **infos),
        f"{base}.factory": _stub("factory", WeightTransferEngineFactory=Mock()),
        reload: _stub(
            "reload",
            initialize_layerwise_reload=lambda model: model.begin(),
            finalize_layerwise_reload=lambda model, config: None,
        ),
    }
    with patch.dict(sys.modules, stubs):
        return importlib.import_module("vlm_pg.rollout.server.vllm_plugin.vlm_pg_transfer")


class Worker:
    """One vLLM worker: its endpoints for weights, one call at a time."""

    def __init__(self) -> None:
        self.model, self._lock, self.is_active = Model(), threading.Lock(), False
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel)
        self._plugin = plugin()
        self._engine = self._plugin.BroadcastEngine(None, config, torch.device("cpu"), self.model)

    def call(self, path: str, body: dict[str, Any]) -> None:
        """As vLLM's worker: a failed update ends the session, and a second one is refused while one is active."""
        with self._lock:
            if path == "/init_weight_transfer_engine":
                self._engine.init_transfer_engine(self._plugin.GroupInfo(**body["init_info"]))
            elif path == "/start_weight_update":
                if self.is_active:
                    raise RuntimeError("start_weight_update called while a weight update is already active.")
                self._engine.start_weight_update()
                self.is_active = True
            elif not self.is_active:
                raise RuntimeError(f"{path} called without a matching start_weight_update.")
            elif path == "/update_weights":
                try:
                    self._engine.update_weights(body["update_info"])
                except BaseException:
                    self.is_active = False
                    raise
            else:
                self._engine.finish_weight_update()
                self.is_active = False

    def stop(self) -> None:
        self._engine.shutdown()
