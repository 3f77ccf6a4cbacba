#!/bin/bash
# Distils a student and generates an image with it. Usage: ./run_distillation.sh [GPUs|all] [flags of train_distillation.py]
#
#   ./run_distillation.sh                                        the tiny teacher, no download
#   TEACHER_PATH=Wan-AI/Wan2.1-T2V-1.3B-Diffusers ./run_distillation.sh all --batch_size 4
#
# Other environment variables: STUDENT_CONFIG, DATA_PATH, OUTPUT_DIR, PROMPT.
set -euo pipefail
cd "$(dirname "$0")"

teacher="${TEACHER_PATH:-tiny}"
if [ "$teacher" = tiny ]; then
    student="${STUDENT_CONFIG:-config/tiny_student.json}" data="${DATA_PATH:-shapes}" prompt="${PROMPT:-a red circle}"
else
    student="${STUDENT_CONFIG:-config/student_config.json}" data="${DATA_PATH:-data/static_prompts.txt}"
    prompt="${PROMPT:-a red apple on a white plate}"
fi
output="${OUTPUT_DIR:-outputs/wan_t2i}"

devices=()
if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
    if ! [[ "$1" =~ ^(all|[1-9][0-9]*)$ ]]; then
        echo "run_distillation.sh: expected a number of GPUs, all, or flags, got '$1'" >&2
        exit 2
    fi
    present="$(python -c 'from unisono.devices import visible_gpus; print(len(visible_gpus()))')"
    if [ "$present" -gt 0 ]; then
        devices=(--gpus "$1")
    elif [ "$1" != all ]; then
        devices=(--nproc "$1") # CPU processes
    fi
    shift
fi

python train_distillation.py --teacher_path "$teacher" --student_config "$student" --data_path "$data" \
    --output_dir "$output" "${devices[@]}" "$@"

picture="$output/picture-$(date +%Y%m%d-%H%M%S).png"
python run_inference.py --model_path "$output" --prompt "$prompt" --output "$picture"
