"""Measures how well a language model learns which page answers a query, and its speed next to sentence-transformers.

    python benchmarks/seo.py learning              # Debian's package descriptions: MiniLM, fine-tuned, plain and hard
    python benchmarks/seo.py speed                 # the same pairs and steps with sentence-transformers' trainer
    python benchmarks/seo.py speed --quick --output /tmp/x     # smoke test with few steps; the numbers mean nothing

learning: every run is a plain `unisono train seo`. 1,000 queries are held out, and their pages are the candidates. The
baselines are random order, TF-IDF, BM25 and the model before fine-tuning. `hard`: all candidates are from one section,
and the words that a query shares with its page are removed from the page.

speed: unisono and the other trainer take turns, each in its own process. The results are samples per second after the
first steps, and the MRR@10 of both after the same number of steps.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import depends_on
from parts import ROOT, Parts, Row, unisono, verdict

sys.path.insert(0, str(ROOT / "src"))
PARTS = Parts("seo", ["torch", "transformers", "sentence-transformers"])
BARS = {"MRR@10": 0.93, "minutes_cpu": 30.0, "minutes_gpu": 2.0, "times_cpu": 1.0, "times_gpu": 1.5}


def devices() -> list[str]:
    """The device flags of a run: one GPU if there is any, otherwise two processes on the CPU."""
    import torch

    return ["--gpus", "1", "--mixed_precision", "bf16"] if torch.cuda.is_available() else ["--nproc", "2"]


def suffix() -> str:
    """Suffix of the result files: separate files for GPU and CPU."""
    import torch

    return "_cuda" if torch.cuda.is_available() else "_cpu"


def lines_of(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def learned(folder: Path) -> Row:
    """Metrics of the last evaluation of a run, and its step times."""
    lines = lines_of(folder)
    last = [line for line in lines if "eval/MRR@10" in line][-1]
    times = [line["step_ms"] for line in lines if "step_ms" in line]
    metrics = {name.removeprefix("eval/"): value for name, value in last.items() if name.startswith("eval/")}
    return {"measures": metrics, "steps": last["step"], "training_s": statistics.mean(times) * last["step"] / 1e3}


def measured(model: str, run: Path) -> Row:
    """Evaluates a model without fine-tuning on the held-out queries and candidates of a run."""
    import torch

    from unisono.engine.export import load_trained
    from unisono.recipes.seo.metrics.ranking import TopPages
    from unisono.recipes.seo.trained import open_ranker

    task = load_trained(run)[0].task  # type: ignore[attr-defined]
    queries, pages = task.held_out_texts()
    matching = task.matching("eval")
    ranker = open_ranker(model)
    ranker.config.max_length, ranker.config.query_length = 256, 64
    ranker.to("cuda" if torch.cuda.is_available() else "cpu")
    top = TopPages(matching.judged(), len(queries))
    top.update(ranker.scores(queries, pages), torch.from_numpy(matching.candidates.astype("int64")))
    return top.compute()


def learning(options: argparse.Namespace, place: Path) -> Row:
    result = PARTS.begin("learning", options, suffix())
    cache = Path(options.cache).expanduser() if options.cache else place / "cache"
    forms = {"plain": [], "hard": ["--hard_candidates"]}
    result["rows"] = {name: {"failed": "not run"} for name in forms}
    before = options.output / f"{result['file']}.json"
    if options.keep and before.exists():
        result["rows"] |= {name: row for name, row in json.loads(before.read_text())["rows"].items() if name in forms}
    for name, flags in forms.items():
        if name not in options.forms.split(","):
            continue
        folder, began = place / name, time.monotonic()
        words = ["train", "seo", "--data_path", "debian", "--model_name", "minilm", *devices(), *flags]
        long = ["--max_steps", str(options.max_steps)] if options.max_steps else ["--num_epochs", options.epochs]
        words += [*long, "--global_batch_size", options.batch, "--eval_every", "0"]
        words += ["--max_steps", "3", "--num_eval", "40"] if options.quick else ["--num_eval", "1000"]
        command = shlex.join(["unisono", *words])
        failed = unisono([*words, "--cache_dir", str(cache), "--output_dir", str(folder)], options.patience_s)
        row: Row = {"failed": failed, "command": command, "wall_s": time.monotonic() - began}
        if not failed:
            row |= learned(folder) | {"before": measured("minilm", folder)}
        result["rows"][name] = row
        PARTS.write(result, options)
        print(time.strftime("%H:%M:%S"), name, failed or "done", flush=True)
    return result


def speed(options: argparse.Namespace, place: Path) -> Row:
    import torch

    from unisono.recipes.seo.models.folders import locate

    result = PARTS.begin("speed", options, suffix())
    cuda = torch.cuda.is_available()
    cache = Path(options.cache).expanduser() if options.cache else place / "cache"
    pairs = write_pairs(place / "pairs.jsonl", cache, 200 if options.quick else None)
    steps = 12 if options.quick else options.steps
    rows: Row = {"unisono": {"rates": []}, "sentence-transformers": {"rates": []}}
    result |= {"rows": rows, "steps": steps, "batch": options.batch, "cuda": cuda}
    common = ["--num_eval", "100" if options.quick else "1000", "--cache_dir", str(place / "tokens")]
    for number in range(options.rounds):
        folder = place / f"ours{number}"
        words = ["train", "seo", "--data_path", str(pairs), "--model_name", "minilm", "--max_steps", str(steps)]
        words += ["--batch_size", options.batch, "--warmup_steps", "50", "--learning_rate", "5e-5", "--log_every", "1"]
        words += ["--eval_every", "0", "--gpus", "1", "--mixed_precision", "bf16"] if cuda else ["--eval_every", "0"]
        failed = unisono([*words, *common, "--output_dir", str(folder)], options.patience_s)
        if failed:
            rows["unisono"]["failed"] = failed
            break
        times = [line["step_ms"] for line in lines_of(folder) if "step_ms" in line][5:]
        rows["unisono"]["rates"].append(int(options.batch) * len(times) / sum(times) * 1e3)
        rows["unisono"]["measures"] = learned(folder)["measures"]
        trained = place / f"usual{number}"
        usual = str(ROOT / "benchmarks" / "seo_usual.py")
        command = [sys.executable, usual, "--pairs", str(left_of(pairs, folder)), "--model", str(locate("minilm"))]
        command += ["--batch", options.batch, "--steps", str(steps), "--output", str(trained)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=options.patience_s)
        if ended.returncode:
            rows["sentence-transformers"]["failed"] = (ended.stderr.strip().splitlines() or ["no word"])[-1][:300]
            break
        rows["sentence-transformers"]["rates"].append(json.loads(ended.stdout.splitlines()[-1])["samples_per_s"])
        rows["sentence-transformers"]["measures"] = measured(str(trained), folder)
        PARTS.write(result, options)
        print(time.strftime("%H:%M:%S"), {name: row["rates"] for name, row in rows.items()}, flush=True)
    return result


def write_pairs(file: Path, cache: Path, most: int | None) -> Path:
    """Writes queries and pages to a file that both trainers read."""
    from unisono.recipes.seo.data.ranking_sets.debian import packages

    chosen = packages(cache)[:most]
    lines = [json.dumps({"query": each.synopsis, "positive": each.body}) + "\n" for each in chosen]
    file.write_text("".join(lines))
    return file


def left_of(pairs: Path, run: Path) -> Path:
    """The training pairs of a run, without the held-out pairs."""
    from unisono.recipes.seo.data.ranking_sets.ranking import read_ranking
    from unisono.recipes.seo.tasks.matching import load

    data, train = read_ranking(pairs), load(run / "prepared", "train")
    queries, pages = [text for _, text in data.queries()], [text for _, text in data.pages()]
    file = run / "left.jsonl"
    with file.open("w") as out:
        for place, query in enumerate(train.queries.tolist()):
            for page in train.relevant_for(place).tolist():
                out.write(json.dumps({"query": queries[query], "positive": pages[page]}) + "\n")
    return file


def learning_page(result: Row) -> list[str]:
    lines = ["# seo: which page answers a query", "", *depends_on(result), ""]
    lines += [
        "Debian's package descriptions: a package's summary line is the query, its description the page; 1,000 "
        "held-out",
        "queries, 1,000 candidates. `hard`: all from one section, words shared with the query removed.",
        "",
        "| form | random | TF-IDF | BM25 | MiniLM, pretrained | MiniLM, fine-tuned | NDCG@10 | Recall@10 | steps | "
        "training | process |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        if row.get("failed"):
            lines.append(f"| {name} | {row['failed']} |" + " |" * 9)
            continue
        metrics, before = row["measures"], row["before"]
        baselines = " | ".join(f"{metrics[f'MRR@10_{line}']:.3f}" for line in ("random", "tfidf", "bm25"))
        lines.append(
            f"| {name} | {baselines} | {before['MRR@10']:.3f} | **{metrics['MRR@10']:.3f}** | "
            f"{metrics['NDCG@10']:.3f} | {metrics['Recall@10']:.3f} | {row['steps']} | {row['training_s']:.0f} s | "
            f"{row['wall_s']:.0f} s |"
        )
    lines += ["", "The columns before NDCG@10 are MRR@10.", ""]
    plain, minutes = result["rows"]["plain"], BARS["minutes_gpu" if result["machine"]["gpus"] else "minutes_cpu"]
    if not plain.get("failed") and not result["quick"]:
        mrr = plain["measures"]["MRR@10"]
        lines += [f"- MRR@10 of plain: {mrr:.3f}, target at least {BARS['MRR@10']}: {verdict(mrr >= BARS['MRR@10'])}"]
        lines += [
            f"- time of the process: {plain['wall_s'] / 60:.1f} minutes, target at most {minutes:.0f}: "
            f"{verdict(plain['wall_s'] <= 60 * minutes)}"
        ]
    return lines


def speed_page(result: Row) -> list[str]:
    lines = [
        "# seo: speed compared with sentence-transformers' trainer, same pairs and steps",
        "",
        *depends_on(result),
        "",
    ]
    lines += ["| | samples/s (each round) | median | MRR@10 after these steps |", "|---|---|---|---|"]
    middle = {}
    for name, row in result["rows"].items():
        rates = row.get("rates") or [0.0]
        middle[name] = statistics.median(rates)
        cell = row.get("failed") or ", ".join(f"{rate:.1f}" for rate in rates)
        lines.append(f"| {name} | {cell} | {middle[name]:.1f} | {row.get('measures', {}).get('MRR@10', 0):.4f} |")
    if middle.get("sentence-transformers"):
        ratios = [a / b for a, b in zip(*(result["rows"][name]["rates"] for name in middle), strict=False)]
        bar = BARS["times_gpu" if result["cuda"] else "times_cpu"]
        lines += ["", f"Ratio of each round: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; median "]
        lines[-1] += f"**{statistics.median(ratios):.3f} ×**. Batch {result['batch']}, {result['steps']} steps."
        ours, theirs = (result["rows"][name]["measures"]["MRR@10"] for name in middle)
        speed_up = statistics.median(ratios)
        lines += ["", f"- speed-up: {speed_up:.2f} ×, target at least {bar} ×: {verdict(speed_up >= bar)}"]
        is_met = verdict(ours >= theirs - 0.005)
        lines += [f"- difference of MRR@10: {ours - theirs:+.3f}, target at most 0.005 lower: {is_met}"]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", help="folder of debian-packages.jsonl.gz, which is created if it does not exist")
    parser.add_argument("--epochs", default="2", help="learning")
    parser.add_argument("--max_steps", type=int, help="learning: number of steps, instead of epochs")
    parser.add_argument("--forms", default="plain,hard", help="learning")
    parser.add_argument("--keep", action="store_true", help="learning: keep the results of other forms in --output")
    parser.add_argument("--batch", default="64", help="samples per step")
    parser.add_argument("--steps", type=int, default=60, help="speed")
    parser.add_argument("--rounds", type=int, default=3, help="speed")
    parser.add_argument("--patience_s", type=float, default=3600)
    return PARTS.main(parser, {"learning": (learning, learning_page), "speed": (speed, speed_page)})


if __name__ == "__main__":
    sys.exit(main())
