"""The commands in the documentation work: README.md, CONTRIBUTING.md, docs/, the examples' pages, benchmarks/README.md.

Each command of a fenced block is run, shortened by documented flags, or `NOT_RUN` gives the reason why not. The files
and flags of commands that are not run must exist. Python blocks must compile.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from command_line import Ended, end, start, unisono
from unisono.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
        *sorted(ROOT.glob("docs/*.md")),
        *sorted(ROOT.glob("examples/**/*.md")),
    ]
]
SHELL, PYTHON = ("bash", "sh", "shell", "console"), ("python", "py")

# Pattern of a command -> why it is not run here. The first match counts.
NOT_RUN = {
    r"^(pip|apt-get|sudo|git clone|git|curl|docker)\b": "network: it installs or downloads",
    r"^(source|cd|export)\b": "belongs to the reader's shell; the tests start in the folder that it names",
    r"^make (setup|test|test-slow|lint|docs|bench|demo|faults|faults-quick|fuzz|clean|package)\b": "minutes: `make`",
    r"^python benchmarks/": "minutes, or needs a GPU",
    r"^python release/|^make release-notes": "it writes into the repository: tests/test_release.py",
    r"^unisono bench .*--rounds": "minutes: docs/bench.md has shorter ones",
    r"^unisono seo .*--crawl": "network: it crawls a site; tests/test_seo_crawl.py serves one",
    r"^unisono examples copy": "the examples are there already: tests/test_release.py",
    r"^tensorboard\b": "serves until it is stopped",
    r"^unisono watch .*--web": "serves until it is stopped: tests/test_watch.py",
    r"^(sbatch|srun|scancel|squeue)\b": "needs a SLURM cluster: tests/test_slurm.py runs one",
    r"^unisono slurm .*--submit": "needs a SLURM cluster: tests/test_slurm.py runs one",
    r"^kubectl\b": "needs a Kubernetes cluster",
    r"^sky\b": "needs SkyPilot and a cloud: tests/test_skypilot.py runs what it would run",
    r"--on ray": "needs a Ray cluster: tests/test_ray.py starts one",
    r"s3://": "needs object storage: tests/test_storage.py has an S3 server",
    r"^(ssh|scp)\b|--nnodes|--rdzv_endpoint": "several machines: tests/test_nodes.py and tests/test_launchers.py",
    r"^mpirun\b": "needs Open MPI: tests/test_launchers.py",
    r"^accelerate config": "asks questions",
    r"--interactive": "asks questions: tests/test_examples_multi_gpu.py",
    r"^accelerate\b": "needs accelerate: tests/test_launchers.py and tests/test_examples_darkroom.py",
    r"CUDA_VISIBLE_DEVICES|--gpus (all|\d)|--backend nccl|--cuda_graph|--multi_gpu|--gpu_ids": "needs GPUs",
    r"^python -m torch.distributed.launch": "a second form of torchrun: tests/test_launchers.py",
    r"Wan-AI/|\.safetensors|path/of|t5-small|minilm": "network: a pretrained model",
    r"my_videos|talk\.mp4|match\.mp4|FOLDER|val\.jsonl|P\.jsonl|runs/(mine|qv)\b|\bmovie\b": "the reader's own videos",
    r"(?<!examples/seo/)\b(pairs|pages)\.csv|\./public|queries\.txt|runs/(rank|score)\b": "the reader's own pages",
    r"hospital_": "the reader's own files",
    r"prompts\.txt|\./dataset|\./outputs|my_(student|model|lora)\b": "the reader's own data and models",
    r"^--": "flags of the command above: benchmarks/faults.py injects each kind",
    r"^unisono train clips --data_path mirror(?!.*--num_videos)": "minutes: tests/test_examples_clips.py",
    r"^unisono clips .*mirror_eval_120": "follows a run of minutes: tests/test_examples_clips.py",
    r"^unisono (train|verify) wan-distill|runs/wandistill-": "minutes: tests/test_wan_distill.py",
    r"^unisono train darkroom( *--config examples/darkroom/demo\.yaml.*)?$": "minutes: `make demo`",
    r"runs/darkroom-": "follows a run of minutes: tests/test_examples_darkroom.py",
    r"^unisono train wan-flow --config tiny.yaml|runs/wanflow-": "minutes: tests/test_examples_wan_flow.py",
    # The scripts of the examples: the tests of each folder run them, with their own small settings.
    r"(quick_start_multi_gpu|multi_gpu_training_examples)\.py": "minutes: tests/test_examples_multi_gpu.py, _clips.py",
    r"(python|torchrun.*) (train|collect|evaluate)\.py|(train|launch)_multi_?gpu\.sh": "minutes: test_examples_*.py",
    r"(test_)?multi_gpu_training\.py|train_seo": "minutes: tests/test_examples_seo.py",
    r"(train_distillation|test_multi_gpu|run_inference)\.py|run_distillation\.sh": "minutes: test_examples_wan_distill",
    r"(train_flow_matching|validate_multigpu)\.py": "minutes: tests/test_examples_wan_flow.py",
}

# Pattern of a command -> flags that shorten it.
SHORTER = {
    r"^unisono train .*--inject": "",
    r"^unisono train wan-flow": "--max_steps 1 --num_shapes 16 --preview_every -1 --eval_every -1",
    r"^unisono train clips": "--max_steps 2",
    r"^unisono train(?!.*(--help|--print_config))": "--max_steps 2",
    r"^unisono verify wan-flow": "--steps 1 --num_shapes 16 --eval_every -1",
    r"^unisono verify": "--steps 1",
    r"^unisono tune": "--trials 1 --max_steps 2",
    r"^unisono bench": "--rounds 1 --steps 1 --warmup 2",
    r"^unisono federate": "--rounds 1 --local_steps 2 --clients 1",
}
# Documents whose commands take long nevertheless, or are the same as in another document.
SLOW = (
    "docs/benchmarks.md",
    "docs/clips.md",
    "docs/clusters.md",
    "docs/darkroom.md",
    "docs/faults.md",
    "docs/federate.md",
    "docs/own_model.md",
    "docs/profile.md",
    "docs/verify.md",
    "docs/watch.md",
    "docs/wan.md",
    "examples/own_model/README.md",
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str

    def commands(self) -> list[str]:
        """The commands without comments and prompts, one line each."""
        text = self.text.replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines()]
        if self.language == "console":  # lines without a prompt are output
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        without_comments = (" ".join(re.sub(r"(^|\s)#\s.*", "", line).split()) for line in lines)
        return [line.replace(".venv/bin/", "") for line in without_comments if line]


@cache
def blocks(document: str) -> list[Block]:
    """All fenced blocks of a document."""
    text = (ROOT / document).read_text()
    return [
        Block(document, text[: match.start()].count("\n") + 1, match[2], textwrap.dedent(match[3]))
        for match in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    ]


def commands(document: str) -> list[str]:
    return [line for block in blocks(document) if block.language in SHELL for line in block.commands()]


def reason(command: str) -> str | None:
    """Why a command is not run, or None if it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


def runnable(document: str) -> list[str]:
    return [command for command in commands(document) if reason(command) is None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like the reader's: the examples and a recipe of their own."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for programs in ("benchmarks", "release"):
        (tmp_path / programs).symlink_to(ROOT / programs)
    example = (ROOT / "examples/own_model/recipe.py").read_text()
    (tmp_path / "my_file.py").write_text(f"{example}\n\n{own_model()}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def own_model() -> str:
    """The recipe of docs/own_model.md with a dataset, which the page leaves to the reader."""
    code = next(block.text for block in blocks("docs/own_model.md") if "class MyRecipe" in block.text)
    data = """
import torch


class MyDataset(torch.utils.data.TensorDataset):
    def __init__(self, split):
        super().__init__(torch.ones(128, 28, 28), torch.arange(128) % 10)
"""
    adapter = next(block.text for block in blocks("docs/own_model.md") if "class MyAdapter" in block.text)
    return code.removeprefix("from __future__ import annotations\n") + data + f"\n\n{adapter}"


def test_commands_are_extracted_from_every_kind_of_block() -> None:
    printed = [command for document in DOCUMENTS for command in commands(document)]
    assert len(printed) > 200 and sum(reason(command) is None for command in printed) > 20
    text = "$ unisono train a.py:A \\\n   --nproc 2   # two ranks\nprinted\n$ .venv/bin/unisono gpus"
    assert Block("", 1, "console", text).commands() == ["unisono train a.py:A --nproc 2", "unisono gpus"]


def test_no_command_is_in_a_block_without_a_language() -> None:
    programs = r"unisono|python|torchrun|make|pip|accelerate|srun|sbatch|mpirun|\./\S+"
    program = re.compile(rf"^ *(\$ )?({programs}) ", re.MULTILINE)
    hidden = [
        (document, block.line)
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language not in (*SHELL, *PYTHON) and program.search(block.text)
    ]
    assert hidden == [], "label the block as bash or console, so that its commands are tested"


def test_every_command_is_run_or_listed_with_a_reason() -> None:
    programs = ("unisono ", "python ", "torchrun ")
    unlisted = [
        (document, command)
        for document in DOCUMENTS
        for command in runnable(document)
        if not command.startswith(programs)
    ]
    assert unlisted == [], "neither run by this test nor listed in NOT_RUN with a reason"


def test_every_reason_is_needed() -> None:
    printed = [command for document in DOCUMENTS for command in commands(document)]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, command) for command in printed)] == []


def start_folder(document: str) -> str:
    """Where the commands of a document start: a guide of an example in its folder, other documents at the root."""
    parts = Path(document).parts
    return "/".join(parts[:2]) if parts[0] == "examples" and parts[-1] != "README.md" else "."


def run(command: str) -> Ended:
    """Runs a shortened command in the current folder."""
    more = next((flags for pattern, flags in SHORTER.items() if re.search(pattern, command)), "")
    program, *words = shlex.split(f"{command} {more}")
    if program == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
    elif program == "unisono":
        words = ["-m", "unisono", *words]
    return end(start(words, cwd=Path.cwd()))


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, marks=pytest.mark.slow) if document in SLOW else document
        for document in DOCUMENTS
        if runnable(document)
    ],
)
@pytest.mark.timeout(900)  # several commands, seconds each on an idle machine
def test_the_commands_of_a_document_run(document: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place / start_folder(document))
    for command in commands(document):
        if command.startswith("cd "):
            monkeypatch.chdir(place / command.removeprefix("cd "))
        if reason(command) is None:
            ended = run(command)
            assert ended.code == 0, f"{document}: {command}\n{ended.err}"


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if commands(document)])
def test_the_flags_and_files_of_commands_that_are_not_run_exist(
    document: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place / start_folder(document))
    last = ""
    for command in commands(document):
        if command.startswith("cd "):
            monkeypatch.chdir(place / command.removeprefix("cd "))
        if command.startswith("--"):  # flags of the preceding command
            command = f"{last} {command}"
        elif "unisono train" in command:
            last = re.sub(r" --inject \S+", "", command)
        if reason(command) is not None:
            check(command, capfd)


WITH_SETTINGS = {"verify", "slurm", "plan", "tune", "federate", "bench", "k8s", "skypilot"}


def check(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The settings of a run can be resolved, and the flags of other commands are in their help."""
    words = shlex.split(command)
    if "unisono" not in words:
        check_script(words)
        return
    words = words[words.index("unisono") + 1 :]
    if words[0] == "train":
        code = main([*words, "--print_config"])
        assert code == 0, f"{command}\n{capfd.readouterr().err}"
        return
    assert words[0] in COMMANDS, command
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    name = " ".join(words[:2]) if words[:2] == ["slurm", "tune"] else words[0]
    described = help_of(name)
    if words[0] in WITH_SETTINGS:  # all settings of train, of this recipe
        assert main(["train", words[len(name.split())], "--help"]) == 0, command
        described += capfd.readouterr().out
    missing = {
        flag
        for flag in flags
        if flag not in described and flag.replace("-", "_").replace("__", "--", 1) not in described
    }
    assert not missing, f"{command}: {missing}"


@cache
def help_of(command: str) -> str:
    ended = unisono(*command.split(), "--help", cwd=ROOT)
    assert ended.code == 0, ended.err
    return ended.out


def check_script(words: list[str]) -> None:
    """The files of a command exist, its script is executable if it has to be, and defines the flags of a benchmark."""
    for word in words:
        if word.startswith("--") and words[1].startswith("benchmarks/"):
            source = (ROOT / words[1]).read_text()
            assert word == "--" or f'"{word}"' in source, f"{' '.join(words)}: {word} is not a flag of {words[1]}"
            if word == "--":  # flags of `unisono train` follow
                return
        if re.fullmatch(r"(\./)?[\w/]+\.(py|sh|slurm|yaml|json)", word) and not word.startswith(("my_", "look")):
            assert Path(word).exists(), f"{' '.join(words)}: {word} is not in {Path.cwd().name}"
            assert not words[0].startswith("./") or os.access(words[0], os.X_OK)


@pytest.mark.parametrize(
    "wrong",
    [
        "unisono train wan-flow --gpus all --no_such_flag 3",
        "unisono train darkroom --gpus 2 --tf_n_layer many",
        "unisono train no_such_file.py:TwoMoons --gpus all",
        "unisono slurm darkroom --no_such_flag",
        "unisono no_such_command --gpus all",
        "python no_such_script.py",
        "python benchmarks/overhead.py --no_such_flag",
        "./examples/darkroom/train.py",
    ],
)
def test_a_wrong_command_that_is_not_run_is_an_error(
    wrong: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        check(wrong, capfd)


def test_a_wrong_command_that_is_run_is_an_error(place: Path) -> None:
    assert run("unisono train examples/own_model/recipe.py:ThreeMoons").code != 0
    assert run("unisono verify my_file.py:TwoMoons --ranks 1,x").code != 0


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_can_be_compiled(document: str) -> None:
    for block in blocks(document):
        if block.language in PYTHON:
            inside = "def reader():\n" + textwrap.indent(block.text, "    ")  # `return …` alone is a part of a function
            try:
                ast.parse(inside)
            except SyntaxError as error:
                raise AssertionError(f"{document}, line {block.line + (error.lineno or 1) - 1}: {error.msg}") from None


def test_the_function_for_custom_features_works_as_printed() -> None:
    np = pytest.importorskip("numpy")
    code = next(block.text for block in blocks("docs/clips.md") if "def brightness" in block.text)
    names: dict[str, object] = {}
    exec(compile(code, "docs/clips.md", "exec"), names)
    brightness = names["brightness"]
    assert callable(brightness)
    features = brightness(np.full((3, 4, 8, 8, 3), 255, np.uint8), np.zeros((3, 100), np.float32), 16000)
    assert features.shape == (3, 12) and features.max() == 1.0
