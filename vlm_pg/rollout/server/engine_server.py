"""``RolloutEngine`` as a server: samples for the ranks of a run, whose weights it loads.

``vlm-pg serve`` starts it, with ``rollout.server.launch.engine=vlm_pg``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from vlm_pg.distributed import local_device
from vlm_pg.errors import ModelError, VlmPgError
from vlm_pg.models.loading import load_policy
from vlm_pg.models.lora import load_adapter
from vlm_pg.models.settings import ModelSettings
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.server.remote import ROLLOUTS_PATH, RolloutRequest
from vlm_pg.rollout.server.weights import ENDPOINTS
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Rollout

# The ranks of a run send their questions of a step at nearly the same time; together they fill the GPU better.
GATHER_SECONDS = 0.05
# Of different settings: those of training, of T-GRPO's control groups, and of the probe.
MAX_ENGINES = 3


@dataclass(eq=False)
class _Waiting:
    """A request, and whether its client has gone."""

    request: RolloutRequest
    is_gone: Callable[[], bool]
    rollouts: Future[list[tuple[Rollout, ...]]] = field(default_factory=Future)

    @property
    def key(self) -> tuple[str, int, int | str]:
        """Equal for requests that are sampled together."""
        return self.request.settings.model_dump_json(), self.request.seed, self.request.step


class EngineServer:
    """One policy; requests of one step are sampled together, others one after another.

    ``version``: of the weights, as their sender calls them; "" for those of the checkpoint, and while others load.
    """

    def __init__(self, settings: ModelSettings):
        self.settings, self.version = settings, ""
        self.policy = load_policy(settings.path, device=local_device(), settings=settings)
        # Their buffers and CUDA graphs are used again.
        self._engine = lru_cache(MAX_ENGINES)(self._make_engine)
        self._waiting, self._sampled = list[_Waiting](), list[_Waiting]()
        self._arrived, self._in_use = threading.Condition(), threading.Lock()
        threading.Thread(target=self._sample_forever, daemon=True).start()

    def sample(self, request: RolloutRequest, is_gone: Callable[[], bool]) -> list[tuple[Rollout, ...]]:
        """As ``RolloutEngine.generate``; given up if the clients of all that is sampled together have gone."""
        waiting = _Waiting(request, is_gone)
        with self._arrived:
            self._waiting.append(waiting)
            self._arrived.notify()
        return waiting.rollouts.result()

    def load(self, path: str, version: str) -> None:
        """Load weights, or with ``model.lora`` an adapter, into the policy, in place: recorded CUDA graphs stay valid.

        Raises:
            ModelError: there is no such folder, and the server keeps its weights; or they do not fit the model.
            RuntimeError: they are of another model.
        """
        if not Path(path).is_dir():
            raise ModelError(f"There is no folder {path!r} on the server's machine. Name one that it sees.")
        with self._in_use:
            self.version = ""
            model, settings = self.policy.model, self.settings
            if settings.lora is not None:
                load_adapter(model, path, settings.lora)
            else:
                # What else is set is about computing, and may not be possible on a CPU.
                plain = ModelSettings(path=path, dtype=settings.dtype, trust_remote_code=settings.trust_remote_code)
                model.load_state_dict(load_policy(path, device="cpu", settings=plain).model.state_dict())
            self.policy.weights_changed()
            self.policy.vision.forget()
            self.version = version

    def _sample_forever(self) -> None:
        try:
            while True:
                self._sample_next()
        except BaseException:
            # It cannot sample any more, after an error on the GPU for example: who watches the process shall see that.
            traceback.print_exc()
            os._exit(1)

    def _sample_next(self) -> None:
        """Sample what waits longest, with all that may be sampled together with it."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._waiting)
        time.sleep(GATHER_SECONDS)
        with self._arrived:
            key = self._waiting[0].key
            chosen = [one for one in self._waiting if one.key == key]
            self._waiting = [one for one in self._waiting if one.key != key]
        self._sampled = [one for one in chosen if not one.is_gone()]
        prompts = [prompt for one in self._sampled for prompt in one.request.prompts]
        for one in chosen:
            if one not in self._sampled:
                one.rollouts.set_exception(InterruptedError())
        if not prompts:
            return
        try:
            with self._in_use:
                rollouts = iter(self._engine(*key[:2]).generate(prompts, key[2]))
            for one in self._sampled:
                one.rollouts.set_result([next(rollouts) for _ in one.request.prompts])
        except (VlmPgError, ValueError, InterruptedError, torch.OutOfMemoryError) as error:
            traceback.clear_frames(error.__traceback__)  # which hold keys and values
            for one in self._sampled:
                one.rollouts.set_exception(error)

    def _make_engine(self, settings: str, seed: int) -> RolloutEngine:
        def should_stop() -> bool:
            return all(one.is_gone() for one in self._sampled)

        return RolloutEngine(self.policy, RolloutSettings.model_validate_json(settings), seed, should_stop)


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        engine = self.server.engine
        answers: dict[str, Any] = {
            "/health": {},
            "/openapi.json": {"paths": {path: {} for path in (ROLLOUTS_PATH, *ENDPOINTS["vlm_pg"])}},
            "/v1/models": {"data": [{"id": engine.settings.path, "owned_by": "vlm_pg"}]},
            "/model_info": {"weight_version": engine.version},
        }
        self._reply(200, answers[self.path]) if self.path in answers else self._reply(404, {"error": self.path})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            self._reply(200, self._answer(body))
        except (VlmPgError, ValueError) as error:
            self._reply(400, {"error": str(error)})
        except InterruptedError:
            self.close_connection = True  # the client has disconnected
        except Exception as error:
            traceback.print_exc()
            self._reply(500, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, body: bytes) -> dict[str, Any]:
        engine = self.server.engine
        if self.path == ROLLOUTS_PATH:
            groups = engine.sample(RolloutRequest.unpack(body), self._is_gone)
            return {"groups": [[_as_json(rollout) for rollout in group] for group in groups]}
        if self.path == "/update_weights_from_disk":
            wanted = json.loads(body)
            engine.load(wanted["model_path"], wanted["weight_version"])
        elif self.path != "/flush_cache":  # no cache outlives a request
            raise ValueError(f"{self.path} is no endpoint of this server")
        return {"success": True}

    def _is_gone(self) -> bool:
        """Whether the client has closed the connection."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a line for each request would hide the others."""


class HttpServer(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256

    def __init__(self, address: tuple[str, int], engine: EngineServer):
        self.engine = engine
        super().__init__(address, _Handler)


def _as_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "token_ids": rollout.token_ids.tolist(),
        "logprobs": rollout.rollout_logprobs.tolist(),
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--model-settings", required=True, help="section model of the run's configuration, as JSON")
    arguments = parser.parse_args()
    settings = ModelSettings.model_validate_json(arguments.model_settings)
    server = HttpServer((arguments.host, arguments.port), EngineServer(settings))
    print(f"serving {settings.path} at {arguments.host}:{arguments.port}", flush=True)
    server.serve_forever()
