"""Generates images or videos with a distilled student, using diffusers' own pipeline.

python run_inference.py --model_path ./outputs/wan_t2i --prompt "a red apple on a plate" --output picture.png

--model_path is a run folder (the first call exports its newest weights into it), or a folder that `unisono export` or
diffusers wrote. The student has learned its teacher's guidance, so it samples with a guidance scale of 1.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

from unisono.errors import UnisonoError, UserError
from unisono.formatting import format_count
from unisono.recipes.wan_distill.settings import HOW_TO_DRAW

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
SIDE, STEPS, TEXT = 512, 30, 512  # defaults for pipelines without how_to_draw.json


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Generate images or videos with a distilled student.")
    add = parser.add_argument
    add("--model_path", type=Path, required=True, help="run folder or pipeline folder")
    add("--prompt", required=True)
    add("--output", type=Path, default=Path("picture.png"), help="file to write: .png, .jpg or .webp; .mp4 for a video")
    add("--height", type=int, help="in pixels; default: as in training")
    add("--width", type=int)
    add("--num_frames", type=int, help="4k + 1; default: as in training, or 1")
    add("--num_inference_steps", type=int, help=f"default: as in training, or {STEPS}")
    add("--seed", type=int, default=0)
    add("--fps", type=float, default=16.0, help="frames per second of a video")
    add("--device", help="default: the GPU, if there is one")
    return parser.parse_args(argv)


def pipeline_folder(path: Path) -> Path:
    """Returns the pipeline folder, exporting it first if necessary."""
    if (path / "model_index.json").is_file():
        return path
    if not (path / "run.json").is_file():
        raise UserError(
            f"--model_path {path}: neither a run folder (run.json) nor a pipeline folder (model_index.json)"
        )
    from unisono.checkpoint.find import list_steps
    from unisono.engine.export import export_run

    steps = list_steps(path / "checkpoints")
    if not steps:
        raise UserError(f"--model_path {path}: this run has no checkpoint yet")
    step, checkpoint = max(steps)
    folder = path / "exported" / checkpoint.name
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        with redirect_stderr(io.StringIO()):  # suppresses a hint that would name a temporary folder
            export_run(path, unfinished, step=str(step))
        unfinished.rename(folder)
    return folder


def sample_arguments(folder: Path) -> dict[str, int]:
    """Returns the arguments for the student's pipeline: sample size, number of steps and text length."""
    call = {"height": SIDE, "width": SIDE, "num_frames": 1, "num_inference_steps": STEPS, "max_sequence_length": TEXT}
    with suppress(OSError, ValueError, AttributeError):  # the file is missing if unisono did not export the pipeline
        stored = json.loads((folder / HOW_TO_DRAW).read_text(encoding="utf-8"))
        call |= {name: stored[name] for name in call if type(stored.get(name)) is int}
    return call


def generate(folder: Path, prompt: str, call: dict[str, int], seed: int, device: str | None) -> Any:
    """Generates frames [frames, height, width, 3] with values from 0 to 1."""
    import torch
    from diffusers import AutoencoderKLWan, WanPipeline

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
    pipeline = WanPipeline.from_pretrained(folder, vae=vae, torch_dtype=dtype).to(device)
    text_length = min(call["max_sequence_length"], pipeline.tokenizer.model_max_length)
    result = pipeline(
        prompt,
        **{**call, "max_sequence_length": text_length},
        guidance_scale=1.0,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="pt",
    )
    return result.frames[0].float().permute(0, 2, 3, 1).cpu()


def write(frames: Any, file: Path, fps: float) -> None:
    """Writes one frame as an image, and several frames as a video."""
    import torch

    pixels = (frames.clamp(0, 1) * 255).round().to(torch.uint8)
    if len(pixels) > 1:
        from unisono.recipes.wan.data.render import write_video

        write_video(pixels, file, fps)
    else:
        from PIL import Image

        Image.fromarray(pixels[0].numpy()).save(file)


def main() -> int:
    """Generates one sample with the options on the command line."""
    options = parse_arguments()
    try:
        if options.output.exists():
            raise UserError(f"--output {options.output} already exists; choose another name")
        folder = pipeline_folder(options.model_path)
        call = sample_arguments(folder)
        call |= {name: value for name, value in vars(options).items() if name in call and value is not None}
        kinds = (".mp4",) if call["num_frames"] > 1 else IMAGES
        if options.output.suffix.lower() not in kinds:
            frames = format_count(call["num_frames"], "frame")
            raise UserError(f"--output {options.output}: for {frames} the name must end in {' or '.join(kinds)}")
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write(generate(folder, options.prompt, call, options.seed, options.device), options.output, options.fps)
    except UnisonoError as error:
        print(f"run_inference.py: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{options.output}: {call['width']} × {call['height']}, {call['num_inference_steps']} steps, with {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
