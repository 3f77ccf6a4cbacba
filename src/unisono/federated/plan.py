"""The options of a federation, and the file federation.json from which server and clients read them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from unisono.atomic_files import write_atomically
from unisono.config.resolve import Resolved
from unisono.config.values import shown
from unisono.engine.checks import check_run
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.settings_source import SettingsSource, without_output_dir
from unisono.errors import ConfigError, UserError
from unisono.federated.client_recipe import ClientShare
from unisono.federated.split import check_split
from unisono.plain_files import read_json
from unisono.settings import Settings

FEDERATION = "federation.json"
ENVIRONMENT = "UNISONO_FEDERATION"
"""Environment variable: the path of federation.json, for engines that cannot pass it to their clients."""


@dataclass(frozen=True)
class FederationOptions:
    """The options of a federation besides the recipe and its settings."""

    clients: int = 4
    """Number of clients."""
    rounds: int = 3
    """Number of rounds. In each round, clients train and the server combines their weights."""
    local_steps: int = 20
    """Number of optimizer steps of a client in a round."""
    split: str = "iid"
    """How to divide the data: iid, by:FIELD, or none (when {client} in a setting selects each client's files)."""
    algorithm: Literal["fedavg", "fedprox"] = "fedavg"
    """fedavg: mean of the clients' weights, weighted by sample count; fedprox: fedavg with a proximal loss term."""
    proximal_mu: float = 0.1
    """fedprox: weight of the squared distance from the global weights in the loss."""
    engine: Literal["local", "simulation", "processes"] = "local"
    """local: this process; simulation: Flower's simulation on Ray; processes: SuperLink and SuperNodes on 127.0.0.1."""
    parallel: int = 1
    """Number of clients that train at the same time (local and simulation)."""
    min_clients: int = 1
    """Number of clients that must be connected at the start of a round."""
    round_timeout: float = 3600.0
    """Seconds that the server waits for the clients of a round; later replies are ignored."""
    privacy: Literal["none", "server", "client", "local"] = "none"
    """Differential privacy. server: clips and adds noise; client: clients clip; local: clients clip and add noise."""
    clipping_norm: float = 1.0
    """privacy: largest norm of a client's update."""
    noise_multiplier: float = 0.1
    """privacy server and client: noise of the server relative to clipping_norm."""
    epsilon: float = 10.0
    """privacy local: privacy budget of one update."""
    delta: float = 1e-5
    """privacy local: probability that the guarantee fails."""
    secure_aggregation: bool = False
    """The server learns only the sum of the clients' weights (SecAgg+)."""
    port: int = 0
    """processes: first of the three ports of the SuperLink. 0: free ports."""
    drop: str = ""
    """Clients that drop out, for tests: comma-separated CLIENT:ROUND pairs."""

    def check(self) -> None:
        """Raises ConfigError if a value is invalid."""
        for name, least in (("clients", 1), ("rounds", 1), ("local_steps", 1), ("parallel", 1), ("min_clients", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected a whole number of at least {least}, got {getattr(self, name)}")
        for name in ("proximal_mu", "noise_multiplier"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("clipping_norm", "epsilon", "delta", "round_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        if self.min_clients > self.clients:
            raise ConfigError(f"min_clients {self.min_clients} exceeds the {self.clients} clients")
        check_split(self.split)
        if not re.fullmatch(r"(\d+:\d+(,\d+:\d+)*)?", self.drop):
            raise ConfigError(f"drop: expected CLIENT:ROUND, for instance 1:2, got {shown(self.drop)}")
        if self.secure_aggregation and self.privacy in ("server", "client"):
            raise ConfigError(
                f"secure_aggregation hides the updates that privacy {self.privacy} reads; use privacy local"
            )
        if self.secure_aggregation and self.clients < 3:
            raise ConfigError(f"secure_aggregation needs at least 3 clients, got {self.clients}")

    def drops(self, client: int, round_: int) -> bool:
        """Returns whether a client drops out of a round."""
        return f"{client}:{round_}" in self.drop.split(",")


@dataclass(frozen=True)
class Federation:
    """The folder, recipe, settings and options of a federation."""

    folder: Path
    recipe: str
    """Reference to the recipe that other processes can load."""
    source: SettingsSource
    options: FederationOptions

    def settings_of(self, client: int) -> tuple[type[Recipe], Resolved]:
        """Returns the recipe and the settings of a client's run."""
        recipe_class, options = load_recipe(self.recipe), self.options
        flags = [flag.replace("{client}", str(client)) for flag in without_output_dir(self.source.flags)]
        source = SettingsSource(self.source.files, tuple(flags), {})
        more = {
            "max_steps": str(options.rounds * options.local_steps),
            "num_epochs": "none",
            "output_dir": str(self.client_folder(client)),
        }
        resolved = source.resolve(recipe_class, more)
        if not resolved.explicit("keep_last"):
            resolved = resolved.with_values("federate", keep_last=1)
        return recipe_class, resolved

    def client_folder(self, client: int) -> Path:
        """Returns the run folder of a client."""
        return self.folder / "clients" / str(client)

    def share_of(self, client: int, resolved: Resolved, weights: str | None) -> ClientShare:
        """Returns the share of the data that a client trains on."""
        options = self.options
        mu = options.proximal_mu if options.algorithm == "fedprox" else 0.0
        return ClientShare(client, options.clients, options.split, resolved.values["seed"], mu, weights)

    def check(self) -> None:
        """Checks options and settings as far as possible before anything is written."""
        options = self.options
        options.check()
        for client in range(options.clients if any("{client}" in flag for flag in self.source.flags) else 1):
            recipe_class, resolved = self.settings_of(client)
            check_run(recipe_class, resolved)
            _check_settings(resolved.build(Settings), options)

    def write(self) -> Path:
        """Writes federation.json; raises UserError if the folder contains another federation."""
        file = self.folder / FEDERATION
        record = {
            "recipe": self.recipe,
            "files": [str(path.resolve()) for path in self.source.files],
            "flags": list(self.source.flags),
            "options": asdict(self.options),
        }
        if file.exists():
            raise UserError(f"{self.folder} already contains a federation; choose another --output_dir")
        write_atomically(file, json.dumps(record, indent=2) + "\n", durable=True)
        return file

    @classmethod
    def read(cls, file: Path) -> Federation:
        """Reads federation.json."""
        record = read_json(file)
        known = {field.name for field in fields(FederationOptions)}
        options = FederationOptions(**{name: value for name, value in record["options"].items() if name in known})
        source = SettingsSource(tuple(Path(path) for path in record["files"]), tuple(record["flags"]), {})
        return cls(file.parent, record["recipe"], source, options)


def _check_settings(settings: Settings, options: FederationOptions) -> None:
    if settings.ema.ema_decay > 0:
        raise ConfigError("ema_decay: moving averages of clients cannot be combined; use 0")
    if settings.launch.nnodes != 1:
        raise ConfigError("nnodes: each client runs on one machine; remove nnodes")
    if settings.run.resume != "auto":
        raise ConfigError("resume: a client resumes its own run; remove --resume")
    sharded = settings.parallel.strategy in ("fsdp", "hsdp")
    if options.algorithm == "fedprox" and sharded:
        raise ConfigError("fedprox needs the whole weights on each rank; use --strategy ddp, or --algorithm fedavg")
