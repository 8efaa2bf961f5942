#!/usr/bin/env bash
# Train. Without a config file: set up, render the embedded data set, and train the tiny model on it, on a CPU.
#
#   bash scripts/train_video.sh                                   the embedded default, ends with runs/embedded/report.html
#   bash scripts/train_video.sh training.steps=20                 the same with a setting changed
#   bash scripts/train_video.sh CONFIG [key=value ...]            any other config
#
# Configs of the embedded task (configs/embedded*.yaml, configs/algorithms/) have its data set rendered first.
# With a CONFIG and more than one GPU, DeepSpeed is started over all of them (CUDA_VISIBLE_DEVICES chooses).
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

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

# The engine that a config with its overrides asks for; a faulty config ends here with its message.
configured_engine() {
    "$VENV/bin/python" - "$@" <<'PYTHON'
import sys

from vlm_pg.config import load_config
from vlm_pg.errors import VlmPgError

try:
    print(load_config(sys.argv[1], sys.argv[2:]).training.engine)
except VlmPgError as error:
    sys.exit(f"vlm-pg: error: {error}")
PYTHON
}

case "${1:-}" in
-h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

config=""
if [ $# -gt 0 ] && { [ -f "$1" ] || [ "${1#*=}" = "$1" ]; }; then
    config="$1"
    shift
    if [ -f "$config" ]; then
        # The working directory changes below.
        config="$(cd "$(dirname "$config")" && pwd)/$(basename "$config")"
    fi
fi

set_up_environment
cd "$REPO_ROOT"
export PATH="$VENV/bin:$PATH"

case "$config" in
"" | "$REPO_ROOT"/configs/embedded*.yaml | "$REPO_ROOT"/configs/algorithms/*.yaml)
    vlm-pg prepare embedded --out data/embedded
    ;;
esac
if [ -z "$config" ]; then
    exec vlm-pg train configs/embedded.yaml "$@"
fi

gpus="$(num_gpus)"
if [ "$gpus" -le 1 ] || [ -n "${WORLD_SIZE:-}" ]; then
    exec vlm-pg train "$config" "$@"
fi
engine="$(configured_engine "$config" "$@")" || exit 2
if [ "$engine" != deepspeed ]; then
    case " $* " in
    *" training.engine="*)
        echo "training.engine=$engine was asked for: training on one of the $gpus GPUs"
        exec vlm-pg train "$config" "$@"
        ;;
    esac
    echo "$gpus GPUs: adding training.engine=deepspeed training.deepspeed_config=configs/deepspeed/zero2.json"
    set -- "$@" training.engine=deepspeed training.deepspeed_config=configs/deepspeed/zero2.json
fi
echo "Starting DeepSpeed on $gpus GPUs"
# Without --num_gpus the launcher takes all GPUs, or those that CUDA_VISIBLE_DEVICES names.
exec deepspeed --no_local_rank --module vlm_pg.cli train "$config" "$@"
