"""A real vLLM on a CPU as a child process, for tests and measurements. ``scripts/vllm_env.sh`` installs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Environment variable with the path of the ``vllm`` executable.
COMMAND_VARIABLE = "VLM_PG_VLLM"
START_SECONDS = 400

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The endpoints that change weights and reset caches.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class VllmServer:
    """``vllm serve MODEL`` on a free port of this machine, in fp32 with prefix caching.

    Args:
        command: path of the ``vllm`` executable, behind any prefix such as ``taskset``.
        model: checkpoint folder; also the served name.
        home: folder for its log.
        flags: further flags of ``vllm serve``.
        environment: further variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        model: Path,
        home: Path,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.model = model
        self._log_file = home / "vllm.log"
        self._command = [
            *(*command, "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
            *flags,
        ]
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._environment = kept | _ENVIRONMENT | dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.base_url}/v1"

    @property
    def log(self) -> str:
        """What all starts printed."""
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""

    @property
    def pid(self) -> int:
        """Of the process that leads its group."""
        assert self._process is not None
        return self._process.pid

    def begin(self) -> None:
        """Start without waiting."""
        assert self._process is None, "it runs already"
        with self._log_file.open("ab") as log:
            # Its engine is a child process: a group of their own, so that both can be killed.
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            assert self._process is not None and self._process.poll() is None, self.log[-5000:]
            assert time.monotonic() < deadline, self.log[-5000:]
            time.sleep(0.2)

    def start(self) -> None:
        """Start, on the same port each time, and wait until it answers."""
        self.begin()
        self.wait()

    def kill(self) -> None:
        """SIGKILL to its whole process group; nothing if it does not run."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # it has ended already
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that a POST to a path of ``base_url`` yields; None for an empty body."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self.base_url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
            content = response.read()
        return json.loads(content) if content else None

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=10) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False
