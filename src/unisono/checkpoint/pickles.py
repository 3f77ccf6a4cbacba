"""Recognises pickle files with weights (.pt, .pth, .bin, .ckpt). unisono does not open them, but helps to convert."""

from __future__ import annotations

import shlex
from pathlib import Path

_SUFFIXES = {".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle"}


def is_pickle(path: Path) -> bool:
    """Whether a path is named like a pickle file and is not a folder."""
    return path.suffix.lower() in _SUFFIXES and not path.is_dir()


def how_to_convert(file: Path) -> str:
    """Returns why a pickle is not opened, and a command that converts it to safetensors."""
    program = (
        "import sys, torch, safetensors.torch as s; "
        "d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
        "d = d.get('state_dict', d.get('model', d)); "
        "s.save_file({k: v.clone().contiguous() for k, v in d.items() if hasattr(v, 'clone')}, sys.argv[2])"
    )
    new = file.with_suffix(".safetensors")
    return (
        f"{file} is a pickle, which unisono does not open because it can run code; convert it with: "
        f'python -c "{program}" {shlex.quote(str(file))} {shlex.quote(str(new))}'
    )
