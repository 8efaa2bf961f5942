"""A server that receives weights, as a process of its own: ``python -m tests.support.receiver`` prints its URL.

A POST to ``/save`` names a file for what it has received."""

from __future__ import annotations

import time
from typing import Any

from safetensors.torch import save_file

from tests.support.odd_server import OddServer, Reply
from tests.support.vllm_engine import Worker


class Receiver(OddServer):
    def __init__(self) -> None:
        self.worker = Worker()
        super().__init__()

    def control(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/save":
            save_file(self.worker.model.tensors, body["file"], {"buckets": str(self.worker.model.buckets)})
        elif path == "/get_world_size":
            return Reply({"world_size": 1}, body)
        elif path != "/update_weight_version":
            try:
                self.worker.call(path, body)
            except Exception as error:
                return Reply({"error": str(error)}, body, 500)
        return Reply({}, body)


if __name__ == "__main__":
    print(Receiver().url, flush=True)
    while True:
        time.sleep(1)
