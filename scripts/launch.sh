# How a run is started on the machines at hand; sourced by train_video.sh and eval_video.sh.
# shellcheck shell=bash
#
#   find_nodes                      sets HOW (rank, task, srun, hostfile, torchrun or here), NODES, NODE, PROCESSES_HERE
#   launch ENGINE COMMAND ARG...    becomes `vlm-pg COMMAND ARG...` (train, eval), once or on every device of every node
#
# What is looked at, first match wins:
#   LOCAL_RANK                          a launcher has started this process as one rank
#   SLURM_STEP_ID, SLURM_STEP_NUM_TASKS this is a task of srun: every task is one rank
#   SLURM_JOB_ID, SLURM_JOB_NUM_NODES   an allocation of several nodes: srun starts the tasks
#   VLM_PG_HOSTFILE or /job/hostfile    DeepSpeed's launcher goes to the hosts by pdsh and ssh; with NODE_RANK set, each node
#                                       is started by itself
#   NNODES, NODE_RANK, MASTER_ADDR      torchrun on each node (or PET_NNODES, ..., as Kubernetes operators set them; or
#                                       WORLD_SIZE and RANK without LOCAL_RANK, one process a pod)
#   otherwise                           this machine alone: its GPUs, or NPROC_PER_NODE processes

# How long a rank that was asked to stop may take to save; without it torchrun kills after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
# SIGUSR1 is what schedulers send ahead of a time limit; torchrun would die of it. It reads its options as PET_ variables.
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"

num_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        # As CUDA reads it: a comma-separated list, of which nothing counts from -1 on.
        printf '%s' "${CUDA_VISIBLE_DEVICES%%-1*}" | tr ',' '\n' | grep -c '[^[:space:]]' || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

find_nodes() {
    local gpus
    gpus="$(num_gpus)"
    PROCESSES_HERE="${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-}}"
    case "$PROCESSES_HERE" in
    "" | auto | gpu) PROCESSES_HERE=$((gpus > 0 ? gpus : 1)) ;;
    *[!0-9]* | 0) _refuse "NPROC_PER_NODE is \"$PROCESSES_HERE\". Set it to the number of processes on each node, 1 or more." ;;
    esac
    HOSTFILE="${VLM_PG_HOSTFILE:-}"
    if [ -z "$HOSTFILE" ] && [ -f /job/hostfile ] && [ "$(_hosts_of /job/hostfile | wc -l)" -gt 1 ]; then
        HOSTFILE=/job/hostfile
    fi
    NODES=1 NODE=0
    if [ -n "${LOCAL_RANK:-}" ]; then
        HOW=rank NODE="${RANK:-0}"
    elif [ -n "${SLURM_STEP_ID:-}" ] && [ "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]; then
        HOW=task NODES="${SLURM_STEP_NUM_NODES:-1}"
        _become_rank_of_slurm "$gpus"
    elif [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ] && [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
        HOW=srun NODES="$SLURM_JOB_NUM_NODES"
    elif [ -n "$HOSTFILE" ]; then
        HOW=hostfile
        _read_hostfile
    elif [ "${PET_NNODES:-${NNODES:-1}}" != 1 ]; then
        HOW=torchrun
        _describe_nodes "${PET_NNODES:-${NNODES:-}}" "${PET_NODE_RANK:-${NODE_RANK:-}}" NODE_RANK
    elif [ "${WORLD_SIZE:-1}" != 1 ]; then
        HOW=torchrun
        _describe_nodes "$WORLD_SIZE" "${RANK:-}" RANK
    else
        HOW=here
    fi
}

launch() {
    local engine="$1" command="$2"
    shift 2
    case "$HOW" in
    rank | task) exec vlm-pg "$command" "$@" ;;
    srun) _launch_by_slurm "$@" ;;
    hostfile) _launch_by_hostfile "$command" "$@" ;;
    torchrun)
        echo "Starting torchrun: node $NODE of $NODES, $PROCESSES_HERE processes on each, the first is $MASTER_ADDR"
        # torchrun itself, with a shorter wait at the end for a node whose launcher is gone.
        exec python -m vlm_pg.distributed.torchrun --nnodes="$NODES" --node-rank="$NODE" \
            --nproc-per-node="$PROCESSES_HERE" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
            --module vlm_pg.cli "$command" "$@"
        ;;
    here)
        if [ "$PROCESSES_HERE" -le 1 ]; then
            exec vlm-pg "$command" "$@"
        fi
        if [ "$engine" = deepspeed ] && [ -z "${NPROC_PER_NODE:-}${PET_NPROC_PER_NODE:-}" ]; then
            echo "Starting DeepSpeed on $PROCESSES_HERE GPUs"
            # Without --num_gpus the launcher takes all GPUs, or those that CUDA_VISIBLE_DEVICES names.
            exec deepspeed --no_local_rank --module vlm_pg.cli "$command" "$@"
        fi
        echo "Starting torchrun: $PROCESSES_HERE processes"
        exec torchrun --standalone --nproc-per-node="$PROCESSES_HERE" --module vlm_pg.cli "$command" "$@"
        ;;
    esac
}

_refuse() {
    echo "$(basename "$0"): error: $1" >&2
    exit 2
}

# NODES, NODE, MASTER_ADDR and MASTER_PORT, of which the latter two come from torchrun's or the usual variables.
_describe_nodes() {
    NODES="$1" NODE="$2"
    case "$NODES" in
    "" | *[!0-9]*) _refuse "the number of nodes is \"$NODES\". It must be one number: all nodes start and end together." ;;
    esac
    case "$NODE" in
    "" | *[!0-9]*) _refuse "$NODES nodes were asked for, but $3 is \"$NODE\". Set it to 0 on the first node, 1 on the next, ..." ;;
    esac
    if [ "$NODE" -ge "$NODES" ]; then
        _refuse "$3 is $NODE, and there are $NODES nodes. Allowed is 0 to $((NODES - 1))."
    fi
    MASTER_ADDR="${PET_MASTER_ADDR:-${MASTER_ADDR:-}}"
    MASTER_PORT="${PET_MASTER_PORT:-${MASTER_PORT:-29500}}"
    if [ -z "$MASTER_ADDR" ]; then
        _refuse "$NODES nodes were asked for, but MASTER_ADDR is not set. Set it to the name or address of the first node."
    fi
}

# srun says where a task stands; the ranks meet at the first node.
_become_rank_of_slurm() {
    local gpus="$1"
    export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_STEP_NUM_TASKS" LOCAL_RANK="$SLURM_LOCALID"
    NODE="$SLURM_PROCID"
    if [ "$gpus" = 1 ]; then
        # --gpus-per-task=1: the only one that this task sees is its own.
        LOCAL_RANK=0
    fi
    if [ -z "${MASTER_ADDR:-}" ]; then
        # Not head, which may leave before scontrol has written all, and end it and this script.
        MASTER_ADDR="$(scontrol show hostnames "$SLURM_STEP_NODELIST" | sed -n 1p)"
    fi
    # Jobs that share a node get different ports.
    export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
}

_launch_by_slurm() {
    echo "Starting srun: $NODES nodes, $PROCESSES_HERE tasks on each"
    # The first rank that fails ends them all.
    exec srun --nodes="$NODES" --ntasks-per-node="$PROCESSES_HERE" --kill-on-bad-exit=1 \
        bash "$REPO_ROOT/scripts/$(basename "$0")" "$@"
}

# The first words of lines "HOST slots=N", as DeepSpeed reads them.
_hosts_of() {
    sed -e 's/#.*//' "$1" | awk 'NF { print $1 }'
}

_read_hostfile() {
    if [ ! -f "$HOSTFILE" ]; then
        _refuse "VLM_PG_HOSTFILE is $HOSTFILE, which is no file. It must have a line \"HOST slots=GPUS\" for each node."
    fi
    HOSTFILE="$(cd "$(dirname "$HOSTFILE")" && pwd)/$(basename "$HOSTFILE")"
    local hosts
    hosts="$(_hosts_of "$HOSTFILE")"
    NODES="$(printf '%s\n' "$hosts" | grep -c . || true)"
    if [ "$NODES" = 0 ]; then
        _refuse "$HOSTFILE names no host. It must have a line \"HOST slots=GPUS\" for each node."
    fi
    if [ "$NODES" = 1 ]; then
        NODE_RANK=0 MASTER_ADDR=127.0.0.1
    fi
    if [ -n "${NODE_RANK:-}" ]; then
        MASTER_ADDR="${MASTER_ADDR:-$(printf '%s\n' "$hosts" | sed -n 1p)}"
        _describe_nodes "$NODES" "$NODE_RANK" NODE_RANK
    fi
}

_launch_by_hostfile() {
    local command="$1"
    shift
    local options=(--hostfile "$HOSTFILE" --no_local_rank)
    if [ -n "${NODE_RANK:-}" ]; then
        echo "Starting DeepSpeed: node $NODE of $NODES ($HOSTFILE)"
        options+=(--no_ssh --node_rank "$NODE" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT")
    else
        if ! command -v pdsh >/dev/null; then
            _refuse "$HOSTFILE names $NODES nodes, and pdsh, by which DeepSpeed's launcher reaches them, is not installed. \
Install it, or start this on every node with NODE_RANK=0, 1, ... set."
        fi
        # pdsh waits for its ssh to every node, and ssh asks nothing of a node that went silent. The user's options count.
        export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} -o ServerAliveInterval=10 -o ServerAliveCountMax=6"
        echo "Starting DeepSpeed on $NODES nodes ($HOSTFILE)"
        options+=(--force_multi)
        [ -z "${MASTER_ADDR:-}" ] || options+=(--master_addr "$MASTER_ADDR")
        [ -z "${MASTER_PORT:-}" ] || options+=(--master_port "$MASTER_PORT")
    fi
    exec deepspeed "${options[@]}" --module vlm_pg.cli "$command" "$@"
}
