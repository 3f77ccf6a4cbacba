"""Weights in pickles (.pt, .pth, .bin, .ckpt): never opened, because that can run code; but how to convert them."""

from __future__ import annotations

import shlex
from pathlib import Path

_SUFFIXES = {".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle"}


def is_pickle(path: Path) -> bool:
    """Whether the path has the name of a pickled file; a folder may be called anything."""
    return path.suffix.lower() in _SUFFIXES and not path.is_dir()


def how_to_convert(file: Path) -> str:
    """Why a pickle is not opened, and a command that makes a safetensors file of its tensors."""
    program = (
        "import sys, torch, safetensors.torch as s; "
        "d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
        "d = d.get('state_dict', d.get('model', d)); "
        "s.save_file({k: v.clone().contiguous() for k, v in d.items() if hasattr(v, 'clone')}, sys.argv[2])"
    )
    new = file.with_suffix(".safetensors")
    return (
        f"{file} is a pickle, which can run code when it is opened and is not loaded; convert it: "
        f'python -c "{program}" {shlex.quote(str(file))} {shlex.quote(str(new))}'
    )
