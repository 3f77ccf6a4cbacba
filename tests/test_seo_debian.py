"""seo on real text, in a reduced form of benchmarks/seo.py: MiniLM learns from descriptions of Debian's packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from command_line import unisono
from unisono.errors import ConfigError
from unisono.recipes.seo.data.ranking_sets.debian import packages

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="the descriptions come from apt-get")


@pytest.mark.slow  # test_a_trained_model_ranks_better_than_word_overlap is the quick version
def test_minilm_learns_from_a_few_hundred_packages(tmp_path: Path) -> None:
    try:
        result = packages(tmp_path / "apt")
    except ConfigError as error:
        pytest.skip(f"apt-get has no descriptions here: {error}")
    # All from one section, so that they are similar and there is something to learn; pages are truncated for speed.
    perl = [package for package in result if package.section == "perl"][:500]
    rows = [json.dumps({"query": each.synopsis, "positive": each.body}) + "\n" for each in perl]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    words = ["train", "seo", "--data_path", "pairs.jsonl", "--model_name", "minilm", "--nproc", "2"]
    words += ["--batch_size", "16", "--max_length", "40", "--query_length", "24", "--num_eval", "100"]
    words += ["--num_workers", "0", "--warmup_steps", "4"]
    measured = {}
    for steps, rate in ((1, "1e-12"), (20, "1e-4")):
        flags = ["--max_steps", str(steps), "--learning_rate", rate, "--output_dir", f"run{steps}"]
        ended = unisono(*words, *flags, cwd=tmp_path)
        assert ended.code == 0, ended.err
        lines = [json.loads(line) for line in (tmp_path / f"run{steps}/metrics.jsonl").read_text().splitlines()]
        measured[steps] = lines[-1]
    before, after = measured[1], measured[20]
    assert before["eval/MRR@10_random"] < 0.1 < 0.5 < before["eval/MRR@10"]
    assert after["eval/MRR@10"] > before["eval/MRR@10"] + 0.02
