"""Config: one value for every field, whatever its source, and a one-line error if it is invalid."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.config import Resolved, as_yaml, fields_of, help_text, resolve
from unisono.errors import ConfigError, RecipeError, UserError
from unisono.settings import Settings


class Color(Enum):
    RED = "r"
    GREEN = 2


@dataclass(frozen=True)
class Optics:
    """Optics of the camera."""

    focal_length: float = 35.0
    """Millimetres."""


class MyRecipe:
    @dataclass
    class Config:
        width: int = 3
        """Width of the picture,
        in pixels."""
        ratio: float = 1  # type: ignore[assignment]
        name: str = "x"
        data: Path = Path("data")
        wide: bool = False
        narrow: bool | None = None
        color: Color = Color.RED
        betas: tuple[float, float] = (0.9, 0.99)
        sizes: tuple[int, ...] = ()
        tags: list[str] = field(default_factory=list)
        label: str | None = None
        cache: Path | None = None
        amount: int | Literal["auto"] = "auto"
        revision: int | str = "main"
        steps: list[int] | None = None
        offset: int = field(default=0, metadata={"help": "From the metadata."})
        extra: dict[str, Any] = field(default_factory=dict)
        weights: dict[str, float] = field(default_factory=dict)
        optics: Optics = field(default_factory=lambda: Optics(focal_length=50.0))


BOTH = [Settings, MyRecipe.Config]


def flags(*words: str) -> dict[str, Any]:
    return resolve(BOTH, flags=words).values


def from_file(folder: Path, text: str, name: str = "config.yaml") -> dict[str, Any]:
    (folder / name).write_text(text)
    return resolve(BOTH, file=folder / name).values


def error_of(kind: type[UserError] = ConfigError, classes: list[type] = BOTH, **arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        resolve(classes, **arguments)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


# --- sources of values


def test_flags_win_over_the_file_over_the_recipe_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("batch_size: 3\nseed: 3\nnum-workers: 3\n")
    resolved = resolve(
        BOTH, recipe_defaults={"batch_size": 2, "seed": 2, "keep_last": 2}, file=file, flags=["--batch-size", "4"]
    )
    names = ("batch_size", "seed", "num_workers", "keep_last", "log_every")
    assert [resolved.values[name] for name in names] == [4, 3, 3, 2, 10]
    assert [resolved.sources[name] for name in names] == ["flag", "file", "file", "recipe", "default"]
    assert [resolved.explicit(name) for name in names] == [True, True, True, False, False]


def test_overrides_count_as_flags_and_take_python_values() -> None:
    resolved = resolve(BOTH, flags=["--seed", "1"], overrides={"output_dir": Path("runs"), "gpus": 2, "seed": 5})
    assert (resolved.values["output_dir"], resolved.values["gpus"], resolved.values["seed"]) == ("runs", "2", 5)
    assert resolved.sources["output_dir"] == "flag"


def test_build_makes_the_nested_dataclasses() -> None:
    resolved = resolve(BOTH, flags=["--batch_size", "4", "--focal_length", "20", "--tags", "a", "b"])
    built, config = resolved.build(Settings), resolved.build(MyRecipe.Config)
    assert built == dataclasses.replace(Settings(), batch=dataclasses.replace(Settings().batch, batch_size=4))
    assert (config.optics, config.tags) == (Optics(20.0), ["a", "b"])
    config.tags.append("c")
    assert resolved.values["tags"] == ["a", "b"], "a built config must not share lists with the configuration"


def test_defaults_of_a_group_instance_are_kept() -> None:
    assert resolve(BOTH).build(MyRecipe.Config).optics.focal_length == 50.0


def test_with_values_changes_a_copy() -> None:
    first = resolve(BOTH)
    second = first.with_values("launcher", mixed_precision="bf16")
    assert (first.values["mixed_precision"], second.values["mixed_precision"]) == ("no", "bf16")
    assert (second.sources["mixed_precision"], second.explicit("mixed_precision")) == ("launcher", False)
    with pytest.raises(ConfigError, match="expected one of no, fp16, bf16, fp8"):
        first.with_values("launcher", mixed_precision="fp4")


# --- parsing of text


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--batch-size=4", "batch_size", 4),
        ("--batch_size 1_000", "batch_size", 1000),
        ("--batch_size 1e3", "batch_size", 1000),
        ("--offset -3", "offset", -3),
        ("--offset=-3", "offset", -3),
        ("--offset 1e23", "offset", 10**23),
        ("--learning_rate 1", "learning_rate", 1.0),
        ("--learning_rate 1e-4", "learning_rate", 1e-4),
        ("--grad_clip inf", "grad_clip", math.inf),
        ("--deterministic", "deterministic", True),
        ("--deterministic --seed 1", "deterministic", True),
        ("--deterministic false", "deterministic", False),
        ("--no_pin_memory", "pin_memory", False),
        ("--no-pin-memory", "pin_memory", False),
        ("--narrow", "narrow", True),
        ("--no_narrow", "narrow", False),
        ("--narrow none", "narrow", None),
        ("--max_steps 5 --max_steps none", "max_steps", None),
        ("--max_steps null", "max_steps", None),
        ("--mixed_precision no", "mixed_precision", "no"),
        ("--lr_scaling none", "lr_scaling", "none"),
        ("--data a/b", "data", Path("a/b")),
        ("--color GREEN", "color", Color.GREEN),
        ("--color 2", "color", Color.GREEN),
        ("--color r", "color", Color.RED),
        ("--betas 0.5 0.6", "betas", (0.5, 0.6)),
        ("--betas 0.5,0.6", "betas", (0.5, 0.6)),
        ("--betas=-0.5,0.6", "betas", (-0.5, 0.6)),
        ("--sizes 1 -2 3 --seed 1", "sizes", (1, -2, 3)),
        ("--sizes=", "sizes", ()),
        ("--tags a,b", "tags", ["a", "b"]),
        ("--tags a,b c", "tags", ["a,b", "c"]),
        ("--steps 1,2", "steps", [1, 2]),
        ("--steps none", "steps", None),
        ("--amount 7", "amount", 7),
        ("--amount auto", "amount", "auto"),
        ("--revision 12", "revision", 12),
        ("--revision abc", "revision", "abc"),
        ("--gpus 0,2", "gpus", "0,2"),
        ("--seed 1 --seed 2", "seed", 2),
    ],
)
def test_a_flag_is_read_by_the_type_of_its_field(words: str, name: str, value: object) -> None:
    got = flags(*words.split())[name]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("learning_rate: 1e-4", "learning_rate", 1e-4),
        ("learning_rate: '1e-4'", "learning_rate", 1e-4),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("grad_clip: .inf", "grad_clip", math.inf),
        ("mixed_precision: no", "mixed_precision", "no"),
        ("deterministic: on", "deterministic", True),
        ("batch-size: 1e3", "batch_size", 1000),
        ("name: 1.10", "name", "1.10"),
        ("name: 2020-01-01", "name", "2020-01-01"),
        ("name: 12:30:45", "name", "12:30:45"),
        ("name: no", "name", "no"),
        ("seed: 010", "seed", 10),
        ("max_steps:", "max_steps", None),
        ("max_steps: none", "max_steps", None),
        ("label: none", "label", None),
        ("label: 'none'", "label", "none"),
        ("revision: '12'", "revision", "12"),
        ("betas: [1, 1e-1]", "betas", (1.0, 0.1)),
        ("gpus: 2", "gpus", "2"),
        ("# nothing", "seed", 0),
        (
            "extra: {a: 1, b: 1e-4, c: no, d: [true, null, '5'], e: {f: x}}",
            "extra",
            {"a": 1, "b": 1e-4, "c": "no", "d": [True, None, "5"], "e": {"f": "x"}},
        ),
        ("weights: {a: 1, b: 1e-4}", "weights", {"a": 1.0, "b": 1e-4}),
        ("extra: &base {a: 1}\nweights: {<<: *base, b: 2}", "weights", {"a": 1.0, "b": 2.0}),
    ],
)
def test_a_yaml_word_is_read_by_the_type_of_its_field(tmp_path: Path, text: str, name: str, value: object) -> None:
    got = from_file(tmp_path, text)[name]
    assert got == value and type(got) is type(value)


def test_json_files_are_read_like_yaml_files(tmp_path: Path) -> None:
    text = '{"batch-size": 4, "betas": [1, 0.5], "output_dir": null, "deterministic": true, "extra": {"a": [1, 2.5]}}'
    values = from_file(tmp_path, text, "config.json")
    names = ("batch_size", "betas", "output_dir", "deterministic", "extra")
    assert [values[name] for name in names] == [4, (1.0, 0.5), None, True, {"a": [1, 2.5]}]


def test_false_is_read_as_no_where_no_is_a_choice() -> None:
    assert resolve(BOTH, overrides={"mixed_precision": False}).values["mixed_precision"] == "no"


# --- errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bach_size 3", "unknown flag --bach_size; did you mean --batch_size?"),
        ("--bach-size=3", "unknown flag --bach-size; did you mean --batch_size?"),
        ("--xyzzy", "unknown flag --xyzzy; --help lists all flags"),
        ("--no_determinstic", "unknown flag --no_determinstic; did you mean --no_deterministic?"),
        ("--no_seed", "unknown flag --no_seed; did you mean --seed?"),
        ("--no_wide=true", "--no_wide takes no value; write --wide or --no_wide"),
        ("-batch_size 3", "unexpected argument '-batch_size'; did you mean --batch_size?"),
        ("--seed 1 2", "unexpected argument '2'"),
        ("--batch_size", "--batch_size needs a value: a whole number"),
        ("--batch_size --seed 1", "--batch_size needs a value: a whole number"),
        ("--batch_size four", "batch_size: expected a whole number, got 'four' (from --batch_size)"),
        ("--batch_size 1.5", "batch_size: expected a whole number, got '1.5' (from --batch_size)"),
        ("--batch_size 1e999", "batch_size: expected a whole number, got '1e999' (from --batch_size)"),
        ("--batch_size true", "batch_size: expected a whole number, got 'true' (from --batch_size)"),
        ("--batch_size none", "batch_size: expected a whole number, got 'none' (from --batch_size)"),
        ("--max_steps x", "max_steps: expected a whole number or none, got 'x' (from --max_steps)"),
        ("--learning_rate 1e999", "learning_rate: expected a number, got '1e999' (from --learning_rate)"),
        ("--wide maybe", "wide: expected true or false, got 'maybe' (from --wide)"),
        (
            "--mixed_precision bf61",
            "mixed_precision: expected one of no, fp16, bf16, fp8, got 'bf61' (from --mixed_precision); did you mean "
            "bf16?",
        ),
        ("--color GREN", "color: expected one of RED, GREEN, got 'GREN' (from --color); did you mean GREEN?"),
        ("--betas 1 2 3", "betas: expected 2 values (a number, a number), got ['1', '2', '3'] (from --betas)"),
        ("--sizes 1,x", "sizes: expected a whole number, got 'x' (from --sizes)"),
        ("--extra a", "--extra: its value is a mapping, which can only be set in a config file"),
        ("--extra=a", "--extra: its value is a mapping, which can only be set in a config file"),
    ],
)
def test_an_invalid_flag_is_one_line_with_the_fix(words: str, message: str) -> None:
    assert error_of(flags=words.split()) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bach_size: 3", "unknown field bach_size in {file}; did you mean batch_size?"),
        ("optim: {seed: 1}", "unknown field optim in {file}; fields are not nested, write them at the top level"),
        ("batch_size: true", "batch_size: expected a whole number, got 'true' (from {file})"),
        ("batch_size:", "batch_size: expected a whole number, got None (from {file})"),
        ("betas: {a: 1}", "betas: expected 2 values (a number, a number), got {{'a': '1'}} (from {file})"),
        ("seed: 1\nseed: 2", "config file {file}, line 2: the key 'seed' occurs twice"),
        ("extra:\n  a: 1\n  a: 2", "config file {file}, line 3: the key 'a' occurs twice"),
        ("num-epochs: 1\nnum_epochs: 2", "num_epochs is set twice in {file}, with a hyphen and with an underscore"),
        ("seed: 1\nsizes: [1,\nname: x", "config file {file}, line 3: "),
        ("seed: 1\nname: 'a\0b'", "config file {file}, line 2: the character '\\x00' is not allowed in YAML"),
        ("- 1", "config file {file} must contain a mapping of fields to values, such as `batch_size: 4`"),
        ("seed: !!python/object/apply:os.system [echo]", "config file {file}, line 1: could not determine"),
        ("extra: &a {b: *a}", "config file {file}, line 1: a value contains itself"),
        ("extra: {a: .nan}", "extra: expected finite numbers, text, true, false, none, or lists and mappings"),
    ],
)
def test_an_invalid_yaml_file_is_one_line_with_the_location(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert error_of(file=file).startswith(message.format(file=file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"seed": true}', "seed: expected a whole number, got True (from {file})"),
        ('{"seed": 1,\n}', "config file {file}, line 2: "),
        ('{"seed": 1, "seed": 2}', "config file {file}, the key 'seed' occurs twice"),
        ("[1]", "config file {file} must contain a mapping"),
        ("[" * 100_000, "config file {file} is nested too deeply"),
    ],
)
def test_an_invalid_json_file_is_one_line_with_the_location(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert error_of(file=file).startswith(message.format(file=file))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert (
        error_of(file=tmp_path / "no.yaml")
        == f"config file {tmp_path}/no.yaml cannot be read: No such file or directory"
    )
    assert "must end in .yaml" in error_of(file=tmp_path / "config.toml")
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read" in error_of(file=tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe4\n")
    assert error_of(file=tmp_path / "latin.yaml").endswith("is not UTF-8 text")


def test_errors_in_overrides_and_recipe_defaults_name_their_source() -> None:
    assert (
        error_of(overrides={"bach_size": 1})
        == "unknown field bach_size in the settings passed in Python; did you mean batch_size?"
    )
    assert (
        error_of(overrides={"seed": True})
        == "seed: expected a whole number, got True (from the settings passed in Python)"
    )
    message = error_of(RecipeError, recipe_defaults={"bach_size": 1})
    assert message == "unknown field bach_size in the recipe's defaults; did you mean batch_size?"


@dataclass
class Clash:
    batch_size: int = 1


@dataclass
class Odd:
    x: set[int] = field(default_factory=set)


@dataclass
class Sloppy:
    x: int = None  # type: ignore[assignment]


@dataclass
class Lost:
    x: Nowhere = 1  # type: ignore[name-defined]  # noqa: F821


class Bare:
    x: int = 1


class Undecorated(MyRecipe.Config):
    more: int = 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Clash, "batch_size is a field of both BatchSettings and Clash; rename it in Clash"),
        (Odd, "Odd.x: a setting cannot have the type set[int]; use int, float"),
        (Sloppy, "Sloppy.x: the default does not fit the type: expected a whole number, got None"),
        (Lost, "Lost: the type of a field is not defined (name 'Nowhere' is not defined); define or import it"),
        (Bare, "Bare is not a dataclass; write @dataclass above it"),
        (Undecorated, "Undecorated is not a dataclass; write @dataclass above it"),
    ],
)
def test_a_wrong_recipe_config_is_the_recipes_error(config: type, message: str) -> None:
    assert error_of(RecipeError, classes=[Settings, config]).startswith(message)


@dataclass
class Checked:
    folder: Path
    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ValueError("rate must be\nat most 1")


def test_a_field_without_a_default_is_required() -> None:
    assert error_of(classes=[Checked]) == "folder is required: a path; set it with --folder or in a config file"
    assert resolve([Checked], flags=["--folder", "a"]).build(Checked) == Checked(Path("a"))
    assert "--folder path  (required)" in help_text([Checked], {})


def test_a_check_of_the_recipe_becomes_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^Checked: rate must be at most 1$"):
        resolve([Checked], flags=["--folder", "a", "--rate", "2"]).build(Checked)


# --- documentation


@dataclass(frozen=True)
class Child(Optics):
    aperture: float = 2.0
    """f-number."""


def test_the_documentation_of_a_field_is_the_text_below_it_even_if_inherited() -> None:
    assert {f.name: f.doc for f in fields_of(Child)} == {"focal_length": "Millimetres.", "aperture": "f-number."}
    docs = {f.name: (f.doc, f.group) for f in fields_of(MyRecipe.Config)}
    assert docs["width"] == ("Width of the picture,\nin pixels.", "MyRecipe")
    assert docs["offset"] == ("From the metadata.", "MyRecipe")
    assert docs["focal_length"] == ("Millimetres.", "Optics of the camera")


def test_classes_without_source_still_work() -> None:
    name = "typed_in_a_notebook"
    config = dataclasses.make_dataclass("Config", [("x", int, field(default=1, metadata={"help": "Typed."}))])
    config.__module__ = name
    assert [(f.name, f.doc, f.group) for f in fields_of(config)] == [("x", "Typed.", "Config")]


def test_every_setting_is_documented() -> None:
    assert [f.name for f in fields_of(Settings) if not f.doc] == []


def test_help_shows_every_field_grouped_with_type_default_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    text = help_text(BOTH, {"batch_size": 512})
    assert max(map(len, text.splitlines())) <= 70
    for line in (
        "Batch:",
        "  --batch_size int  (default: 512, set by the recipe)",
        "  --mixed_precision no|fp16|bf16|fp8  (default: no)",
        "  --[no_]deterministic  (default: false)",
        "  --seed int  (default: 0)",
        "  --nnodes int|text  (default: 1)",
        "  --max_steps int|none  (default: none)",
        "  --betas float float  (default: 0.9,0.99)",
        "  --tags text ...  (default: empty)",
        "MyRecipe:",
        "      Width of the picture, in pixels.",
    ):
        assert line in text.splitlines()
    assert text.index("Batch:") < text.index("MyRecipe:")
    shown = text.replace("[no_]", "")
    assert [f.name for cls in BOTH for f in fields_of(cls) if f"--{f.name} " not in shown] == []


def test_help_of_a_switch_that_is_named_no_shows_no_double_negation() -> None:
    config = dataclasses.make_dataclass("Config", [("no_cache", bool, field(default=False))])
    assert "  --no_cache [true|false]  (default: false)" in help_text((config,), {}).splitlines()
    for words, value in {"--no_cache": True, "--no_cache true": True, "--no_cache false": False}.items():
        assert resolve((config,), flags=words.split()).values["no_cache"] is value


def test_config_and_settings_load_neither_torch_nor_yaml() -> None:
    code = "import sys, unisono.config, unisono.settings; print({'torch', 'yaml', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- round trips

CONFIG = [MyRecipe.Config]

_text = st.text(max_size=8) | st.sampled_from(
    ["none", "null", "~", "no", "1e-4", "1_0", "5", "", "a: b", "#", "1,2", "true", "\x85", "\n", "\u2028"]
)
_path = _text.map(Path)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_text, inner, max_size=2),
    max_leaves=4,
)
_values = st.fixed_dictionaries(
    {},
    optional={
        "width": st.integers(),
        "ratio": st.floats(allow_nan=False),
        "name": _text,
        "data": _path,
        "wide": st.booleans(),
        "narrow": st.none() | st.booleans(),
        "color": st.sampled_from(Color),
        "betas": st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
        "sizes": st.lists(st.integers(), max_size=3).map(tuple),
        "tags": st.lists(_text, max_size=3),
        "label": st.none() | _text,
        "cache": st.none() | _path,
        "amount": st.integers() | st.just("auto"),
        "revision": st.integers() | _text,
        "steps": st.none() | st.lists(st.integers(), max_size=3),
        "extra": st.dictionaries(_text, _json, max_size=2),
        "weights": st.dictionaries(_text, st.floats(allow_nan=False), max_size=2),
    },
)
_relaxed = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_relaxed
@given(_values)
def test_printed_config_loads_again_as_the_same_config(tmp_path: Path, chosen: dict[str, Any]) -> None:
    resolved = resolve(CONFIG, overrides=chosen)
    assert {name: resolved.values[name] for name in chosen} == chosen
    file = tmp_path / "printed.yaml"
    file.write_text(as_yaml(resolved), encoding="utf-8", newline="")
    again = resolve(CONFIG, file=file).values
    assert again == resolved.values
    assert repr(again) == repr(resolved.values), "equal values of another type (1 and 1.0 and True) are not the same"


@_relaxed
@given(_values)
def test_json_keeps_values_and_sources(chosen: dict[str, Any]) -> None:
    resolved = resolve(CONFIG, recipe_defaults={"width": 9}, overrides=chosen)
    again = Resolved.from_json(CONFIG, json.loads(json.dumps(resolved.to_json(), allow_nan=False)))
    assert again == resolved
    assert repr(again) == repr(resolved)


def test_printed_settings_load_again_and_name_their_sources(tmp_path: Path) -> None:
    resolved = resolve(BOTH, recipe_defaults={"batch_size": 3}, flags=["--output_dir", "runs/a", "--tf32"])
    printed = as_yaml(resolved)
    assert {"batch_size: 3  # recipe", "tf32: true  # flag", "seed: 0", "# Batch"} <= set(printed.splitlines())
    assert from_file(tmp_path, printed) == resolved.values


def test_nan_survives_writing_and_reading(tmp_path: Path) -> None:
    resolved = resolve(BOTH, flags=["--ratio", "nan"])
    stored = json.dumps(resolved.to_json(), allow_nan=False)
    assert math.isnan(Resolved.from_json(BOTH, json.loads(stored)).values["ratio"])
    assert math.isnan(from_file(tmp_path, as_yaml(resolved))["ratio"])


def test_stored_configs_of_other_versions_can_be_read() -> None:
    stored = resolve(BOTH, flags=["--seed", "7"]).to_json()
    del stored["values"]["batch_size"]
    again = Resolved.from_json(BOTH, stored)
    assert (again.values["seed"], again.sources["seed"], again.values["batch_size"]) == (7, "flag", 8)
    with pytest.raises(ConfigError, match="unknown field width in the stored configuration"):
        Resolved.from_json([Settings], stored)
