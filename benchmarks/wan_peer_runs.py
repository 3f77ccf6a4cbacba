"""Runs the processes of benchmarks/wan_peer.py, with the flags and the environment of each program."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wan_peer_files import place_for_weights, write_unisono_data
from wan_peer_variants import LORA_RANK, MODELS, MUSUBI, SHAPE, TINY_MODELS, TINY_SHAPE, UNISONO, Model, Steps, Variant

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
Row = dict[str, Any]
OUT_OF_MEMORY = re.compile("CUDA out of memory|CUDA error: out of memory|OutOfMemoryError")
# So many blocks exist only in the real model; the flag before the number says what it counts.
BLOCK_COUNTS = ("--blocks_to_swap", "--blocks_on_host")


class Failed(Exception):
    """A process failed that the other runs need."""


@dataclass(frozen=True)
class Workplace:
    """Files and settings that all runs share."""

    work: Path
    weights: Path
    musubi: Path | None
    tiny: bool

    @classmethod
    def at(cls, work: Path, musubi: Path | None, tiny: bool) -> Workplace:
        """The usual places below `work`; a rehearsal has its own."""
        work = work.resolve() / ("tiny" if tiny else "real")
        return cls(work, work if tiny else place_for_weights(work), musubi and musubi.resolve(), tiny)

    @property
    def models(self) -> Mapping[str, Model]:
        return TINY_MODELS if self.tiny else MODELS

    def weights_file(self, model: str) -> Path:
        return self.weights / f"wan2.1-t2v-{model}-random.safetensors"

    def data(self, program: str) -> Path:
        return self.work / "data" / program

    def prepare(self, models: Sequence[str]) -> None:
        """Writes weights and data unless they exist."""
        for folder in (self.work / "logs", self.weights):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.work / "data", ignore_errors=True)
        write_unisono_data(self.data(UNISONO), TINY_SHAPE if self.tiny else SHAPE)
        specification = self._specification("prepare") | {
            "models": {str(self.weights_file(name)): asdict(self.models[name]) for name in models},
            "data": str(self.data(MUSUBI)),
        }
        code, _ = self.run(self._process(specification), UNISONO, self.work / "logs" / "prepare.log", 600)
        log = (self.work / "logs" / "prepare.log").read_text(errors="replace")
        if code:
            raise Failed(f"writing weights and data failed: {last_line(log)}")
        print(log.strip(), flush=True)

    def measure(self, variant: Variant, patience_s: float) -> Row:
        """One run of a variant."""
        words = self._words(variant)
        result, log = self.work / "result.json", self.work / "logs" / f"{_file_name(variant.name)}.log"
        result.unlink(missing_ok=True)
        shutil.rmtree(self._run_folder, ignore_errors=True)
        steps = self._steps(variant)
        specification = self._specification(variant.program) | asdict(steps) | {"words": words, "result": str(result)}
        specification |= {"cap_gib": variant.cap_gib}
        if self.tiny:
            specification["tiny"] = asdict(self.models[variant.model])
        code, seconds = self.run(self._process(specification), variant.program, log, patience_s)
        row: Row = json.loads(result.read_text()) if result.exists() else {"failed": f"ended with exit code {code}"}
        if code is None:
            row["failed"] = f"took more than {patience_s:.0f} s"
            # A compiler killed in the middle of a file must not disturb the next run.
            shutil.rmtree(self._compiled(variant.program), ignore_errors=True)
        text = log.read_text(errors="replace")
        if row["failed"]:
            if OUT_OF_MEMORY.search(text):
                row["failed"] = "out of memory"
            elif last_line(text) not in row["failed"]:
                row["failed"] += f"; last line: {last_line(text)}"
        if variant.program == UNISONO:
            row["losses"] = _losses(self._run_folder)
        shutil.rmtree(self._run_folder, ignore_errors=True)
        return row | {"command": self._shown(variant.program, words), "seconds": round(seconds, 1)}

    def run(
        self, words: Sequence[str], program: str, log: Path, patience_s: float, extra: Mapping[str, str] | None = None
    ) -> tuple[int | None, float]:
        """Exit code (None if the process took too long and was killed) and seconds."""
        started = time.monotonic()
        environment = self._environment(program) | dict(extra or {})
        with log.open("w") as out:
            process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code: int | None = process.wait(timeout=max(1.0, patience_s))
            except subprocess.TimeoutExpired:
                code = None
            finally:  # also its loader processes
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, time.monotonic() - started

    @property
    def _run_folder(self) -> Path:
        return self.work / "run"

    def _compiled(self, program: str) -> Path:
        return self.work / f"compiled-{program}"

    def _specification(self, program: str) -> dict[str, Any]:
        musubi = str(self.musubi) if self.musubi and program != UNISONO else None
        return {"program": program, "musubi": musubi, "stubs": str(self.work / "stubs"), "tiny": self.tiny}

    def _process(self, specification: Mapping[str, Any]) -> list[str]:
        file = self.work / "specification.json"
        file.write_text(json.dumps(specification))
        return [sys.executable, str(HERE / "wan_peer_process.py"), str(file)]

    def _steps(self, variant: Variant) -> Steps:
        return Steps(1, 2) if self.tiny else variant.steps

    def _words(self, variant: Variant) -> list[str]:
        words = self._musubi_words(variant) if variant.program == MUSUBI else self._unisono_words(variant)
        flags = list(variant.flags)
        if self.tiny:
            flags = ["2" if before in BLOCK_COUNTS else word for before, word in zip(["", *flags], flags, strict=False)]
        return [*words, *flags]

    def _musubi_words(self, variant: Variant) -> list[str]:
        steps = self._steps(variant).total + 2
        words = ["--task", self.models[variant.model].task, "--dit", str(self.weights_file(variant.model))]
        words += ["--dataset_config", str(self.data(MUSUBI) / "dataset.toml")]
        words += ["--sdpa", "--mixed_precision", "bf16", "--optimizer_type", "adamw", "--learning_rate", "1e-4"]
        words += ["--max_data_loader_n_workers", "2", "--persistent_data_loader_workers"]
        words += ["--network_module", "networks.lora_wan"]
        words += ["--network_dim", str(LORA_RANK), "--network_alpha", str(LORA_RANK)]
        words += ["--timestep_sampling", "shift", "--discrete_flow_shift", "3.0", "--max_train_steps", str(steps)]
        words += ["--cuda_allow_tf32", "--cuda_cudnn_benchmark", "--seed", "42"]
        return [*words, "--output_dir", str(self._run_folder), "--output_name", "lora"]

    def _unisono_words(self, variant: Variant) -> list[str]:
        steps = self._steps(variant).total + 2
        words = unisono_words(self.weights_file(variant.model), self.data(UNISONO), self._run_folder, steps)
        words += ["--batch_size", "1", "--learning_rate", "1e-4", "--seed", "42", "--eval_every", "-1"]
        return [*words, "--no_compile", "--num_workers", "0", "--gpus", "0"] if self.tiny else words

    def _environment(self, program: str) -> dict[str, str]:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self._compiled(program))
        environment["TRITON_CACHE_DIR"] = str(self._compiled(program) / "triton")
        if program == MUSUBI:  # as its documented `accelerate launch --num_cpu_threads_per_process 1` sets them
            environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}
        return environment

    def _shown(self, program: str, words: Sequence[str]) -> str:
        script = "wan_train_network.py" if program == MUSUBI else "unisono"
        text = shlex.join([script, *words])
        return text.replace(str(self.weights), "WEIGHTS").replace(str(self.work), "WORK")


def unisono_words(weights: Path, data: Path, run: Path, steps: int) -> list[str]:
    """`unisono train wan-flow` as all runs of the benchmark call it."""
    words = ["train", "wan-flow", "--model_path", str(weights), "--dataset_path", str(data), "--output_dir", str(run)]
    words += ["--lora_rank", str(LORA_RANK), "--shift", "3", "--warmup_steps", "0", "--max_steps", str(steps)]
    words += ["--max_restarts", "0"]
    # There is no text encoder for the empty caption, and no VAE for previews.
    return [*words, "--caption_dropout", "0", "--guidance", "1", "--preview_every", "-1", "--log_every", "1"]


def last_line(text: str) -> str:
    """The last line of a log, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "none"


def metrics(run: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics.jsonl."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "step_ms" in line]


def _file_name(name: str) -> str:
    return "_".join("".join(letter if letter.isalnum() or letter == "." else " " for letter in name).split())
