"""Several config files, files that include others, and settings with aliases."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import unisono
from unisono.cli.main import main
from unisono.config import as_yaml, help_text, resolve
from unisono.engine.recipe import Recipe
from unisono.engine.start.run import configure
from unisono.errors import ConfigError, RecipeError
from unisono.settings import Settings


class Words(Recipe):
    """A recipe with aliases of settings."""

    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 2}
    aliases: ClassVar[Mapping[str, str]] = {"lr": "learning_rate", "train_batch_size": "batch_size", "broad": "wide"}

    @dataclass
    class Config:
        width: int = 3
        """Of the picture."""
        wide: bool = False
        """Whether it is."""

    @classmethod
    def translate(cls, values: dict[str, Any], where: str) -> Mapping[str, Any]:
        if "shape" in values:
            raise ConfigError(f"shape: there is one shape only (from {where})")
        if "breadth" in values:
            values["width"] = values.pop("breadth")
        return values


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a file below the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return Path(name)

    return write


def values(*files: Path, flags: list[str] | None = None) -> dict[str, Any]:
    return configure(Words, file=list(files), flags=flags or []).values


def refused(*files: Path, flags: list[str] | None = None, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        values(*files, flags=flags)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# --- several files


def test_later_files_override_earlier_ones_and_flags_override_all(write: Any) -> None:
    files = [write("a.yaml", "seed: 1\nkeep_last: 1\nwidth: 1\n"), write("b.json", '{"seed": 2, "keep_last": 2}')]
    result = values(*files, flags=["--keep_last", "9"])
    assert (result["seed"], result["keep_last"], result["width"]) == (2, 9, 1)
    assert values(*reversed(files))["seed"] == 1


def test_the_command_takes_several_files(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = f"{Path(__file__).with_name('tiny_recipe.py')}:Tiny"
    a, b = write("a.yaml", "seed: 1\nkeep_last: 5\n"), write("b.yaml", "seed: 2\n")
    assert main(["train", recipe, "--config", str(a), f"--config={b}", "--print_config"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert {"seed: 2  # file", "keep_last: 5  # file"} <= set(printed)


def test_a_later_file_can_go_back_to_a_default(write: Any) -> None:
    a, b = write("a.yaml", "mixed_precision: fp16\n"), write("b.yaml", "mixed_precision: no\n")
    resolved = configure(Words, file=[a, b])
    assert (resolved.values["mixed_precision"], resolved.explicit("mixed_precision")) == ("no", True)
    assert not configure(Words, file=b).explicit("mixed_precision")


# --- include


def test_included_files_come_first_in_their_order_and_own_keys_win(write: Any) -> None:
    write("one.yaml", "seed: 1\nwidth: 1\nkeep_last: 1\n")
    write("two.yaml", "seed: 2\nwidth: 2\n")
    result = values(write("top.yaml", "seed: 3\ninclude: [one.yaml, two.yaml]\n"))
    assert (result["seed"], result["width"], result["keep_last"]) == (3, 2, 1)


def test_an_include_is_found_in_the_files_folder_or_above(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write("config/model/base.yaml", "width: 7\n")
    write("config/all.yaml", "seed: 7\n")
    file = write("config/model/wide.yaml", "include: [config/model/base.yaml, all.yaml]\n")
    assert (values(file)["width"], values(file)["seed"]) == (7, 7)
    write("config/model/beside.yaml", "include: base.yaml\n")
    assert values(Path("config/model/beside.yaml"))["width"] == 7
    # Also from another folder, where the include names the folder of the file.
    place = file.resolve()
    place.write_text("include: config/model/base.yaml\n")
    monkeypatch.chdir(os.path.dirname(os.__file__))
    assert values(place)["width"] == 7


def test_of_two_matching_includes_the_nearest_is_used(write: Any) -> None:
    write("base.yaml", "width: 1\n")
    write("config/base.yaml", "width: 2\n")
    assert values(write("config/top.yaml", "include: base.yaml\n"))["width"] == 2
    assert values(write("config/up.yaml", "include: ../base.yaml\n"))["width"] == 1


def test_files_that_include_each_other_are_refused_with_the_chain(write: Any) -> None:
    a = write("a.yaml", "include: b.yaml\n")
    write("b.yaml", "include: c.yaml\n")
    write("c.yaml", "include: b.yaml\n")
    assert "includes itself: b.yaml -> c.yaml -> b.yaml; remove one of these includes" in refused(a)
    assert "includes itself: s.yaml -> s.yaml" in refused(write("s.yaml", "include: s.yaml\n"))


def test_an_include_does_not_leave_the_current_folder(write: Any, tmp_path: Path, monkeypatch: Any) -> None:
    outside = write("secret.yaml", "width: 9\n").resolve()
    write("project/link.yaml", "").unlink()
    Path("project/link.yaml").symlink_to(outside)
    monkeypatch.chdir("project")
    for include in ("../secret.yaml", "link.yaml", "config/../../secret.yaml"):
        file = write("top.yaml", f"include: {include}\n")
        assert f"include {include} leads out of {tmp_path / 'project'}" in refused(file)
    assert "include secret.yaml does not exist (searched in its folder)" in refused(
        write("top.yaml", "include: secret.yaml\n")
    )
    assert f"include {outside} is an absolute path" in refused(write("top.yaml", f"include: {outside}\n"))
    monkeypatch.chdir(tmp_path)
    assert values(write("project/top.yaml", "include: secret.yaml\n"))["width"] == 9, "now the folder above is ours"


def test_a_file_elsewhere_includes_only_files_in_its_folder_or_below(write: Any, monkeypatch: Any) -> None:
    write("base.yaml", "width: 9\n")
    file = write("config/top.yaml", "include: base.yaml\n").resolve()
    write("here/x.yaml", "")
    monkeypatch.chdir("here")
    assert "include base.yaml does not exist (searched in its folder)" in refused(file)
    file.write_text("include: ../base.yaml\n")
    assert "leads out of" in refused(file)
    file.with_name("base.yaml").write_text("width: 8\n")
    file.write_text("include: base.yaml\n")
    assert values(file)["width"] == 8


@pytest.mark.parametrize("include", ["5: 6", "{a: b}", "[[a.yaml]]", '""', '"a\\0.yaml"'])
def test_an_include_that_is_not_a_file_name_is_rejected(write: Any, include: str) -> None:
    text = f"include:\n  {include}\n"
    assert "include: expected a file or a list of files" in refused(write("top.yaml", text))


def test_a_missing_include_and_too_many_are_refused(write: Any) -> None:
    long = "a" * 300 + ".yaml"
    Path("circle.yaml").symlink_to("circle.yaml")
    for include in ("gone.yaml", ".", "circle.yaml", long):
        file = write("top.yaml", f"include: {include}\n")
        assert f"include {include} does not exist (searched in its folder)" in refused(file)
    file = write("config/top.yaml", "include: ../gone.yaml\n")
    assert f"include ../gone.yaml does not exist (searched in its folder and up to {Path.cwd()})" in refused(file)
    for number in range(12):
        write(f"{number}.yaml", f"include: [{number + 1}.yaml, {number + 1}.yaml]\n")
    write("12.yaml", "seed: 1\n")
    assert "0.yaml includes more than 100 files" in refused(Path("0.yaml"))


def test_an_error_names_the_included_file_that_contains_the_value(write: Any) -> None:
    write("config/base.yaml", "keep_last: many\n")
    file = write("config/top.yaml", "include: base.yaml\n")
    assert refused(file) == "keep_last: expected a whole number, got 'many' (from config/base.yaml)"
    write("config/base.yaml", "keep_lats: 1\n")
    assert refused(file) == "unknown field keep_lats in config/base.yaml; did you mean keep_last?"


def test_include_cannot_be_a_setting() -> None:
    @dataclass
    class Config:
        include: str = ""

    with pytest.raises(RecipeError, match="include cannot be a setting"):
        resolve([Config])


# --- other names


def test_an_alias_works_in_a_file_as_a_flag_and_from_python(write: Any) -> None:
    assert values(write("a.yaml", "lr: 0.5\ntrain-batch-size: 64\n"))["learning_rate"] == 0.5
    assert values(Path("a.yaml"))["batch_size"] == 64
    assert values(Path("a.yaml"), flags=["--learning_rate", "2"])["learning_rate"] == 2
    assert values(Path("a.yaml"), flags=["--lr=3", "--broad"])["learning_rate"] == 3
    assert values(flags=["--broad"])["wide"] and not values(flags=["--broad", "--no_broad"])["wide"]
    assert configure(Words, overrides={"lr": 4}).values["learning_rate"] == 4


def test_printed_and_stored_configs_use_unisonos_names(write: Any) -> None:
    resolved = configure(Words, file=write("a.yaml", "lr: 0.5\n"), flags=["--train_batch_size", "7"])
    assert {"learning_rate: 0.5  # file", "batch_size: 7  # flag"} <= set(as_yaml(resolved).splitlines())
    stored = json.dumps(resolved.to_json())
    assert "train_batch_size" not in stored and '"lr"' not in stored


def test_two_names_of_one_setting_with_different_values_are_rejected(write: Any) -> None:
    file = write("a.yaml", "lr: 0.5\nlearning_rate: 0.25\n")
    assert refused(file) == (
        "lr (0.5, from a.yaml) and learning_rate (0.25, from a.yaml) are names of the same setting; remove one"
    )
    assert "lr (1.0, from --lr) and learning_rate (2.0" in refused(flags=["--lr", "1", "--learning_rate", "2"])
    assert values(flags=["--lr", "1", "--learning_rate", "1.0"])["learning_rate"] == 1, "they agree"
    with pytest.raises(ConfigError, match="are names of the same setting"):
        configure(Words, overrides={"lr": 1, "learning_rate": 2})


def test_an_alias_in_a_later_source_wins(write: Any) -> None:
    write("base.yaml", "lr: 1\n")
    top = write("top.yaml", "include: base.yaml\nlearning_rate: 2\n")
    assert values(top)["learning_rate"] == 2
    assert values(top, write("last.yaml", "lr: 3\n"))["learning_rate"] == 3
    write("base.yaml", "learning_rate: 1\n")
    assert values(write("other.yaml", "lr: 2\ninclude: base.yaml\n"))["learning_rate"] == 2


def test_an_error_about_a_value_uses_the_name_that_the_user_wrote(write: Any) -> None:
    file = write("a.yaml", "train_batch_size: many\n")
    assert refused(file) == "train_batch_size: expected a whole number, got 'many' (from a.yaml)"
    assert refused(flags=["--train-batch-size", "x"]).startswith("train_batch_size: expected a whole number, got 'x'")
    assert refused(flags=["--lr"]) == "--lr needs a value: a number"
    assert refused(flags=["--train_batch_sise", "1"]).endswith("did you mean --train_batch_size?")


def test_help_shows_the_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = help_text([Settings, Words.Config], Words.defaults, Words.aliases).splitlines()
    assert "  --batch_size int  (default: 2, set by the recipe; also --train_batch_size)" in lines
    assert "  --learning_rate float  (default: 0.001; also --lr)" in lines


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"lr": "learning_rat"}, "lr is an alias of learning_rat, which is not a setting; did you mean learning_rate?"),
        ({"seed": "width"}, "seed cannot be an alias of width, because it is a setting of RunSettings"),
    ],
)
def test_an_alias_of_an_unknown_setting_is_an_error_in_the_recipe(aliases: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve((Settings, Words.Config), aliases=aliases)
    assert message in str(caught.value)


def test_settings_by_name_win_over_a_config_from_python_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("unisono.engine.start.run.start", lambda kind, resolved: seen.append(resolved.values))
    monkeypatch.setattr("unisono.engine.start.run.check_recipe", lambda kind: None)
    unisono.train(Words, {"lr": 1, "width": 5}, learning_rate=2)
    assert (seen[0]["learning_rate"], seen[0]["width"]) == (2, 5)


def test_several_files_can_be_passed_from_python(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("unisono.engine.start.run.start", lambda kind, resolved: seen.append(resolved.values))
    monkeypatch.setattr("unisono.engine.start.run.check_recipe", lambda kind: None)
    unisono.train(Words, [write("a.yaml", "breadth: 5\nseed: 1\n"), str(write("b.yaml", "seed: 2\n"))], lr=3)
    assert (seen[0]["width"], seen[0]["seed"], seen[0]["learning_rate"]) == (5, 2, 3)


# --- translation


def test_a_recipe_translates_and_rejects_keys_of_a_config_file(write: Any) -> None:
    write("base.yaml", "breadth: 5\n")
    assert values(write("a.yaml", "include: base.yaml\n"))["width"] == 5
    assert refused(write("a.yaml", "shape: round\n")) == "shape: there is one shape only (from a.yaml)"
    assert refused(write("a.yaml", "breadth: x\n")) == "width: expected a whole number, got 'x' (from a.yaml)"
    assert "unknown flag --breadth" in refused(flags=["--breadth", "1"])


def test_each_file_is_translated_once_together_with_its_includes(write: Any) -> None:
    calls: list[tuple[dict[str, Any], str]] = []

    def translate(given: dict[str, Any], where: str) -> dict[str, Any]:
        calls.append((dict(given), where))
        return given

    write("base.yaml", "seed: 1\nkeep-last: 1\n")
    files = [write("a.yaml", "include: base.yaml\nseed: 2\n"), write("b.yaml", "")]
    resolve([Settings], file=files, translate=translate)
    assert calls == [({"keep_last": "1", "seed": "2"}, "a.yaml"), ({}, "b.yaml")]
