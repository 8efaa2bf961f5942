#!/usr/bin/env bash
# Train on several nodes by torchrun; started on each of them, in any order, with the same CONFIG:
#
#   bash scripts/nodes/torchrun.sh FIRST_NODE NODES NODE_RANK CONFIG [key=value ...]
#
#   bash scripts/nodes/torchrun.sh node-0 2 0 configs/qwen2_5_vl_7b_video_r1.yaml     # on node-0
#   bash scripts/nodes/torchrun.sh node-0 2 1 configs/qwen2_5_vl_7b_video_r1.yaml     # on the other one
#
# FIRST_NODE is the name or address by which the others reach the first one, at port MASTER_PORT (29500). Every GPU gets
# a process; NPROC_PER_NODE sets another number.
set -euo pipefail

if [ $# -lt 4 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    case "${1:-}" in -h | --help) exit 0 ;; *) exit 2 ;; esac
fi
export MASTER_ADDR="$1" NNODES="$2" NODE_RANK="$3"
shift 3
exec bash "$(dirname "${BASH_SOURCE[0]}")/../train_video.sh" "$@"
