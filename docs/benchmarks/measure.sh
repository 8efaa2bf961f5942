#!/usr/bin/env bash
# The measurements behind docs/benchmarks: raw numbers (JSON), figures (SVG) and the table of arithmetic (Markdown).
#
#   docs/benchmarks/measure.sh cpu [MINUTES]   # models small and mid, fp32; default 60 minutes each
#   docs/benchmarks/measure.sh gpu [MINUTES]   # Qwen2.5-VL 3B and 7B shapes, bf16, random weights; default 10 minutes each
#   docs/benchmarks/measure.sh rollout-cpu [MINUTES]   # the same for generation
#   docs/benchmarks/measure.sh rollout-gpu [MINUTES]
#   docs/benchmarks/measure.sh eval-cpu [MINUTES]      # evaluation on videos
#   docs/benchmarks/measure.sh eval-gpu [MINUTES]
#   docs/benchmarks/measure.sh paper           # what a GPU would be asked to do, counted; no GPU needed
#   docs/benchmarks/measure.sh model           # no machine needed
#
# A run that was stopped goes on where it was when it is started again on the same day. Install prefix-grouper first, or
# its two contestants are listed as left out.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="docs/benchmarks/$(date +%Y-%m-%d)"

step() { # NAME, then options of `vlm-pg bench step`
  measure step "$@" --checkpointing
}

rollout() { # NAME, then options of `vlm-pg bench rollout`
  measure rollout "$@"
}

evaluation() { # NAME, then options of `vlm-pg bench eval`
  measure eval "$@"
}

measure() { # step, rollout or eval, NAME, options
  local measurement=$1 name=$2
  shift 2
  local resume=()
  if [[ -e "$out-$name.json" ]]; then resume=(--resume); fi
  local figure=(--figure "$out-$name.svg")
  if [[ "$measurement" == eval ]]; then figure=(); fi
  vlm-pg bench "$measurement" "$@" --out "$out-$name.json" "${figure[@]}" "${resume[@]}"
}

case "${1:-}" in
  cpu)
    step cpu-small --device cpu --model small --budget-minutes "${2:-60}"
    step cpu-mid --device cpu --model mid --budget-minutes "${2:-60}"
    step cpu-mid-ragged --device cpu --model mid --ragged --points 2048,8,256 4096,8,512 --budget-minutes "${2:-60}"
    ;;
  gpu)
    step gpu-3b --device cuda --model 3b --dtype bf16 --budget-minutes "${2:-10}"
    step gpu-7b --device cuda --model 7b --dtype bf16 --budget-minutes "${2:-10}"
    ;;
  rollout-cpu)
    rollout cpu-small-rollout --device cpu --model small --budget-minutes "${2:-60}"
    rollout cpu-mid-rollout --device cpu --model mid --budget-minutes "${2:-60}"
    rollout cpu-mid-rollout-count --device cpu --model mid --prefix 4096 --generations 1 2 4 8 16 32 --new-tokens 64 \
      --groups 1 --budget-minutes "${2:-60}"
    ;;
  rollout-gpu)
    rollout gpu-3b-rollout --device cuda --model 3b --dtype bf16 --budget-minutes "${2:-10}"
    rollout gpu-7b-rollout --device cuda --model 7b --dtype bf16 --budget-minutes "${2:-10}"
    ;;
  eval-cpu) evaluation cpu-mid-eval --device cpu --model mid --budget-minutes "${2:-60}" ;;
  eval-gpu)
    evaluation gpu-3b-eval --device cuda --model 3b --dtype bf16 --budget-minutes "${2:-10}"
    evaluation gpu-7b-eval --device cuda --model 7b --dtype bf16 --budget-minutes "${2:-10}"
    ;;
  paper)
    for model in Qwen2.5-VL-7B Qwen3-VL-8B Qwen3.5-9B; do
      vlm-pg bench paper --checkpointing --models "$model" --out "$out-paper-$model.json" \
        --markdown "$out-paper-$model.md" --figure "$out-paper-$model.svg"
    done
    ;;
  model) vlm-pg bench model --out docs/benchmarks/model.md ;;
  *)
    sed -n '2,14s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
