"""Starts the processes of a run from a plain script. Each process imports the functions that build model and data."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cluster.environment import detect
from unisono.config.resolve import Resolved
from unisono.devices import visible_gpus
from unisono.engine.start.device_plan import plan_devices
from unisono.engine.start.run import configure, launch_job, with_absolute_paths
from unisono.errors import EXIT_STOPPED, ConfigError
from unisono.multi_gpu.config import STRATEGIES, MultiGPUConfig
from unisono.multi_gpu.gpus import cleanup_distributed_training, setup_distributed_training
from unisono.references import load_object
from unisono.typed_paths import note_start_folder

if TYPE_CHECKING:
    from unisono.engine.start.rank_start import RankStart

_PARTS = ("model_fn", "dataset_fn", "loss_fn", "optimizer", "scheduler")
_importing = False  # True while a process of the run imports the script, which must then not start another run


def launch_multi_gpu_training(
    model_fn: Callable[[], Any],
    dataset_fn: Callable[[], Any],
    config: MultiGPUConfig | None = None,
    *,
    epochs: int = 10,
    loss_fn: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    save_path: str | Path | None = "checkpoints",
    **fields: Any,
) -> dict[str, Any]:
    """Trains with one process per GPU of the config, and returns the result of `train(epochs)`.

    model_fn() returns the model. dataset_fn() returns a dataset, or (training dataset, validation dataset). optimizer
    is a function of the parameters, and scheduler a function of the optimizer. All functions must be defined at the top
    level of a file, because each process imports them. loss_fn may also be a loss module of torch.nn. If a process
    dies, all processes restart from the last checkpoint.
    """
    config = _with_fields(config, fields)
    work = _Work(model_fn, dataset_fn, config, epochs, loss_fn, optimizer, scheduler, save_path)
    if _importing:
        raise ConfigError(
            "importing the script starts a run; call launch_multi_gpu_training under if __name__ == '__main__':"
        )
    if detect().launcher != "plain":
        return work.run()
    strategy = STRATEGIES[config.strategy]
    request = {"strategy": strategy, **_devices(config)}
    settings = configure(_recipe(), overrides={**config.engine_settings(), **request, **_endpoint(config)})
    note_start_folder()
    settings = with_absolute_paths(settings)
    description = work.to_json(settings.values["output_dir"])
    plan = plan_devices(settings)
    if plan.ranks == 1 or isinstance(description, str):
        if isinstance(description, str):
            print(f"unisono: note: training on one device, because {description}", file=sys.stderr)
        if plan.lock is not None:
            plan.lock.release()
        return work.run()

    def job(settings: Resolved) -> Mapping[str, Any]:
        return {"call": f"{__name__}:run_work", "arguments": work.to_json(settings.values["output_dir"])}

    outcome = launch_job(job, settings, plan, "OwnModel")
    if outcome is None:
        raise SystemExit(EXIT_STOPPED)
    return dict(outcome)


def launch_distributed_training(
    rank: int,
    world_size: int,
    model_fn: Callable[[], Any],
    dataset_fn: Callable[[], Any],
    config: MultiGPUConfig | None = None,
    *,
    epochs: int = 10,
    loss_fn: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    save_path: str | Path | None = "checkpoints",
    **fields: Any,
) -> dict[str, Any]:
    """Trains as rank `rank` of `world_size`.

    In a plain script, a call with rank 0 starts all ranks. In a process of torch.multiprocessing.spawn, under torchrun,
    or with a rank above 0, this process becomes that rank. See launch_multi_gpu_training for the other arguments.
    """
    config = _with_fields(config, {**fields, "world_size": world_size})
    parts = {"loss_fn": loss_fn, "optimizer": optimizer, "scheduler": scheduler, "save_path": save_path}
    is_plain = detect().launcher == "plain" and config.rank is None
    if is_plain and rank == 0 and world_size > 1 and multiprocessing.parent_process() is None:
        return launch_multi_gpu_training(model_fn, dataset_fn, config, epochs=epochs, **parts)
    work = _Work(model_fn, dataset_fn, config, epochs, **parts)
    backend = {"backend": config.backend, "local_rank": config.local_rank}
    setup_distributed_training(rank, world_size, config.master_addr, config.master_port, **backend)
    try:
        return work.run()
    finally:
        if is_plain:
            cleanup_distributed_training()


@dataclass
class _Work:
    """The functions that build a training run, and the arguments of one process."""

    model_fn: Any
    dataset_fn: Any
    config: MultiGPUConfig
    epochs: int
    loss_fn: Any
    optimizer: Any
    scheduler: Any
    save_path: str | Path | None

    def __post_init__(self) -> None:
        for name in ("model_fn", "dataset_fn"):
            function = getattr(self, name)
            if not callable(function) or hasattr(function, "state_dict"):
                kind = type(function).__name__
                what = "model" if name == "model_fn" else "dataset"
                raise ConfigError(f"{name}: expected a function without arguments that returns the {what}, got {kind}")
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise ConfigError(f"epochs: expected a whole number of at least 1, got {self.epochs!r}")

    def run(self) -> dict[str, Any]:
        """Trains in this process, together with the other processes of the run."""
        from unisono.data.seeding import seed_everything
        from unisono.multi_gpu.manager import MultiGPUTrainingManager

        seed_everything(self.config.seed)  # so that every process, and a repeated run, has the same initial weights
        model = self.model_fn()
        data = self.dataset_fn()
        if isinstance(data, Mapping):
            data = (data["train"], data.get("val"))
        train, val = data if isinstance(data, tuple) else (data, None)
        parts = {name: getattr(self, name) for name in ("loss_fn", "optimizer", "scheduler")}
        with MultiGPUTrainingManager(self.config).create_trainer(model, train, val, **parts) as trainer:
            return trainer.train(self.epochs, self.save_path)

    def to_json(self, output_dir: str | None) -> dict[str, Any] | str:
        """Describes the work for other processes, or returns the reason why they cannot import a part of it."""
        parts: dict[str, Any] = {}
        for name in _PARTS:
            part = getattr(self, name)
            parts[name] = _describe(part)
            if parts[name] is None and part is not None:
                module = getattr(part, "__module__", type(part).__module__)
                return (
                    f"{name} ({getattr(part, '__qualname__', type(part).__name__)} of {module}) cannot be imported by "
                    "other processes; define it as a function at the top level of a file"
                )
        save_path = None if self.save_path is None else str(Path(self.save_path).absolute())
        config = {**self.config.to_dict(), "output_dir": output_dir, "world_size": None}
        return {"parts": parts, "config": config, "epochs": self.epochs, "save_path": save_path}

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> _Work:
        """Restores an object from the result of `to_json`."""
        global _importing
        _importing = True
        try:
            parts = {name: _load(part) for name, part in description["parts"].items()}
        finally:
            _importing = False
        config = MultiGPUConfig.from_dict(description["config"])
        return cls(**parts, config=config, epochs=description["epochs"], save_path=description["save_path"])


def run_work(description: Mapping[str, Any], start: RankStart) -> dict[str, Any]:
    """Trains in a process that unisono's launcher has started."""
    from unisono.multi_gpu import trainers

    trainers.job_start = start
    return _Work.from_json(description).run()


def _describe(part: Any) -> Any:
    """Describes a function by its location, or a torch.nn loss by its arguments, as JSON; None for anything else."""
    if part is None or isinstance(part, str):
        return part
    if (name := getattr(part, "__qualname__", None)) is None:
        return _describe_loss(part)
    module = sys.modules.get(part.__module__)
    file = getattr(module, "__file__", None)
    if file is None or "<" in name or "." in name:  # a notebook, a local function, a method
        return None
    is_importable = getattr(module, "__package__", "") and part.__module__ != "__main__"
    return {"object": f"{part.__module__ if is_importable else Path(file).resolve()}:{name}"}


def _describe_loss(loss: Any) -> Any:
    """Describes a loss of torch.nn by its class and constructor arguments; None for anything else."""
    from torch.nn.modules import loss as losses

    kind = type(loss)
    if kind.__module__ != losses.__name__ or any(True for _ in loss.buffers()):  # class weights are tensors
        return None
    arguments = {name: getattr(loss, name) for name in kind.__constants__}
    if not all(value is None or isinstance(value, str | int | float) for value in arguments.values()):
        return None
    return {"loss": kind.__name__, "arguments": arguments}


def _load(part: Any) -> Any:
    """Restores an object from the result of `_describe`."""
    if part is None or isinstance(part, str):
        return part
    if "object" in part:
        return load_object(part["object"])
    losses = importlib.import_module("torch.nn.modules.loss")
    return getattr(losses, part["loss"])(**part["arguments"])


def _with_fields(config: MultiGPUConfig | None, fields: Mapping[str, Any]) -> MultiGPUConfig:
    config = config or MultiGPUConfig()
    return MultiGPUConfig.from_dict({**config.to_dict(), **fields}) if fields else config


def _devices(config: MultiGPUConfig) -> dict[str, Any]:
    """Returns the number and kind of processes, as engine settings."""
    if config.num_gpus == 0 or not visible_gpus():
        return {"nproc": config.world_size or config.num_gpus or 1}
    if config.gpu_ids:
        return {"gpus": ",".join(map(str, config.gpu_ids)) + ","}
    number = config.num_gpus or config.world_size
    return {"gpus": "auto" if number is None else str(number)}


def _endpoint(config: MultiGPUConfig) -> dict[str, Any]:
    """Returns the rendezvous endpoint, if the config sets one; by default the launcher chooses a free port."""
    if str(config.master_port) == MultiGPUConfig.master_port:
        return {}
    return {"rdzv_endpoint": f"{config.master_addr}:{config.master_port}"}


def _recipe() -> Any:
    from unisono.multi_gpu.own_model import OwnModel

    return OwnModel
