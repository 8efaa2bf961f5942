"""A broadcast left to a worker that never takes part. ``python -m tests.support.left_broadcast`` ends all the same."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

from tests.support.vllm_engine import Worker
from vlm_pg.distributed.foreign import end_group, open_store, sender_group, start_broadcast

ADDRESS, TIMEOUT = "127.0.0.1", timedelta(hours=1)


def stay(port: int, joined: threading.Event) -> None:
    """In the group as long as the process lives."""
    worker = Worker()
    info = {"address": ADDRESS, "port": port, "key": "", "backend": "gloo", "world_size": 2}
    worker.call("/init_weight_transfer_engine", {"init_info": info | {"timeout_seconds": TIMEOUT.total_seconds()}})
    joined.set()
    threading.Event().wait()


if __name__ == "__main__":
    joined = threading.Event()
    store = open_store(ADDRESS, TIMEOUT)
    threading.Thread(target=stay, args=(store.port, joined), daemon=True).start()
    group = sender_group(store, "gloo", 2, ADDRESS, TIMEOUT)
    start_broadcast(group, torch.ones(2))
    joined.wait()
    end_group(group)
    del group
    print("freed", flush=True)
