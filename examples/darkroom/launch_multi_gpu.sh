#!/bin/bash
# Trains on several GPUs and logs the output. Usage: ./launch_multi_gpu.sh [GPUs|all] [config file] [flags]
#
#   ./launch_multi_gpu.sh 2
#   ./launch_multi_gpu.sh all config/model/ad_dr.yaml
#   ./launch_multi_gpu.sh 4 config/model/ad_dr.yaml --mixed_precision fp16
set -euo pipefail
cd "$(dirname "$0")"

num_gpus="${1:-2}"
config="${2:-config/model/ad_dr_compressed.yaml}"
shift "$(($# < 2 ? $# : 2))"

if [ "$num_gpus" = all ]; then
    num_gpus="$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')"
fi
if ! [[ "$num_gpus" =~ ^[1-9][0-9]*$ ]]; then
    echo "launch_multi_gpu.sh: expected a number of GPUs or all, got '$num_gpus'" >&2
    exit 2
fi
several=()
if [ "$num_gpus" -gt 1 ]; then
    several=(--multi_gpu --main_process_port 0) # 0: any free port, so that two runs do not collide
fi

logs="logs/multi_gpu_$(date +%Y%m%d_%H%M%S)"
mkdir -p "$logs"
echo "Training on $num_gpus GPUs with $config; log: $logs/training.log"
accelerate launch --num_processes "$num_gpus" "${several[@]}" train.py --config "$config" "$@" 2>&1 |
    tee "$logs/training.log"
