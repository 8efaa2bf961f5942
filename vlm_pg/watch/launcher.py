"""A rank whose launcher was killed gets the SIGTERM that the launcher could not send: training saves and stops."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

CHECK_SECONDS = 1.0
# A variable that the launcher sets for its ranks, its name, and its generations of processes: `deepspeed` starts a
# process on each node, which starts the ranks.
_LAUNCHERS = (("TORCHELASTIC_RUN_ID", "torchrun", 1), ("CROSS_RANK", "deepspeed", 2))


def watch_launcher() -> None:
    """Watch the launcher from a thread, if torchrun or DeepSpeed's launcher started this process; call it early.

    Any other parent may end before its child: a shell, nohup, a container's first process.
    """
    for variable, name, generations in _LAUNCHERS:
        if variable in os.environ:
            arguments = (name, _ancestors(generations))
            threading.Thread(target=_watch, args=arguments, daemon=True, name="launcher watch").start()
            return


def _watch(name: str, launcher: list[int]) -> None:
    while _ancestors(len(launcher)) == launcher:
        time.sleep(CHECK_SECONDS)
    ended = launcher[-1] if os.getppid() == launcher[0] else launcher[0]
    if os.environ.get("LOCAL_RANK") == "0":
        line = (
            f"vlm-pg: warning: {name} (host {socket.gethostname()}, process {ended}) has ended without stopping its "
            "ranks; they stop now as on SIGTERM\n"
        )
        with suppress(OSError):  # stderr may have been a pipe to the launcher
            os.write(2, line.encode())
    os.kill(os.getpid(), signal.SIGTERM)


def _ancestors(count: int) -> list[int]:
    """Process ids of the parent, its parent, ...; fewer where the system does not show further ones."""
    pids = [os.getppid()]
    while len(pids) < count:
        try:
            # After the command, which is in brackets and may hold any character: state, parent.
            status = Path(f"/proc/{pids[-1]}/stat").read_text()
        except OSError:
            break
        pids.append(int(status.rpartition(")")[2].split()[1]))
    return pids
