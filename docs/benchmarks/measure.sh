#!/usr/bin/env bash
# The measurements behind docs/benchmarks: raw numbers (JSON).
#
#   docs/benchmarks/measure.sh cpu             # models small and mid, fp32
#   docs/benchmarks/measure.sh gpu             # Qwen2.5-VL 3B and 7B shapes, bf16, random weights
#   docs/benchmarks/measure.sh rollout-cpu     # the same for generation
#   docs/benchmarks/measure.sh rollout-gpu
#   docs/benchmarks/measure.sh eval-cpu        # evaluation on videos
#   docs/benchmarks/measure.sh eval-gpu
#   docs/benchmarks/measure.sh paper           # FLOPs, bytes and memory of updates and rollouts, counted; no GPU needed
#
# A run that was stopped goes on where it was when it is started again on the same day. Install prefix-grouper first, or
# its contestant is listed as left out.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="docs/benchmarks/$(date +%Y-%m-%d)"

measure() { # program: others, eval (scripts.bench) or rollout (vlm-pg bench); NAME, options
  local program=$1 name=$2
  shift 2
  local command=(python -m "scripts.bench.$program") resume=()
  if [[ "$program" == rollout ]]; then command=(vlm-pg bench rollout); fi
  if [[ -e "$out-$name.json" ]]; then resume=(--resume); fi
  "${command[@]}" "$@" --out "$out-$name.json" "${resume[@]}"
}

grid=(1024,8,128 4096,8,512 4096,8,128 8192,8,1024 16384,8,512)
case "${1:-}" in
  cpu)
    measure others cpu-small --device cpu --model small --checkpointing --points "${grid[@]}"
    measure others cpu-mid --device cpu --model mid --checkpointing --points "${grid[@]}"
    measure others cpu-mid-ragged --device cpu --model mid --checkpointing --ragged --points 2048,8,256 4096,8,512
    ;;
  gpu)
    measure others gpu-3b --device cuda --model 3b --dtype bf16 --checkpointing --points "${grid[@]}"
    measure others gpu-7b --device cuda --model 7b --dtype bf16 --checkpointing --points "${grid[@]}"
    ;;
  rollout-cpu)
    measure rollout cpu-small-rollout --device cpu --model small --points 1024,8,64 4096,8,64 4096,8,64,4
    measure rollout cpu-mid-rollout --device cpu --model mid --points 1024,8,64 4096,8,64 4096,8,256 4096,16,64
    ;;
  rollout-gpu)
    measure rollout gpu-3b-rollout --device cuda --model 3b --dtype bf16 --points 4096,8,256 8192,16,256
    measure rollout gpu-7b-rollout --device cuda --model 7b --dtype bf16 --points 4096,8,256 8192,16,256
    ;;
  eval-cpu) measure eval cpu-mid-eval --device cpu --model mid ;;
  eval-gpu)
    measure eval gpu-3b-eval --device cuda --model 3b --dtype bf16
    measure eval gpu-7b-eval --device cuda --model 7b --dtype bf16
    ;;
  paper)
    for model in Qwen2.5-VL-7B Qwen3-VL-8B Qwen3.5-9B; do
      python -m scripts.bench.paper --checkpointing --models "$model" --points 4096,8,512 16384,8,1024 \
        --rollout-points 4096,8,512 16384,32,512 --out "$out-paper-$model.json"
    done
    ;;
  *)
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
