"""Stores compiled code, so that a later start with the same model and shapes loads it instead of compiling again.

torch caches compiled code by itself, but in a folder for temporary files, and its cache keys do not include the allowed
attention kernels. Kernels are chosen during compilation, so a run that allows others would silently use the kernels of
the first run. Therefore each set of conditions has its own folder in the user's cache folder, in which
`conditions.json` lists them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_FILE = "conditions.json"

_current: str | None = None  # the conditions under which this process compiles


def use_compile_cache() -> Path:
    """Makes torch store compiled code in the folder for the current conditions; returns the folder.

    If the conditions have changed since the last call, code that this process has compiled before is not used again.
    """
    global _current
    conditions = json.dumps(compile_conditions(), indent=1)
    folder = _root() / hashlib.sha256(conditions.encode()).hexdigest()[:16]
    if _current not in (None, conditions):
        from torch._inductor.utils import clear_caches

        torch._dynamo.reset()
        clear_caches()
    _current = conditions
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # torch executes what it finds there
        if not (folder / _FILE).exists():
            (folder / _FILE).write_text(conditions)
    except OSError:  # the home folder is read-only, and torch's own folder must not be shared
        folder = _default_folder() / folder.name
    os.environ[_VARIABLE] = str(folder)  # torch reads it whenever it stores or looks up code
    return folder


def compile_conditions() -> dict[str, Any]:
    """Returns everything that compiled code depends on besides the code itself, the shapes and torch's own keys."""
    import torch._inductor.config as inductor

    kernels = torch.backends.cuda
    conditions: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "attention": {
            "flash": kernels.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
            "efficient": kernels.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
            "math": kernels.math_sdp_enabled(),  # type: ignore[no-untyped-call]
            "cudnn": kernels.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
            "order": [int(kernel) for kernel in torch._C._get_sdp_priority_order()],
        },
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32 products": torch.get_float32_matmul_precision(),
        # See `disable_wrong_optimizations`: code that was compiled with this optimisation must not be used.
        "mix_order_reduction": getattr(inductor.triton, "mix_order_reduction", None),
    }
    if torch.cuda.is_available():
        conditions["gpu"] = torch.cuda.get_device_name()
        conditions["capability"] = torch.cuda.get_device_capability()
    return conditions


def count_compilations() -> dict[str, int]:
    """Returns the number of graphs that this process has compiled, and the number that it has loaded from the cache."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return {
        "compiled": found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"],
        "cached": found["fxgraph_cache_hit"],
    }


def _root() -> Path:
    """Returns the folder that the user has set for torch, or one in the user's cache folder."""
    set_by_user = os.environ.get(_VARIABLE)
    if set_by_user:
        folder = Path(set_by_user)
        if (folder / _FILE).is_file():  # set by us, in this process or its parent
            return folder.parent
        if folder != _default_folder():  # torch sets the variable to its own default itself
            return folder
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "unisono" / "compile" if os.path.isabs(home) else _default_folder()


def _default_folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(default_cache_dir())


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
