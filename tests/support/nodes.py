"""Several "nodes" on this machine: `scripts/train_video.sh` as each of them starts it, and stand-ins for what reaches
other machines (ssh, pdsh, srun), which start the same commands here."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import psutil

from tests.support.processes import ONE_THREAD_NO_GPU, ROOT

HOSTS = ("node-0", "node-1")
# Start a command as a node: its process id is kept by name, and its host name is that one where that is allowed.
AS_NODE = """#!/bin/bash
echo $$ >"$NODE_PIDS/$1"
if [ -n "$OWN_HOST_NAMES" ]; then
    exec unshare --uts bash -c 'hostname "$1"; shift; exec "$@"' _ "$@"
fi
shift
exec "$@"
"""
# ssh [-o OPTION] HOST COMMAND
SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
shift
if [ "$*" = "hostname -I" ]; then echo 127.0.0.1; exit; fi
exec bash -c "$*"
"""
_WAIT = """code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "$code"
"""
# pdsh -S -f N -w HOST,HOST COMMAND, in which %n is the host's index
PDSH = f"""#!/bin/bash
while [ $# -gt 0 ]; do
    case "$1" in -S) shift ;; -f) shift 2 ;; -w) hosts="$2"; shift 2 ;; *) break ;; esac
done
index=0 tasks=()
for host in ${{hosts//,/ }}; do
    as_node "$host" bash -c "${{*//%n/$index}}" &
    tasks+=($!) index=$((index + 1))
done
{_WAIT}"""
# One that fails ends the others, as --kill-on-bad-exit asks for.
SRUN = """#!/bin/bash
while [ $# -gt 0 ]; do
    case "$1" in --nodes=*) nodes="${1#*=}" ;; --ntasks-per-node=*) per_node="${1#*=}" ;; --*) ;; *) break ;; esac
    shift
done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$((nodes * per_node)) SLURM_STEP_NUM_NODES="$nodes" SLURM_STEP_NODELIST=all
for ((node = 0; node < nodes; node++)); do
    for ((task = 0; task < per_node; task++)); do
        SLURM_PROCID=$((node * per_node + task)) SLURM_LOCALID="$task" as_node "node-$node" "$@" &
    done
done
code=0
for ((i = 0; i < nodes * per_node; i++)); do
    wait -n || { code=$?; kill $(jobs -p) 2>/dev/null; }
done
exit "$code"
"""
STAND_INS = {
    "as_node": AS_NODE,
    "ssh": SSH,
    "pdsh": PDSH,
    "srun": SRUN,
    "scontrol": "#!/bin/bash\necho 127.0.0.1\necho 127.0.0.2\n",
}


@cache
def own_host_names() -> bool:
    """Whether processes may be given host names of their own here."""
    try:
        named = subprocess.run(
            ["unshare", "--uts", "bash", "-c", "hostname a-node && hostname"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return False
    return named.stdout == "a-node\n"


def host_name(node: int) -> str:
    """What a process of this node says where it runs."""
    return HOSTS[node] if own_host_names() else socket.gethostname()


def make_checkout(folder: Path) -> Path:
    """The scripts beside an environment that is complete: its commands are those of the tests."""
    root, commands = folder / "checkout", Path(sys.executable).parent
    (root / ".venv/bin").mkdir(parents=True)
    (root / "stand-ins").mkdir()
    (root / "pids").mkdir()
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    files = {root / ".venv/bin" / name: f'#!/bin/bash\nexec "{commands / name}" "$@"\n' for name in (
        "python",
        "torchrun",
        "deepspeed",
    )}  # fmt: skip
    files[root / ".venv/bin/vlm-pg"] = f'#!/bin/bash\nexec "{sys.executable}" -m vlm_pg.cli "$@"\n'
    files |= {root / "stand-ins" / name: text for name, text in STAND_INS.items()}
    for path, text in files.items():
        path.write_text(text)
        path.chmod(0o755)
    subprocess.run(["bash", "-c", '. scripts/setup.sh; _fingerprint >"$STAMP"'], cwd=root, check=True)
    (root / "hosts").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    return root


class Nodes:
    """A training run over two nodes of one process each, started in one of the ways that users have.

    Args:
        way: "torchrun" (the file for it, once a node), "hostfile" (DeepSpeed's launcher goes to all), "hostfile without
            ssh" (once a node), or "slurm" (the batch file).
    """

    def __init__(self, root: Path, way: str, *arguments: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._pids, self._log = root / "pids", root / "log.txt"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_"))}
        path = f"{root / 'stand-ins'}:{os.environ['PATH']}"
        self._environment = kept | ONE_THREAD_NO_GPU | {
            "PYTHONPATH": str(ROOT),
            "PATH": path,
            "NODE_PIDS": str(self._pids),
            "OWN_HOST_NAMES": "yes" if own_host_names() else "",
            "MASTER_PORT": port,
        }  # fmt: skip
        script, file = f"{root}/scripts/train_video.sh", {"VLM_PG_HOSTFILE": f"{root}/hosts"}
        with self._log.open("w") as self._printed:
            if way == "torchrun":
                command = [f"{root}/scripts/nodes/torchrun.sh", "127.0.0.1", "2"]
                self._running = [self._node(node, [*command, str(node), *arguments]) for node in (0, 1)]
            elif way == "hostfile without ssh":
                file |= {"MASTER_ADDR": "127.0.0.1"}
                self._running = [self._node(node, [script, *arguments], NODE_RANK=str(node), **file) for node in (0, 1)]
            elif way == "hostfile":
                self._running = [self._start(["bash", script, *arguments], file)]
            else:
                job = {"SLURM_JOB_ID": "70123", "SLURM_JOB_NUM_NODES": "2"}
                command = ["bash", f"{root}/scripts/nodes/train.sbatch", *arguments]
                # The batch file stands in the repository's folder.
                self._running = [self._start(command, job, cwd=root)]

    def _node(self, node: int, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        return self._start(["as_node", HOSTS[node], "bash", *command], environment)

    def _start(
        self, command: Sequence[str], environment: dict[str, str], cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        values = self._environment | environment
        return subprocess.Popen(["env", *command], env=values, cwd=cwd, stdout=self._printed, stderr=subprocess.STDOUT)

    @property
    def printed(self) -> str:
        """All that all nodes have printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def returncodes(self) -> list[int | None]:
        """Of each start by the user."""
        return [process.poll() for process in self._running]

    def wait_for(self, holds: Callable[[], bool], seconds: float = 240) -> None:
        """Until ``holds()``; fails when that takes longer, or nothing runs that could bring it about."""
        deadline = time.monotonic() + seconds
        while not holds():
            ended = all(code is not None for code in self.returncodes)
            assert time.monotonic() < deadline and not (ended and not holds()), self.printed[-6000:]
            time.sleep(0.02)

    def signal(self, node: int, number: signal.Signals) -> None:
        """To what the user started on this node."""
        os.kill(int((self._pids / HOSTS[node]).read_text()), number)

    def die(self, node: int) -> None:
        """What a node that loses its power does: every process of it is gone, and says nothing."""
        first = psutil.Process(int((self._pids / HOSTS[node]).read_text()))
        for process in [first, *first.children(recursive=True)]:
            process.kill()

    def processes(self) -> list[psutil.Process]:
        """All that run now, those that were started by those that were started."""
        found = []
        for process in self._running:
            try:
                first = psutil.Process(process.pid)
                found += [first, *first.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        return found

    def end(self) -> None:
        """Whatever is left of it."""
        for process in self.processes():
            process.kill()
        for process in self._running:
            process.wait()
