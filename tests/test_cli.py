"""The command line and the Python API: settings from all sources, and signals that stop a run with a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml

from command_line import TESTS, TINY, Ended, end, environment, lines, losses, start, unisono, wait_until
from tiny_recipe import HOLD
from unisono import __version__
from unisono.checkpoint.find import list_steps, validate
from unisono.cli.main import COMMANDS
from unisono.config import fields_of
from unisono.settings import Settings

# ---- help and settings: nothing here imports torch ----


def test_help_names_every_command_and_python_dash_m_works(tmp_path: Path) -> None:
    for words in (["--help"], ["help"], []):
        ended = unisono(*words, cwd=tmp_path)
        assert (ended.code, ended.err) == (0, "")
        assert all(f"\n  {name} " in ended.out for name in COMMANDS)
    assert unisono("--version", cwd=tmp_path).out == f"{__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, tmp_path: Path) -> None:
    ended = unisono(command, "--help", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"usage: unisono {command}")


def test_an_unknown_command_suggests_the_nearest(tmp_path: Path) -> None:
    ended = unisono("trian", cwd=tmp_path)
    assert (ended.code, ended.out, ended.err) == (2, "", "unisono: unknown command 'trian'; did you mean train?\n")


def test_train_help_lists_every_setting_with_its_documentation(tmp_path: Path) -> None:
    text = " ".join(unisono("train", "--help", cwd=tmp_path).out.split())
    settings = fields_of(Settings)
    assert len(settings) == sum(len(fields(group.default_factory)) for group in fields(Settings))  # type: ignore[arg-type]
    for field in settings:
        assert f"--{field.name} " in text or f"--[no_]{field.name} " in text, field.name
        assert field.doc and " ".join(field.doc.split()) in text, field.name


def test_train_help_with_a_recipe_adds_its_fields_and_its_defaults(tmp_path: Path) -> None:
    text = " ".join(unisono("train", TINY, "--help", cwd=tmp_path).out.split())
    assert "--slope float (default: 2.0) Slope of the line to fit." in text
    assert "--batch_size int (default: 4, set by the recipe)" in text


def test_a_printed_config_can_be_loaded_and_prints_the_same(tmp_path: Path) -> None:
    first = unisono(
        *("train", TINY, "--print_config", "--slope", -1.5, "--seed", 9, "--lr_schedule", "cosine", "--no-shuffle"),
        cwd=tmp_path,
    )
    assert first.code == 0, first.err
    (tmp_path / "my.yaml").write_text(first.out)
    second = unisono("train", TINY, "--print_config", "--config", "my.yaml", cwd=tmp_path)
    values = yaml.safe_load(first.out)
    assert second.code == 0 and yaml.safe_load(second.out) == values
    assert list(yaml.safe_load(second.out)) == list(values)
    assert "seed: 9  # flag\n" in first.out and "seed: 9  # file\n" in second.out, "it says where a value came from"
    assert {
        "slope": -1.5,
        "seed": 9,
        "lr_schedule": "cosine",
        "shuffle": False,
        "batch_size": 4,
    }.items() <= values.items()
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_flags_win_over_the_file_and_the_file_over_the_recipes_defaults(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("batch-size: 6\nmax_steps: 7\n")
    printed = unisono("train", TINY, "--config=my.yaml", "--max-steps=8", "--print-config", cwd=tmp_path)
    values = yaml.safe_load(printed.out)
    assert values["max_steps"] == 8, "flag"
    assert values["batch_size"] == 6, "file"
    assert values["num_workers"] == 0, "the recipe's default, not the engine's 2"
    assert values["keep_last"] == 3, "the engine's default"


def test_hyphens_are_underscores(tmp_path: Path) -> None:
    flags = ["--batch-size", "2", "--no-tensorboard", "--num-samples", "5", "--best-metric", "eval/loss"]
    hyphens = unisono("train", TINY, "--print-config", *flags, cwd=tmp_path)
    underscores = unisono(
        "train",
        TINY,
        "--print_config",
        *(flag.replace("-", "_").replace("__", "--", 1) for flag in flags),
        cwd=tmp_path,
    )
    assert hyphens.code == 0 and hyphens.out == underscores.out


# ---- from Python ----

PROGRAM = '''
import json, sys
import unisono
from tiny_recipe import Tiny

class Local(Tiny):
    """Lives in __main__: no other process can import it."""

if __name__ == "__main__":
    results = {
        "instance": unisono.train(Tiny, Tiny.Config(slope=-3.0), output_dir="instance", max_steps=2),
        "mapping": unisono.train(Tiny, {"slope": -3.0, "max_steps": 2, "output_dir": "mapping"}),
        "names": unisono.train(Tiny, slope=-3.0, max_steps=2, output_dir="names"),
        "file": unisono.train(Tiny, "my.yaml", max_steps=2, output_dir="file"),
        "local": unisono.train(Local, slope=-3.0, max_steps=2, output_dir="local", nproc=2),
        "ranks": unisono.train(Tiny, slope=-3.0, max_steps=2, output_dir="ranks", nproc=2, global_batch_size=4),
    }
    try:
        unisono.train(Tiny, {"slop": 1.0}, output_dir="never")
    except unisono.errors.UserError as error:
        results["refused"] = str(error)
    print(json.dumps({name: vars(result) if hasattr(result, "step") else result for name, result in results.items()},
                     default=str))
'''


def test_train_from_python_takes_a_config_in_any_form_and_returns_folder_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "my.yaml").write_text("slope: -3.0\n")
    paths = os.pathsep.join([os.path.dirname(__file__), str(Path(__file__).parents[1] / "src")])
    ended = end(start(["program.py"], cwd=tmp_path, PYTHONPATH=paths))
    assert ended.code == 0, ended.err
    results = json.loads(ended.out)
    assert results.pop("refused").startswith("unknown field slop in the settings passed in Python; did you mean slope")
    assert not (tmp_path / "never").exists()
    expected = losses(tmp_path / "instance")
    assert len(expected) == 2
    for name, result in results.items():
        assert (result["folder"], result["status"], result["step"]) == (name, "done", 2)
        assert result["last"]["loss"] == pytest.approx(expected[-1], rel=1e-5), name
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5), name
    worlds = {name: json.loads((tmp_path / name / "run.json").read_text())["starts"][0]["world"] for name in results}
    assert worlds == dict.fromkeys(results, 1) | {"ranks": 2}
    line = "Local is defined in __main__, which other processes cannot import: training on one device"
    assert ended.err.count(line) == 1
    assert "move it to a file of its own to use several" in ended.err


# ---- signals ----


@dataclass(frozen=True)
class Stop:
    """A run that receives signals in its third step or later."""

    ranks: int
    signals: tuple[signal.Signals, ...]
    flags: tuple[str, ...] = ()
    whole_group: bool = False  # as a terminal sends Ctrl-C
    held_s: float = 0.2


@dataclass(frozen=True)
class Stopped:
    stopped: Ended
    seconds: float
    checkpoints: list[Path]
    folder: Path
    went_on: Ended | None


STOPS = {
    "Ctrl-C in a terminal, with loader workers": Stop(
        # The last step needs more micro-batches than were prefetched, so the workers must stay alive.
        *(1, (signal.SIGINT,), ("--num_workers", "2", "--batch_size", "1", "--prefetch_factor", "1")),
        whole_group=True,
    ),
    "SIGTERM to one process": Stop(1, (signal.SIGTERM,)),
    "Ctrl-C in a terminal, on two ranks": Stop(2, (signal.SIGINT,), whole_group=True),
    "SIGTERM to the launcher of two ranks": Stop(2, (signal.SIGTERM,)),
}
INSISTING = {
    "one process": Stop(1, (signal.SIGINT, signal.SIGINT), held_s=30),
    "two ranks": Stop(2, (signal.SIGINT, signal.SIGINT), held_s=30),
}


@pytest.fixture(scope="module")
def stops(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Stopped]]]:
    """The runs above, two at a time; only those that pytest selected."""
    ours = [item for item in request.session.items if item.fspath == request.node.fspath]
    selected = {item.callspec.params.get("name") for item in ours if hasattr(item, "callspec")}
    with ThreadPoolExecutor(2) as pool:
        chosen = {name: stop for name, stop in (STOPS | INSISTING).items() if name in selected}
        yield {
            name: pool.submit(stop_and_go_on, stop, tmp_path_factory.mktemp("stop")) for name, stop in chosen.items()
        }
        pool.shutdown(cancel_futures=True)


def stop_and_go_on(stop: Stop, place: Path) -> Stopped:
    folder, hold = place / "run", place / "hold"
    hold.write_text("0.2")
    words = ["-m", "unisono", "train", TINY, "--output_dir", "run", "--max_steps", 40, *stop.flags]
    words += ["--global_batch_size", 4, *(["--nproc", stop.ranks] if stop.ranks > 1 else [])]
    process = start(words, cwd=place, **{HOLD: str(hold)})
    try:
        wait_until(lambda: len(lines(folder)) >= 2 or process.poll() is not None, "two steps")
        hold.write_text(str(stop.held_s))
        began = time.monotonic()
        for number, signum in enumerate(stop.signals):
            time.sleep(1.0 * (number > 0 or stop.held_s > 1))
            (os.killpg if stop.whole_group else os.kill)(process.pid, signum)
        stopped = end(process)
        seconds = time.monotonic() - began
    finally:
        process.kill()
    checkpoints = [path for _, path in list_steps(folder / "checkpoints")]
    hold.unlink()
    went_on = end(start(words, cwd=place)) if len(stop.signals) == 1 else None
    return Stopped(stopped, seconds, checkpoints, folder, went_on)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    place = tmp_path_factory.mktemp("undisturbed")
    ended = unisono("train", TINY, "--output_dir", "run", "--max_steps", 40, cwd=place)
    assert ended.code == 0, ended.err
    return losses(place / "run")


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_run_saves_and_the_same_command_reaches_the_same_end(
    name: str, stops: dict[str, Future[Stopped]], undisturbed: list[float]
) -> None:
    actual = stops[name].result()
    assert actual.stopped.code == 75, actual.stopped.err
    assert "Traceback" not in actual.stopped.err
    assert "run the same command with --output_dir run" in actual.stopped.err.splitlines()[-1]
    [checkpoint] = actual.checkpoints
    assert actual.went_on is not None and actual.went_on.code == 0, actual.went_on
    assert f"run (resumed from {checkpoint.name})" in actual.went_on.err
    assert losses(actual.folder) == pytest.approx(undisturbed, rel=1e-5)
    assert len(undisturbed) == 40
    events = [(event["kind"], event["step"]) for event in lines(actual.folder, "events.jsonl")]
    step = int(checkpoint.name.removeprefix("step_"))
    expected = ["start", "signal", "save", "stopped", "resume", "save", "done"]
    assert events == list(zip(expected, [0, step, step, step, step, 40, 40], strict=True))
    assert validate(actual.folder / "checkpoints/step_00000040") is None


@pytest.mark.parametrize("name", ["one process", pytest.param("two ranks", marks=pytest.mark.slow)])
def test_a_second_ctrl_c_ends_a_run_at_once_without_a_checkpoint(name: str, stops: dict[str, Future[Stopped]]) -> None:
    actual = stops[name].result()
    assert actual.stopped.code == 130, actual.stopped.err
    assert actual.seconds < 15, "it waited for the step, which takes 30 s"
    assert actual.checkpoints == []
    assert "Traceback" not in actual.stopped.err


# ---- started again ----


def test_a_changed_setting_is_printed_and_recorded(tmp_path: Path) -> None:
    words = ["train", TINY, "--output_dir", "run", "--save_every", 1]
    assert unisono(*words, "--max_steps", 1, cwd=tmp_path).code == 0
    again = unisono(*words, "--max_steps", 2, "--slope", 3, "--nproc", 2, "--global_batch_size", 4, cwd=tmp_path)
    assert again.code == 0, again.err
    assert again.err.count("note: since its last start: max_steps 1 → 2, slope 2.0 → 3.0") == 1, again.err
    [noted] = [event for event in lines(tmp_path / "run", "events.jsonl") if event["kind"] == "resume"]
    assert noted["changed"] == {"slope": [2.0, 3.0], "max_steps": [1, 2]}
    last = unisono("train", TINY, "--output_dir", "run", "--max_steps", 2, cwd=tmp_path)
    assert last.code == 0 and "since its last start" not in last.err, "what is not said stays"


# --- a stdout that cannot be written


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "gpus", "verify --help", "doctor --help"])
def test_a_full_stdout_ends_the_command_with_one_line_and_an_exit_code(words: str, unbuffered: str) -> None:
    run = [sys.executable, "-m", "unisono", *words.split()]
    with open("/dev/full", "w") as full:
        more = environment(PYTHONUNBUFFERED=unbuffered)
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, env=more)
    line = "unisono: stdout cannot be written (No space left on device); free some space, or redirect it\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("words", ["gpus --json", "doctor --help", "train --help", f"train {TINY} --print-config"])
def test_a_closed_pipe_of_a_reader_is_not_an_error(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = [sys.executable, "-m", "unisono", *words.split()]
    done = subprocess.run(run, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment())
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_recipe_that_exits_with_a_message_has_not_succeeded(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom tiny_recipe import Tiny\n\nclass Exits(Tiny):\n"
        "    def check_settings(self, settings):\n        sys.exit('mount /data first')\n"
    )
    done = unisono("train", "exits.py:Exits", "--print_config", cwd=tmp_path)
    assert done.code == 3 and done.err.splitlines() == ["unisono: mount /data first"]


def test_a_full_stderr_does_not_change_the_exit_code(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        run = [sys.executable, "-m", "unisono", "report", str(tmp_path)]
        assert subprocess.run(run, stderr=full, env=environment()).returncode == 2
