"""A process of benchmarks/wan_peer.py: runs one of the two programs and measures it from inside.

    python benchmarks/wan_peer_process.py SPECIFICATION.json

Both programs get the same hook after each optimizer step, which records a CUDA event and does not synchronise. After
the last step it writes the result and ends the process, before anything is saved. Intervals are counted from the last
step backwards, so a step that only initialises the optimizer's state is not timed.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from wan_peer_files import write_musubi_data, write_weights
from wan_peer_variants import MUSUBI, SHAPE, TINY_SHAPE, Model

GIB = 2**30
STUBS = ["av.py", "cv2.py"]
STUBS += [f"torchvision/{name}.py" for name in ("__init__", "transforms/__init__", "transforms/functional")]
STUB = '''"""Replaces a large package that musubi-tuner imports and needs only for images and videos."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise RuntimeError(f"{__name__}.{name} was used, but this benchmark reads no images or videos")
'''


class Clock:
    """Times steps and ends the process after the last one."""

    def __init__(self, specification: dict[str, Any]) -> None:
        self.timed, self.last = specification["timed"], specification["warm_up"] + specification["timed"] + 1
        self.file = Path(specification["result"])
        self.on_gpu = torch.cuda.is_available()
        self.times: list[float] = []
        self.events: list[torch.cuda.Event] = []
        self.losses: list[float] = []
        self.result: dict[str, Any] = {}
        self.peak_at_start = 0.0

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """After each optimizer step."""
        self.times.append(time.perf_counter())
        if self.on_gpu:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()
        if len(self.times) == 1:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            self.result["trained"] = sum(weight.numel() for weight in weights)
            self.result["optimizer"] = type(optimizer).__name__
        if self.on_gpu and len(self.times) == self.last - self.timed:  # kernels have been compiled and chosen
            self.peak_at_start = torch.cuda.max_memory_allocated() / GIB
            torch.cuda.reset_peak_memory_stats()
        if len(self.times) == self.last:
            self.end("")

    def end(self, failed: str) -> NoReturn:
        """Writes the result and ends the process at once."""
        self.result |= {"failed": failed, "losses": self.losses, "host_gib": _peak_resident_gib()}
        points = self.times
        if self.on_gpu:
            if not failed:
                torch.cuda.synchronize()
                points = [self.events[0].elapsed_time(event) / 1000 for event in self.events]
            self.result["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            self.result["peak_with_start_gib"] = max(self.result["peak_gib"], self.peak_at_start)
            self.result["pinned_gib"] = _peak_pinned_gib()
        if not failed:
            last = points[-self.timed - 1 :]
            self.result["step_ms"] = [1000 * (after - before) for before, after in pairwise(last)]
        self.file.write_text(json.dumps(self.result))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if failed else 0)


def _peak_resident_gib() -> float:
    """Peak RSS of this process; getrusage would also count its parent's before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def _peak_pinned_gib() -> float | None:
    """Peak of the page-locked memory that torch allocated, which need not be part of the RSS."""
    statistics = getattr(torch.cuda, "host_memory_stats", dict)()
    peak = statistics.get("allocated_bytes.peak")
    return None if peak is None else peak / GIB


def make_importable(musubi: Path, stubs: Path) -> None:
    """Adds musubi-tuner to sys.path, followed by stubs of packages that are not installed."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers remembers the answer: it must not take the stub for the package
    for name in STUBS:
        (stubs / name).parent.mkdir(parents=True, exist_ok=True)
        (stubs / name).write_text(STUB)
    sys.path.insert(0, str(musubi / "src"))
    sys.path.append(str(stubs))
    if not torch.cuda.is_available():
        _imitate_gpu()


def _imitate_gpu() -> None:
    """Lets musubi-tuner run on the CPU, as a rehearsal: it asks for the current GPU and for CUDA's autocast rules."""
    torch.cuda.current_device = lambda: 0
    initialise, layer_norm = torch.amp.autocast.__init__, torch.nn.functional.layer_norm

    def enabled_also_for_float32(self: Any, *args: Any, **settings: Any) -> None:
        initialise(self, *args, **settings)
        self._enabled = self._enabled or (self.fast_dtype == torch.float32 and settings.get("enabled", True))

    def of_any_dtype(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        return layer_norm(x, shape, *(None if each is None else each.to(x.dtype) for each in (weight, bias)), eps)

    torch.amp.autocast.__init__ = enabled_also_for_float32  # type: ignore[method-assign]
    torch.nn.functional.layer_norm = of_any_dtype


def run_musubi(specification: dict[str, Any], clock: Clock) -> str:
    """Does what `python wan_train_network.py …` does, and notes the losses that it reads in any case."""
    from musubi_tuner.utils import train_utils
    from musubi_tuner.wan.configs import WAN_CONFIGS

    add = train_utils.LossRecorder.add

    def noted(self: Any, *args: Any, **values: Any) -> Any:
        clock.losses.append(float(values["loss"]))
        return add(self, *args, **values)

    train_utils.LossRecorder.add = noted
    if specification["tiny"]:
        model = Model(**specification["tiny"])
        sizes = {"dim": model.dim, "ffn_dim": model.ffn_dim, "num_heads": model.num_heads}
        WAN_CONFIGS[model.task].update(sizes | {"num_layers": model.num_layers})
    register_optimizer_step_post_hook(clock)
    script = Path(specification["musubi"]) / "src" / "musubi_tuner" / "wan_train_network.py"
    sys.argv = [str(script), *specification["words"]]
    runpy.run_path(str(script), run_name="__main__")
    return "ended before its last step"


def run_unisono(specification: dict[str, Any], clock: Clock) -> str:
    """Does what `unisono train wan-flow …` does."""
    from unisono.cli.main import main
    from unisono.engine.step.optimizer_wrapper import OptimizerWrapper

    step = OptimizerWrapper.step

    def timed(self: OptimizerWrapper, *arguments: Any) -> None:
        step(self, *arguments)
        clock(self.optimizer)

    # torch's optimizer steps several times per training step if weights are on the host, and before step 1.
    OptimizerWrapper.step = timed  # type: ignore[method-assign]
    sys.argv = ["unisono", *specification["words"]]
    return f"ended with exit code {main()}"


def prepare(specification: dict[str, Any]) -> None:
    """Writes the weights, and the data that musubi-tuner reads."""
    for file, model in specification["models"].items():
        write_weights(Path(file), Model(**model))
    if specification["musubi"]:
        write_musubi_data(Path(specification["data"]), TINY_SHAPE if specification["tiny"] else SHAPE)


def main() -> None:
    """Carries out the specification."""
    specification = json.loads(Path(sys.argv[1]).read_text())
    if specification["musubi"]:
        make_importable(Path(specification["musubi"]), Path(specification["stubs"]))
    if specification["program"] == "prepare":
        prepare(specification)
        return
    clock = Clock(specification)
    if specification["cap_gib"] and clock.on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, specification["cap_gib"] * GIB / total), 0)
    try:
        failed = (run_musubi if specification["program"] == MUSUBI else run_unisono)(specification, clock)
    except BaseException as error:  # also SystemExit, which the programs' command lines raise
        traceback.print_exc()
        failed = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    clock.end(failed)


if __name__ == "__main__":
    main()
