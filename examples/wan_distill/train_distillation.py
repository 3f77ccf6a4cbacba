"""Distils a Wan model into a smaller model, given only prompts. Run it from this folder, in any of these ways:

python train_distillation.py --teacher_path tiny --student_config config/tiny_student.json --data_path shapes
python train_distillation.py --teacher_path "Wan-AI/Wan2.1-T2V-1.3B-Diffusers" \
    --student_config "config/student_config.json" --data_path "data/static_prompts.txt" \
    --output_dir "./outputs/wan_t2i" --batch_size 4                 one GPU, or the CPU; --gpus all uses every GPU
    ... --multi_gpu                                                 all GPUs from one process (DataParallel)
torchrun --nproc_per_node=4 train_distillation.py ... --distributed one process per GPU (faster)
sbatch train_distillation.slurm ...

It runs `unisono train wan-distill` and accepts the flags of the original script; it prints a note if the meaning
of a flag differs. --help lists all settings. Afterwards, run python run_inference.py --model_path ./outputs/wan_t2i ...
"""

from __future__ import annotations

import sys
from typing import NoReturn

from script_flags import completed, help_text, resolve

from unisono.cli import main as unisono
from unisono.cluster.lifetime import end_process
from unisono.cluster.own_loop import cleanup_distributed, is_main_process, setup_distributed
from unisono.errors import EXIT_DONE, UnisonoError

__all__ = ["cleanup_distributed", "is_main_process", "setup_distributed"]

_TRAINS_NOTHING = {"-h", "--help", "--print_config", "--print-config"}


def print_note(line: str) -> None:
    """Prints a note."""
    print(f"train_distillation.py: {line}", file=sys.stderr)


def main() -> NoReturn:
    """Trains with the options on the command line, and exits with the exit code of the run."""
    argv = sys.argv[1:]
    output = None
    if {"-h", "--help"} & set(argv):
        print(help_text())
    else:
        try:
            argv, remarks = completed(argv)
            output = resolve(argv).values["output_dir"]
            for remark in remarks if is_main_process() else []:
                print_note(remark)
        except UnisonoError as error:
            print_note(str(error))
            sys.exit(error.exit_code)
    code = unisono.main(["train", "wan-distill", *argv])
    if code == EXIT_DONE and is_main_process() and not _TRAINS_NOTHING & set(argv):
        print_note(
            f'to generate images: python run_inference.py --model_path {output} --prompt "..." --output picture.png'
        )
    end_process(code)


if __name__ == "__main__":
    main()
