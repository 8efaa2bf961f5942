"""The process that measures a point, as it is started and, where need be, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class WorkerKilled(Exception):
    """The measuring process was killed from outside or took far too long; other points can still be measured."""


def run_worker(spec: dict[str, Any], patience_seconds: float) -> dict[str, Any]:
    """Measure one point in a fresh process: ``python -m vlm_pg.bench.worker SPEC.json RESULT.json PARENT``.

    It ends with this process, also where a signal kills this one.

    Raises:
        WorkerKilled: killed by a signal, or not done within ``patience_seconds``.
        RuntimeError: it raised; the message ends with its traceback.
    """
    threads = str(spec["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        spec_path, result_path, log_path = (Path(folder, name) for name in ("spec.json", "result.json", "log"))
        spec_path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "vlm_pg.bench.worker", str(spec_path), str(result_path), str(os.getpid())]
        with log_path.open("w") as log:
            # On Linux the kernel ends a child that measures memory with its parent; elsewhere they are one group.
            own_group = sys.platform != "linux"
            process = subprocess.Popen(command, env=environment, stderr=log, start_new_session=own_group)
            try:
                code = process.wait(patience_seconds)
            except subprocess.TimeoutExpired as error:
                raise WorkerKilled(f"not done after {patience_seconds / 60:.0f} min, stopped") from error
            finally:
                if process.poll() is None:
                    if own_group:
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                    process.wait()
        if code < 0:
            raise WorkerKilled(f"killed by signal {-code} (9: mostly out of memory)")
        if code:
            raise RuntimeError(f"Measuring failed with exit code {code}:\n{log_path.read_text()[-4000:]}")
        return json.loads(result_path.read_text())
