"""A stand-in for ``vllm`` that is healthy, fails or hangs as its environment says, and ``vlm-pg serve`` with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from tests.support.processes import ROOT, is_alive

# Lists its process and that of a child, which a server that is killed leaves behind.
STAND_IN = f"""#!{sys.executable} -S
import os, pathlib, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
print("arguments", *sys.argv[1:], flush=True)
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(os.environ["PIDS"], str(os.getpid())).write_text(str(child.pid))
pathlib.Path(os.environ["PIDS"], str(child.pid)).touch()
if "STUBBORN" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda number, frame: (child.kill(), os._exit(0)))
def die():
    print("CUDA error: out of memory", flush=True)
    os._exit(3)
if "DIES_AT_ONCE" in os.environ:
    die()
if "HANGS" in os.environ:
    time.sleep(600)
def die_when_told():
    while not pathlib.Path(os.environ["PIDS"] + ".die").exists():
        time.sleep(0.05)
    die()
threading.Thread(target=die_when_told, daemon=True).start()
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *arguments): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Health).serve_forever()
"""


def free_port(count: int = 1) -> int:
    """The first of ``count`` ports that are free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return first


class Serving:
    """``vlm-pg serve`` on a configuration with two stand-ins.

    Args:
        folder: for all files.
        behaviour: variables of the stand-ins.
        beside: the command after ``--``.
        overrides: of the configuration.
    """

    def __init__(
        self, folder: Path, *overrides: str, behaviour: Sequence[str] = (), beside: Sequence[str] = (), gpus: str = ""
    ):
        self.folder, self.pids, self.port = folder, folder / "pids", free_port(2)
        self.pids.mkdir(parents=True)
        executable, config = folder / "vllm", folder / "run.yaml"
        executable.write_text(STAND_IN)
        executable.chmod(0o755)
        launch = {
            "executable": str(executable),
            "num_servers": 2,
            "environment": dict.fromkeys(behaviour, "1") | {"PIDS": str(self.pids)},
        }
        server = {"url": f"http://127.0.0.1:{self.port}/v1", "launch": launch}
        values = {
            "run": {"dir": str(folder / "run")},
            "model": {"path": "a model"},
            "data": {"train": "none.jsonl"},
            "rollout": {"engine": "server", "server": server},
            "training": {"steps": 1},
        }
        config.write_text(yaml.safe_dump(values))
        command = [sys.executable, "-m", "vlm_pg.cli", "serve", str(config), *overrides]
        if beside:
            command += ["--", *beside]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A test run in the background of a shell starts with SIGINT ignored, which children inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait_for(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.communicate(timeout=5)[0]
            time.sleep(0.02)

    def wait_for_line(self, words: str) -> str:
        """What is printed up to the line with ``words``."""
        assert self.process.stdout is not None
        printed = ""
        for line in self.process.stdout:
            printed += line
            if words in line:
                return printed
        raise AssertionError(printed)

    def finish(self) -> tuple[int, str]:
        """Exit code and the rest that was printed; nothing that it started runs on."""
        printed, _ = self.process.communicate(timeout=60)
        assert self.alive() == []
        return self.process.returncode, printed

    def alive(self) -> list[int]:
        """Servers and their children that run."""
        return [int(path.name) for path in self.pids.iterdir() if is_alive(int(path.name))]

    def let_servers_die(self) -> None:
        Path(f"{self.pids}.die").touch()

    def log(self, number: int) -> str:
        return (self.folder / f"run-servers/server-{self.port + number}.log").read_text()
