"""vLLM weight transfer engine that receives the trainer's weights by broadcast (docs/servers.md).

Workers of vLLM import it, so it imports torch and vllm only:

    PYTHONPATH=FOLDER_OF_THIS_FILE vllm serve MODEL --worker-extension-cls vlm_pg_transfer.Extension \
        --weight-transfer-config '{"backend": "vlm_pg"}'
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

dist: Any = torch.distributed

# Tensors begin at multiples of this many bytes in a bucket, which has tensors of several dtypes.
ALIGNMENT = 16


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """Process group of the trainer (rank 0) and the workers; ``address`` and ``port`` of its store.

    ``key``: random, new with every group. ``timeout_seconds``: of connecting and of each broadcast.
    """

    address: str
    port: int
    key: str
    backend: str
    world_size: int
    timeout_seconds: float


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Tensors of one broadcast, by their names in checkpoint files."""

    key: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class BroadcastEngine(WeightTransferEngine):
    """Loads each received bucket with the layerwise reload of vLLM.

    A group serves one transfer. After a failure the model is a mixture of old and new weights until a transfer is
    complete; the trainer does not sample meanwhile.
    """

    init_info_cls, update_info_cls = GroupInfo, Bucket
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: Any = None
        self._key: str | None = None
        self._loads = False

    def init_transfer_engine(self, info: GroupInfo) -> None:
        self.shutdown()
        if (info.backend == "nccl") != (self.device.type == "cuda"):
            raise ValueError(
                f"The trainer broadcasts with {info.backend}, and this worker's weights are on {self.device}. "
                "Trainer and server must both use GPUs, or both CPUs."
            )
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=info.timeout_seconds)
        store = dist.TCPStore(info.address, info.port, is_master=False, timeout=timeout, wait_for_workers=False)
        store.set(f"present/{rank}", "")  # the trainer joins once all workers are about to
        if info.backend == "nccl":
            backend, options = dist.ProcessGroupNCCL, dist.ProcessGroupNCCL.Options()
        else:
            backend, options = dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options()
            with socket.create_connection((info.address, info.port), info.timeout_seconds) as connection:
                options._devices = [backend.create_device(hostname=connection.getsockname()[0])]
        options._timeout = timeout
        self._group, self._key = backend(store, rank, info.world_size, options), info.key

    def start_weight_update(self) -> None:
        self._finalize()
        initialize_layerwise_reload(self.model)
        self._loads = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.finish_weight_update()
            raise

    def receive_weights(self, bucket: Bucket) -> None:
        # Held here: freeing a gloo group waits for its broadcasts, and another thread may shut the engine down.
        group = self._group
        if group is None or self._key != bucket.key:
            raise RuntimeError("This bucket is of another process group: the server restarted, or two runs send.")
        places, end = [], 0
        for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            size = math.prod(shape) * dtype.itemsize
            places.append((name, dtype, shape, slice(end, end + size)))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        flat = torch.empty(end, dtype=torch.uint8, device=self.device)
        group.broadcast([flat], dist.BroadcastOptions()).wait()
        self.model.load_weights((name, flat[place].view(dtype).view(shape)) for name, dtype, shape, place in places)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        self._finalize()
        self.shutdown()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._key = None

    def _finalize(self) -> None:
        if self._loads:
            self._loads = False
            finalize_layerwise_reload(self.model, self.model_config)


class Extension:
    """Empty: vLLM imports the module of ``--worker-extension-cls`` before it creates the engine."""


WeightTransferEngineFactory.register_engine("vlm_pg", BroadcastEngine)
