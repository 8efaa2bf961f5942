#!/usr/bin/env bash
# Evaluate: rollout accuracy on prepared records, through the same prompts, engine and rewards as training.
#
#   bash scripts/eval_video.sh                                    the last embedded run
#   bash scripts/eval_video.sh CHECKPOINT [key=value ...]         a checkpoint or a run's folder
#   bash scripts/eval_video.sh MODEL --config CONFIG [key=value ...]
#   bash scripts/eval_video.sh --like RESULT.json                 the evaluation of a result once more
#
# With several GPUs, or NPROC_PER_NODE=2 and so on, as many processes share the questions; nodes as for train_video.sh.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

case "${1:-}" in
-h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

# The working directory changes below: existing paths become absolute.
arguments=()
for argument in "$@"; do
    if [ -e "$argument" ]; then
        argument="$(cd "$(dirname "$argument")" && pwd)/$(basename "$argument")"
    fi
    arguments+=("$argument")
done

set_up_environment
cd "$REPO_ROOT"
export PATH="$VENV/bin:$PATH"
find_nodes
launch torch eval ${arguments[@]+"${arguments[@]}"}
