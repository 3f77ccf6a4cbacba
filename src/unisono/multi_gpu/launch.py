"""Starts the processes of a run from a plain script: functions that make the model and the data go to each of them."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cluster.environment import detect
from unisono.config.resolve import Resolved
from unisono.devices import visible_gpus
from unisono.engine.start.device_plan import plan_devices
from unisono.engine.start.registry import load_object
from unisono.engine.start.run import configure, launch_job, with_absolute_paths
from unisono.errors import EXIT_STOPPED, ConfigError
from unisono.multi_gpu.config import STRATEGIES, MultiGPUConfig
from unisono.multi_gpu.gpus import cleanup_distributed_training, setup_distributed_training
from unisono.typed_paths import note_start_folder

if TYPE_CHECKING:
    from unisono.engine.start.rank_start import RankStart

_loading = False  # a process of the run reads the script, whose last lines must not start another run


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
    """Trains on all GPUs that the config asks for, a process each, and returns what `train(epochs)` returns.

    model_fn() makes the model, dataset_fn() the data set or (training, validation). These, loss_fn, optimizer (a
    function of the parameters) and scheduler (of the optimizer) must be functions of a file, because each process
    imports them from there; a loss of torch.nn may be an object. A process that dies is started again with all others.
    """
    config = _with_fields(config, fields)
    work = _Work(model_fn, dataset_fn, config, epochs, loss_fn, optimizer, scheduler, save_path)
    if _loading:
        raise ConfigError(
            "the script starts a run whenever it is imported; put the call under: if __name__ == '__main__'"
        )
    if detect().launcher != "plain":
        return work.here()
    strategy = STRATEGIES[config.strategy]
    request = {"strategy": strategy, **_devices(config)}
    settings = configure(_recipe(), overrides={**config.engine_settings(), **request, **_endpoint(config)})
    note_start_folder()
    settings = with_absolute_paths(settings)
    words = work.to_json(settings.values["output_dir"])
    plan = plan_devices(settings)
    if plan.ranks == 1 or isinstance(words, str):
        if isinstance(words, str):
            print(f"unisono: note: {words}: training on one device", file=sys.stderr)
        if plan.lock is not None:
            plan.lock.release()
        return work.here()

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

    In a process of torch.multiprocessing.spawn, under torchrun, or with a rank above 0, this process is that rank.
    Called once, with rank 0, in a plain script, it starts all of them.
    """
    config = _with_fields(config, {**fields, "world_size": world_size})
    more = {"loss_fn": loss_fn, "optimizer": optimizer, "scheduler": scheduler, "save_path": save_path}
    plain = detect().launcher == "plain" and config.rank is None
    if plain and rank == 0 and world_size > 1 and multiprocessing.parent_process() is None:
        return launch_multi_gpu_training(model_fn, dataset_fn, config, epochs=epochs, **more)
    work = _Work(model_fn, dataset_fn, config, epochs, loss_fn, optimizer, scheduler, save_path)
    ours = {"backend": config.backend, "local_rank": config.local_rank}
    setup_distributed_training(rank, world_size, config.master_addr, config.master_port, **ours)
    try:
        return work.here()
    finally:
        if plain:
            cleanup_distributed_training()


class _Work:
    """What each process of such a run does."""

    def __init__(
        self,
        model_fn: Any,
        dataset_fn: Any,
        config: MultiGPUConfig,
        epochs: int,
        loss_fn: Any,
        optimizer: Any,
        scheduler: Any,
        save_path: str | Path | None,
    ) -> None:
        for name, function in (("model_fn", model_fn), ("dataset_fn", dataset_fn)):
            if not callable(function) or hasattr(function, "state_dict"):
                kind = type(function).__name__
                raise ConfigError(f"{name}: expected a function without arguments, which makes it, got {kind}")
        if not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(f"epochs: expected a whole number of at least 1, got {epochs!r}")
        self.config, self.epochs, self.save_path = config, epochs, save_path
        self.parts = {
            "model_fn": model_fn,
            "dataset_fn": dataset_fn,
            "loss_fn": loss_fn,
            "optimizer": optimizer,
            "scheduler": scheduler,
        }

    def here(self) -> dict[str, Any]:
        """Trains in this process, together with the others there are."""
        from unisono.data.seeding import seed_everything
        from unisono.multi_gpu.manager import MultiGPUTrainingManager

        seed_everything(self.config.seed)  # the same model in every process, and in the next run
        model = self.parts["model_fn"]()
        data = self.parts["dataset_fn"]()
        if isinstance(data, Mapping):
            data = (data["train"], data.get("val"))
        train, val = data if isinstance(data, tuple) else (data, None)
        loss = {name: self.parts[name] for name in ("loss_fn", "optimizer", "scheduler")}
        trainer = MultiGPUTrainingManager(self.config).create_trainer(model, train, val, **loss)
        with trainer:
            return trainer.train(self.epochs, self.save_path)

    def to_json(self, output_dir: str | None) -> dict[str, Any] | str:
        """For other processes; or, in words, why they cannot do it."""
        described: dict[str, Any] = {}
        for name, part in self.parts.items():
            described[name] = words = _described(part)
            if words is None and part is not None:
                where = getattr(part, "__module__", type(part).__module__)
                return (
                    f"{name} ({getattr(part, '__qualname__', type(part).__name__)} of {where}) cannot be imported by "
                    "other processes; make it a function of a file"
                )
        save_path = None if self.save_path is None else str(Path(self.save_path).absolute())
        config = {**self.config.to_dict(), "output_dir": output_dir, "world_size": None}
        return {"parts": described, "config": config, "epochs": self.epochs, "save_path": save_path}

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> _Work:
        """What to_json has described."""
        global _loading
        _loading = True
        try:
            parts = {name: _loaded(part) for name, part in described["parts"].items()}
        finally:
            _loading = False
        config = MultiGPUConfig.from_dict(described["config"])
        return cls(**parts, config=config, epochs=described["epochs"], save_path=described["save_path"])


def run_work(described: Mapping[str, Any], start: RankStart) -> dict[str, Any]:
    """One process of a run, as our launcher starts it."""
    from unisono.multi_gpu import trainers

    trainers.job_start = start
    return _Work.from_json(described).here()


def _described(part: Any) -> Any:
    """Words from which another process can load a function, or make a loss of torch.nn; None where there are none."""
    if part is None or isinstance(part, str):
        return part
    if (name := getattr(part, "__qualname__", None)) is None:
        return _described_loss(part)
    module = sys.modules.get(part.__module__)
    file = getattr(module, "__file__", None)
    if file is None or "<" in name or "." in name:  # a notebook, a local function, a method
        return None
    own_name = getattr(module, "__package__", "") and part.__module__ != "__main__"
    return {"words": f"{part.__module__ if own_name else Path(file).resolve()}:{name}"}


def _described_loss(loss: Any) -> Any:
    """A loss of torch.nn by its class and the numbers it was made with."""
    from torch.nn.modules import loss as losses

    kind = type(loss)
    if kind.__module__ != losses.__name__ or any(True for _ in loss.buffers()):  # class weights are no numbers
        return None
    made_with = {name: getattr(loss, name) for name in kind.__constants__}
    if not all(value is None or isinstance(value, str | int | float) for value in made_with.values()):
        return None
    return {"loss": kind.__name__, "made_with": made_with}


def _loaded(part: Any) -> Any:
    if part is None or isinstance(part, str):
        return part
    if "words" in part:
        return load_object(part["words"])
    losses = importlib.import_module("torch.nn.modules.loss")
    return getattr(losses, part["loss"])(**part["made_with"])


def _with_fields(config: MultiGPUConfig | None, fields: Mapping[str, Any]) -> MultiGPUConfig:
    config = config or MultiGPUConfig()
    return MultiGPUConfig.from_dict({**config.to_dict(), **fields}) if fields else config


def _devices(config: MultiGPUConfig) -> dict[str, Any]:
    """How many processes on what, in the engine's words."""
    if config.num_gpus == 0 or not visible_gpus():
        return {"nproc": config.world_size or config.num_gpus or 1}
    if config.gpu_ids:
        return {"gpus": ",".join(map(str, config.gpu_ids)) + ","}
    number = config.num_gpus or config.world_size
    return {"gpus": "auto" if number is None else str(number)}


def _endpoint(config: MultiGPUConfig) -> dict[str, Any]:
    """Where the processes meet, if that was said; by default a free port."""
    default = MultiGPUConfig()
    if str(config.master_port) == default.master_port:
        return {}
    return {"rdzv_endpoint": f"{config.master_addr}:{config.master_port}"}


def _recipe() -> Any:
    from unisono.multi_gpu.own_model import OwnModel

    return OwnModel
