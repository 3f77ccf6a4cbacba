"""`unisono federate RECIPE --clients 4`: clients that keep their data train one model in rounds."""

from __future__ import annotations

import sys
from dataclasses import fields

from unisono.cli.arguments import TrainingParser
from unisono.engine.start.registry import BUILT_IN, importable_name, load_recipe
from unisono.engine.start.settings_source import SettingsSource
from unisono.errors import EXIT_DONE, ConfigError
from unisono.typed_paths import as_typed, note_start_folder

_DESCRIPTION = """Train one model on several clients that keep their data, with Flower.

In each round, every client trains --local_steps steps on its own data, and the server combines the clients' weights.
Each client is one run of `unisono train`, on one or several ranks (--nproc, --gpus), and continues in each round; only
its weights are replaced by the global ones. A federation of one client trains like `unisono train`.

--split divides the recipe's data between the clients. Alternatively, each client reads its own files: {client} in the
value of a setting is replaced by the client's number, as in --data_path data/hospital_{client}.csv --split none.

Every setting of `unisono train` is also a flag here, for all clients.

Exit codes: 0 done, 2 user error, 3 the federation failed."""

_CHOICES = {
    "algorithm": ("fedavg", "fedprox"),
    "engine": ("local", "simulation", "processes"),
    "privacy": ("none", "server", "client", "local"),
}


def _parser() -> TrainingParser:
    from unisono.config.fields import fields_of
    from unisono.federated.plan import FederationOptions

    parser = TrainingParser("federate", "RECIPE [--clients 4] [--rounds 3] [settings]", _DESCRIPTION)
    docs = {field.name: field.doc for field in fields_of(FederationOptions)}
    for option in fields(FederationOptions):
        text = docs[option.name].rstrip(".")
        text = text[0].lower() + text[1:]
        if option.name == "secure_aggregation":
            parser.add_argument(f"--{option.name}", action="store_true", default=None, help=text)
            continue
        shown = "" if option.default == "" else f" (default: {option.default})"
        parser.add_argument(
            f"--{option.name}",
            type=type(option.default),
            default=None,
            choices=_CHOICES.get(option.name),
            metavar=None if option.name in _CHOICES else {int: "N", float: "X", str: "TEXT"}[type(option.default)],
            help=text + shown,
        )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command."""
    note_start_folder()
    parser = _parser()
    recipe, files, flags, options = parser.parse_training(argv)
    if options.help:
        parser.print_help()
        return EXIT_DONE
    from unisono.federated.federate import run_federation
    from unisono.federated.plan import FederationOptions

    values = {f.name: getattr(options, f.name) for f in fields(FederationOptions)}
    chosen = FederationOptions(**{name: value for name, value in values.items() if value is not None})
    reference = recipe if recipe in BUILT_IN else importable_name(load_recipe(recipe))
    if reference is None:
        raise ConfigError(f"{recipe} cannot be loaded by other processes; move it to a file of its own")
    source = SettingsSource(tuple(files), tuple(flags))

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = run_federation(reference, chosen, source, say)
    for name, value in result.metrics.items():
        print(f"{name} {value:.4f}")
    print(f"global weights: {as_typed(result.model)}")
    return EXIT_DONE
