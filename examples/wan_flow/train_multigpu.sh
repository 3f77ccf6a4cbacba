#!/bin/bash
# Trains on several GPUs. Usage: ./train_multigpu.sh [GPUs|all] [flags of train_flow_matching.py]
#
#   ./train_multigpu.sh --batch_size 2                        all GPUs, or the CPU if there are none
#   ./train_multigpu.sh 2 --batch_size 2 --num_epochs 50      two GPUs, or two CPU processes
#   CUDA_VISIBLE_DEVICES=1,3 ./train_multigpu.sh              GPUs 1 and 3
set -euo pipefail

wanted=all
if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
    wanted="$1"
    shift
fi
if ! [[ "$wanted" =~ ^(all|[1-9][0-9]*)$ ]]; then
    echo "train_multigpu.sh: expected a number of GPUs, all, or flags, got '$wanted'" >&2
    exit 2
fi

present="$(python -c 'from unisono.devices import visible_gpus; print(len(visible_gpus()))')"
if [ "$present" -gt 0 ]; then
    devices=(--gpus "$wanted")
elif [ "$wanted" = all ]; then
    devices=() # one CPU process unless --nproc is set
else
    devices=(--nproc "$wanted")
fi
exec python "$(dirname "$0")/train_flow_matching.py" "${devices[@]}" "$@"
