#!/usr/bin/env bash
# Train. Without a config file: set up, render the embedded data set, and train the tiny model on it, on a CPU.
#
#   bash scripts/train_video.sh                                   the embedded default, ends with runs/embedded/report.html
#   bash scripts/train_video.sh training.steps=20                 the same with a setting changed
#   bash scripts/train_video.sh CONFIG [key=value ...]            any other config
#   bash scripts/train_video.sh CONFIG CONFIG ... [key=value ...] one after the other, each from the last checkpoint before
#
# Configs of the embedded task (configs/embedded*.yaml, configs/algorithms/) have its data set rendered first.
# A CONFIG with rollout.server.launch gets its servers started before and stopped after (docs/servers.md).
# With a CONFIG all GPUs of this machine are used (CUDA_VISIBLE_DEVICES chooses), or all of several nodes: started by
# srun or sbatch, with a DeepSpeed hostfile (VLM_PG_HOSTFILE=FILE), or on each node with NNODES, NODE_RANK and MASTER_ADDR.
# scripts/launch.sh says what is looked at; scripts/nodes/ has files to begin with.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# The engine that a config with its overrides asks for and, if it has servers to start (rollout.server.launch), the host
# that they bind. A faulty config ends here with its message.
configured() {
    "$VENV/bin/python" - "$@" <<'PYTHON'
import sys

from vlm_pg.config import load_config
from vlm_pg.errors import VlmPgError

try:
    config = load_config(sys.argv[1], sys.argv[2:])
    launch = config.rollout.server.launch
    print(config.training.engine, launch.host if launch else "")
except VlmPgError as error:
    sys.exit(f"vlm-pg: error: {error}")
PYTHON
}

# The last checkpoint of a config's run; a run that is not finished ends the script.
checkpoint_of() {
    "$VENV/bin/python" - "$@" <<'PYTHON'
import json
import sys
from pathlib import Path

from vlm_pg.config import load_config
from vlm_pg.training.checkpoints import find_checkpoints

folder = Path(load_config(sys.argv[1], sys.argv[2:]).run.dir)
if not json.loads((folder / "summary.json").read_bytes())["finished"]:
    sys.exit(f"{folder} is not finished, so the next config is not started; run.resume=auto goes on with it")
print(find_checkpoints(folder / "checkpoints")[-1][1].resolve())
PYTHON
}

case "${1:-}" in
-h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

configs=()
while [ $# -gt 0 ] && { [ -f "$1" ] || [ "${1#*=}" = "$1" ]; }; do
    config="$1"
    shift
    if [ -f "$config" ]; then
        # The working directory changes below.
        config="$(cd "$(dirname "$config")" && pwd)/$(basename "$config")"
    fi
    configs+=("$config")
done
config="${configs[0]:-}"

find_nodes
set_up_environment
cd "$REPO_ROOT"
export PATH="$VENV/bin:$PATH"

if [ ${#configs[@]} -gt 1 ]; then
    if [ "$HOW" = rank ] || [ "$HOW" = task ]; then
        _refuse "${#configs[@]} configs are given to a rank that a launcher has started. One is expected there. Start this script once per node without a launcher, or once for each config."
    fi
    case " $*" in
    *" run.dir="* | *" run.name="*) _refuse "run.dir or run.name is set for ${#configs[@]} configs at once. Each run needs a folder of its own. Set them in the configs." ;;
    esac
    start=()
    for config in "${configs[@]}"; do
        bash "$REPO_ROOT/scripts/train_video.sh" "$config" "$@" ${start[@]+"${start[@]}"}
        start=(model.path="$(checkpoint_of "$config" "$@")")
    done
    exit 0
fi

# The first node starts the config's servers, then this script again on the GPUs that they leave. Ranks that a launcher
# has started find servers at work.
if [ -n "$config" ] && [ -z "${VLM_PG_SERVING:-}" ] && [ "$HOW" != rank ] && [ "$HOW" != task ]; then
    found="$(configured "$config" "$@")" || exit 2
    read -r _ host <<<"$found"
    if [ -n "$host" ] && [ "$HOW" = srun ]; then
        _refuse "rollout.server.launch starts servers on one node, and tasks of srun get all GPUs of every node. Use scripts/nodes/train_vllm.sbatch, where one node serves."
    fi
    if [ -n "$host" ] && [ "$NODES" -gt 1 ] && { [ "$host" = 127.0.0.1 ] || [ "$host" = localhost ]; }; then
        _refuse "rollout.server.launch.host is $host, which the other of $NODES nodes do not reach. Set it to an address of the first node in a private network, and rollout.server.url=http://ADDRESS:PORT/v1."
    fi
    if [ -n "$host" ] && [ "$NODE" = 0 ]; then
        exec vlm-pg serve "$config" "$@" -- bash "$REPO_ROOT/scripts/train_video.sh" "$config" "$@"
    fi
fi

case "$config" in
"" | "$REPO_ROOT"/configs/embedded*.yaml | "$REPO_ROOT"/configs/algorithms/*.yaml)
    # Once: the others wait for the first one before they read.
    if [ "$NODE" = 0 ] && [ "$HOW" != srun ]; then
        vlm-pg prepare embedded --out data/embedded
    fi
    ;;
esac
if [ -z "$config" ] && [ "$HOW" = here ] && [ -z "${NPROC_PER_NODE:-}" ]; then
    exec vlm-pg train configs/embedded.yaml "$@"
fi
config="${config:-$REPO_ROOT/configs/embedded.yaml}"

# Several processes without an engine of the user's own get one that divides what each would hold.
engine=torch
if [ "$HOW" != rank ] && { [ $((NODES * PROCESSES_HERE)) -gt 1 ] || [ "$HOW" = task ]; }; then
    found="$(configured "$config" "$@")" || exit 2
    read -r engine _ <<<"$found"
    case "$engine, $* " in
    torch,*" training.engine="*) ;; # asked for
    torch,*)
        if [ "$NODE" = 0 ]; then
            echo "Several processes: adding training.engine=deepspeed training.deepspeed_config=configs/deepspeed/zero2.json"
        fi
        engine=deepspeed
        set -- "$@" training.engine=deepspeed training.deepspeed_config=configs/deepspeed/zero2.json
        ;;
    esac
fi
launch "$engine" train "$config" "$@"
