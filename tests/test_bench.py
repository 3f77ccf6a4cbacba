"""`unisono bench`: the hand-written loop does the same work, and table, plot and JSON show the same numbers."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import unisono
from command_line import TESTS, Ended, end, start, wait_until
from command_line import unisono as run
from ranks import run_ranks
from unisono.benching.cases import make_cases
from unisono.benching.options import BenchOptions, parse_counts
from unisono.benching.rank import measure
from unisono.benching.result import loss_difference, make_rows
from unisono.benching.spread import MedianInterval, Spread
from unisono.cli.main import main
from unisono.cluster.environment import detect
from unisono.engine.start.rank_start import RankStart
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import configure
from unisono.errors import ConfigError, UserError
from unisono.formatting import format_number, format_rate

MOONS = f"{TESTS.parent / 'examples/own_model/recipe.py'}:TwoMoons"
RECIPES = TESTS / "benched_recipes.py"
SENTENCES = f"{RECIPES}:Sentences"
SHORT = ["--steps", "3", "--warmup", "3", "--rounds", "2"]


def run_case(recipe: str, ranks: int, settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Measures one case in this rank."""
    resolved = configure(load_recipe(recipe), overrides={"gpus": "0", **settings})
    chosen = BenchOptions(nproc=ranks, **options)
    [case] = make_cases(load_recipe(recipe), resolved, chosen)
    numbers = {name: getattr(chosen, name) for name in ("steps", "warmup", "rounds", "overhead")}
    with tempfile.TemporaryDirectory() as folder:
        shared = folder if ranks == 1 else settings["output_dir"]
        changed = case.resolved.with_values("bench", output_dir=shared)
        measured = measure({"recipe": recipe, "resolved": changed.to_json(), "options": numbers}, RankStart(detect()))
    assert measured is not None
    return measured


def measured_by(ranks: int, tmp_path: Path, recipe: str = SENTENCES, **settings: Any) -> dict[str, Any]:
    """The numbers of a short measurement with real ranks."""
    options = {"steps": 3, "warmup": 3, "rounds": 2, "overhead": True}
    settings = {"dtype": "float64", "output_dir": str(tmp_path / "run"), **settings}
    arguments = {"recipe": recipe, "ranks": ranks, "settings": settings, "options": options}
    results: list[dict[str, Any]] = run_ranks("run_case", __file__, ranks, arguments)
    return results[0]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"gradient_accumulation_steps": 3, "lr_schedule": "cosine", "ema_decay": 0.9}),
        (1, {"dropout": 0.3, "jitter": True, "norm": True, "optimizer": "sgd"}),
        (1, {"num_workers": 2, "optimizer": "muon", "warmup_steps": 4, "grad_clip": 0.1}),
        (2, {"gradient_accumulation_steps": 2, "dropout": 0.2, "jitter": True}),
        (2, {"global_batch_size": 7, "batch_size": 2}),  # ranks with different numbers of samples
        (2, {"strategy": "ddp", "activation_checkpointing": True, "norm": True}),
    ],
)
def test_the_hand_written_loop_has_the_losses_of_the_run(ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """In 64 bits, all losses of all steps: with the same samples, noise, optimizer, schedule and clipping."""
    numbers = measured_by(ranks, tmp_path, **settings)
    steps = 3 + 2 * (2 + 3)
    assert len(numbers["losses"]) == len(numbers["hand_losses"]) == steps
    assert numbers["hand_losses"] == pytest.approx(numbers["losses"], rel=1e-9)
    assert numbers["losses"][0] != numbers["losses"][-1]
    assert len(numbers["seconds"]["unisono"]) == len(numbers["seconds"]["hand"]) == 2
    assert numbers["ranks"] == ranks
    assert numbers["strategy"] == ("single" if ranks == 1 else "ddp")
    [row] = make_rows([numbers])
    assert row.overhead is not None
    assert row.overhead.loss_difference < 1e-9
    # Sentences have 4 to 12 words, of which the loss counts all but the first.
    assert row.tokens_per_s is not None and row.items_per_s is not None
    assert 4 <= row.tokens_per_s / row.samples_per_s.median <= 12
    assert 3 <= row.items_per_s / row.samples_per_s.median <= 11


def test_a_mean_of_means_is_used_only_where_it_is_the_mean(tmp_path: Path) -> None:
    """TwoMoons counts samples, so that the plain loop needs no other division."""
    numbers = measured_by(2, tmp_path, MOONS, tensorboard=False)
    assert numbers["hand_losses"] == pytest.approx(numbers["losses"], rel=1e-9)


def test_no_overhead_is_shown_if_the_loops_do_not_do_the_same(tmp_path: Path) -> None:
    [row] = make_rows([measured_by(1, tmp_path, f"{RECIPES}:Other")])
    assert row.overhead is None
    assert "losses of the hand-written loop differ" in row.why_no_overhead


@pytest.mark.parametrize(
    ("recipe", "ranks", "settings", "reason"),
    [
        ("Compared", 1, {}, "compares samples with each other"),
        ("Sentences", 2, {"strategy": "fsdp"}, "strategy fsdp"),
    ],
)
def test_other_work_is_measured_without_overhead_and_says_why(
    recipe: str, ranks: int, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    numbers = measured_by(ranks, tmp_path, f"{RECIPES}:{recipe}", dtype="float32", peak_tflops=0.01, **settings)
    [row] = make_rows([numbers])
    assert row.overhead is None and reason in row.why_no_overhead
    assert row.samples_per_s.median > 0
    assert (row.mfu or 0) > 0  # the peak rate is known


@pytest.fixture(scope="module")
def moons(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A benchmark of TwoMoons on 1 and 2 CPU ranks, with the command."""
    place = tmp_path_factory.mktemp("bench")
    ended = run("bench", MOONS, "--nproc", "1,2", *SHORT, "--hidden=32", "--output_dir", "result", cwd=place)
    assert ended.code == 0, ended.err
    return place, ended


def test_table_plot_and_json_show_the_same_numbers(moons: tuple[Path, Ended]) -> None:
    place, ended = moons
    result = json.loads((place / "result/bench.json").read_text())
    plot = (place / "result/bench.svg").read_text()
    texts = ["".join(each.itertext()) for each in ElementTree.fromstring(plot).iter("{http://www.w3.org/2000/svg}text")]
    markdown = (place / "result/bench.md").read_text()
    assert [row["ranks"] for row in result["rows"]] == [1, 2]
    assert [row["global_batch"] for row in result["rows"]] == [64, 128]
    for row in result["rows"]:
        step, rate = row["step_ms"], row["samples_per_s"]
        rounds = row["rounds_ms"]
        assert Spread.of(rounds) == Spread(**step)
        assert min(rounds) <= step["low"] <= step["median"] <= step["high"] <= max(rounds)
        assert rate["median"] == pytest.approx(1e3 * row["global_batch"] / step["median"])
        ratios = [mine / other for mine, other in zip(rounds, row["hand_rounds_ms"], strict=True)]
        assert MedianInterval(**row["overhead"]["ratio"]) == MedianInterval.of(ratios)
        assert row["overhead"]["loss_difference"] <= 1e-5
        percent = f"{100 * (row['overhead']['ratio']['median'] - 1):+.1f} %"
        for shown in (format_number(step["median"], 3), format_rate(rate["median"]), percent):
            assert shown in ended.out and shown in markdown, shown
        assert format_rate(rate["median"]) in texts
        assert format_number(step["median"], 3) in texts
        assert row["mfu"] is None and "no peak rate of CPU" in row["why_no_mfu"]
        assert 0 <= row["comm_share"] < 1 and 0 <= row["data_wait_share"] < 1
        assert 0 < row["memory_gib"] < 16
    one, two = (row["samples_per_s"]["median"] for row in result["rows"])
    assert result["rows"][1]["efficiency"]["median"] == pytest.approx(two / one / 2)
    assert result["rows"][1]["comm_share"] > 0
    assert f"{result['rows'][1]['efficiency']['median']:.0%}" in ended.out
    assert "no MFU: no peak rate of CPU is known; pass --peak_tflops" in ended.out
    assert f"unisono bench {MOONS} --nproc 1,2 --steps 3 --warmup 3 --rounds 2 --hidden=32" == result["command"]


def test_a_benchmark_leaves_only_its_result(moons: tuple[Path, Ended]) -> None:
    place, _ = moons
    names = {path.name for path in (place / "result").iterdir()}
    assert names == {"1.log", "2.log", "bench.json", "bench.md", "bench.svg"}
    assert [path.name for path in place.iterdir()] == ["result"]
    folder = re.search(r"/\S*unisono-\w+", (place / "result/1.log").read_text())
    assert folder is not None and not Path(folder[0]).exists()


def test_an_existing_result_is_never_overwritten(moons: tuple[Path, Ended], capfd: pytest.CaptureFixture[str]) -> None:
    place, _ = moons
    before = (place / "result/bench.json").read_bytes()
    assert main(["bench", MOONS, "--nproc", "1", "--output_dir", str(place / "result")]) == 2
    assert "is not empty; choose a new folder" in capfd.readouterr().err
    assert (place / "result/bench.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "1,x"], "nproc: expected numbers of ranks such as 1,2,4, got '1,x'"),
        (["--nproc", "0"], "expected numbers of ranks"),
        (["--nproc", ""], "expected numbers of ranks"),
        (["--nproc", "1,,2"], "expected numbers of ranks"),
        (["--nproc", "4000"], "max_ranks_per_core"),
        (["--gpus", "999"], "gpus 999: this machine has"),
        (["--gpus", "1", "--nproc", "1"], "remove one of the two"),
        (["--nproc", "1", "--steps", "0"], "steps: expected a whole number from 1"),
        (["--nproc", "1", "--rounds", "-3"], "--rounds -3: expected a whole number"),
        (["--nproc", "1", "--scaling", "both"], "--scaling: invalid choice"),
        (["--nproc", "1", "--max_steps", "9"], "max_steps: bench sets the number of steps itself"),
        (["--nproc", "1", "--inject", "kill@rank0:step1"], "inject: bench measures runs without faults"),
        (["--nproc", "1,2", "--strategy", "single"], "strategy single trains on one device"),
        (["--nproc", "1,8", "--scaling", "strong", "--batch_size", "4"], "cannot be divided among 8 ranks"),
        (["--nproc", "2,3", "--global_batch_size", "7"], "use a global_batch_size that 2 divides"),
        (["--nproc", "1", "--batch_sise", "4"], "did you mean"),
        (["--nproc", "1", "--nproc", "2"], "is set twice"),
        (["--nproc", "1", "--learning_rate", "-1"], "learning_rate"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", MOONS, *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err and err.count("\n") == 1 and "Traceback" not in err, err
    assert list(tmp_path.iterdir()) == []


def test_a_failing_recipe_is_one_line_that_names_the_log(tmp_path: Path) -> None:
    tiny = f"{TESTS / 'tiny_recipe.py'}:Tiny"
    ended = run("bench", tiny, "--nproc", "1", *SHORT, "--flaw=vector", "--output_dir", "result", cwd=tmp_path)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert "1 rank: loss(): total must be a scalar" in ended.err and "see result/1.log" in ended.err


def test_a_signal_stops_the_ranks_and_no_folder_of_the_run_stays(tmp_path: Path) -> None:
    process = start(
        ["-m", "unisono", "bench", MOONS, "--nproc", "1", "--rounds", "100000", "--output_dir", "result"], cwd=tmp_path
    )
    log = tmp_path / "result/1.log"
    wait_until(lambda: log.exists() and "step 10/" in log.read_text(), "a step", 200)
    process.send_signal(signal.SIGINT)
    ended = end(process)
    assert ended.code == 75, ended.err
    assert "stopped by SIGINT" in ended.err
    folder = re.search(r"/\S*unisono-\w+", log.read_text())
    assert folder is not None and not Path(folder[0]).exists()


def test_python_returns_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    kind = load_recipe(f"{TESTS / 'tiny_recipe.py'}:Tiny")
    result = unisono.bench(kind, {"slope": 3.0}, nproc=1, steps=2, warmup=2, rounds=1, overhead=False, seed=3)
    assert [row.ranks for row in result.rows] == [1]
    assert result.rows[0].overhead is None and "--overhead no" in result.rows[0].why_no_overhead
    assert json.loads((result.folder / "bench.json").read_text())["settings"] == {"seed": 3, "slope": 3.0}
    assert re.fullmatch(r"bench-tiny-\d+-\d+", result.folder.name)
    assert result.folder.parent == Path("runs").absolute()
    with pytest.raises(UserError, match="other processes cannot import"):
        unisono.bench(type("Local", (kind,), {"__module__": "__main__"}), nproc=1)  # type: ignore[arg-type]


def test_weak_scaling_grows_the_batch_and_strong_scaling_does_not() -> None:
    kind = load_recipe(MOONS)

    def batches(scaling: str, **settings: Any) -> list[int]:
        resolved = configure(kind, overrides=settings)
        return [
            each.global_batch for each in make_cases(kind, resolved, BenchOptions(nproc=[1, 2, 4], scaling=scaling))
        ]

    assert batches("weak") == [64, 128, 256]
    assert batches("strong") == [64, 64, 64]
    assert batches("weak", global_batch_size=20) == [20, 40, 80]
    assert batches("strong", batch_size=6, gradient_accumulation_steps=4) == [24, 24, 24]


def test_counts_are_sorted_and_unique() -> None:
    assert parse_counts("nproc", "4, 1,2,2") == [1, 2, 4]
    assert parse_counts("nproc", [2, 1]) == [1, 2]
    assert parse_counts("nproc", 3) == [3]
    for wrong in ([], [0], [1.5], True, "٣", "1e3", None):
        with pytest.raises(ConfigError):
            parse_counts("nproc", wrong)


def test_the_interval_of_a_median_is_that_of_the_binomial_distribution() -> None:
    """Textbook values: with 10 values, the 2nd and the 9th enclose the median with 97.9 %."""
    assert MedianInterval.of(range(1, 11)) == MedianInterval(5.5, 2, 9, pytest.approx(0.978515625))
    assert MedianInterval.of([3.0, 1.0, 2.0]) == MedianInterval(2.0, 1.0, 3.0, 0.75)
    assert MedianInterval.of([1.0]).confidence == 0.0
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0)


def test_losses_that_differ_or_are_not_finite_are_noticed() -> None:
    assert loss_difference([2.0, 1.0], [2.0, 1.0]) == 0
    assert loss_difference([2.0, 1.0], [2.0, 1.1]) == pytest.approx(0.05)
    assert loss_difference([float("nan")], [1.0]) == float("inf")
    assert loss_difference([1.0], [1.0, 2.0]) == float("inf")


def test_help_needs_no_torch(tmp_path: Path) -> None:
    program = "import sys; from unisono.cli.main import main; main(['bench', '--help'])"
    program += "; sys.exit('torch' in sys.modules)"
    ended = end(start(["-c", program], cwd=tmp_path))
    assert ended.code == 0, ended.err
    assert "--scaling" in ended.out and "hand-written" in ended.out
