#!/bin/bash
# Trains on GPUs 0 to 3, or on those in CUDA_VISIBLE_DEVICES. Usage: ./train_multi_gpu.sh [flags of train.py]
set -euo pipefail
cd "$(dirname "$0")"

export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0,1,2,3}"
IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
exec accelerate launch --num_processes "$((${#gpus[@]} > 0 ? ${#gpus[@]} : 1))" train.py "$@"
