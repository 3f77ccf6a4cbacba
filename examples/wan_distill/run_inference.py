"""Draws with a student that was distilled here, by diffusers' own pipeline.

python run_inference.py --model_path ./outputs/wan_t2i --prompt "a red apple on a plate" --output picture.png

--model_path is a run's folder (its newest weights are exported into it first, once), or a folder that `unisono export`
or diffusers has written. The student has learned its teacher's guidance, so it draws with a guidance scale of 1.
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
from unisono.recipes.wan_distill.settings import HOW_TO_DRAW

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
SIDE, STEPS = 512, 30  # where nobody says more


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Draw with a distilled student.")
    add = parser.add_argument
    add("--model_path", type=Path, required=True, help="a run's folder, or a pipeline's")
    add("--prompt", required=True)
    add("--output", type=Path, default=Path("picture.png"), help="a new .png, .jpg or .webp; .mp4 for a film")
    add("--height", type=int, help="in pixels; default: as in training")
    add("--width", type=int)
    add("--num_frames", type=int, help="4k + 1; default: as in training, or 1")
    add("--num_inference_steps", type=int, help=f"default: as in training, or {STEPS}")
    add("--seed", type=int, default=0)
    add("--fps", type=float, default=16.0, help="of a film")
    add("--device", help="default: the GPU, if there is one")
    return parser.parse_args(words)


def pipeline_folder(path: Path) -> Path:
    """Where the pipeline is, exported first if that is needed."""
    if (path / "model_index.json").is_file():
        return path
    if not (path / "run.json").is_file():
        raise UserError(f"--model_path {path}: neither a run's folder (run.json) nor a pipeline's (model_index.json)")
    from unisono.checkpoint.find import list_steps
    from unisono.engine.export import export_run

    steps = list_steps(path / "checkpoints")
    if not steps:
        raise UserError(f"--model_path {path}: this run has no checkpoint yet")
    step, checkpoint = max(steps)
    folder = path / "exported" / checkpoint.name
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        with redirect_stderr(io.StringIO()):  # it would say how to draw from a folder that gets another name
            export_run(path, unfinished, step=str(step))
        unfinished.rename(folder)
    return folder


def how_to_draw(folder: Path) -> dict[str, int]:
    """The size of what the student has learned to draw, and in how many steps."""
    sizes = {"height": SIDE, "width": SIDE, "num_frames": 1, "num_inference_steps": STEPS}
    with suppress(OSError, ValueError, AttributeError):  # a pipeline that was not made here
        told = json.loads((folder / HOW_TO_DRAW).read_text(encoding="utf-8"))
        sizes |= {name: told[name] for name in sizes if type(told.get(name)) is int}
    return sizes


def draw(folder: Path, prompt: str, sizes: dict[str, int], seed: int, device: str | None) -> Any:
    """[frames, height, width, 3] in 0 to 1."""
    import torch
    from diffusers import AutoencoderKLWan, WanPipeline

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
    pipeline = WanPipeline.from_pretrained(folder, vae=vae, torch_dtype=dtype).to(device)
    found = pipeline(
        prompt,
        **sizes,
        guidance_scale=1.0,
        max_sequence_length=min(512, pipeline.tokenizer.model_max_length),
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="pt",
    )
    return found.frames[0].float().permute(0, 2, 3, 1).cpu()


def write(frames: Any, file: Path, fps: float) -> None:
    """One frame as a picture, several as a film."""
    import torch

    pixels = (frames.clamp(0, 1) * 255).round().to(torch.uint8)
    if len(pixels) > 1:
        from unisono.recipes.wan.data.show import write_film

        write_film(pixels, file, fps)
    else:
        from PIL import Image

        Image.fromarray(pixels[0].numpy()).save(file)


def main() -> int:
    """Draws as the command line says."""
    told = arguments()
    try:
        if told.output.exists():
            raise UserError(f"--output {told.output} is there already, and nothing is overwritten; choose another name")
        folder = pipeline_folder(told.model_path)
        sizes = how_to_draw(folder)
        sizes |= {name: getattr(told, name) for name in sizes if getattr(told, name) is not None}
        kinds = (".mp4",) if sizes["num_frames"] > 1 else PICTURES
        if told.output.suffix.lower() not in kinds:
            raise UserError(f"--output {told.output}: {sizes['num_frames']} frames are written as {', '.join(kinds)}")
        told.output.parent.mkdir(parents=True, exist_ok=True)
        write(draw(folder, told.prompt, sizes, told.seed, told.device), told.output, told.fps)
    except UnisonoError as error:
        print(f"run_inference.py: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{told.output}: {sizes['width']} × {sizes['height']}, {sizes['num_inference_steps']} steps, by {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
