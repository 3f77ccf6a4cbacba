"""unisono clips VIDEO ... --run RUN: finds the moments worth cutting out, and cuts them."""

from __future__ import annotations

import argparse
import json
import math
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unisono.cli.device import usable_device
from unisono.errors import EXIT_DONE, EXIT_USER_ERROR, ConfigError, UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unisono.recipes.clips.cutting import Cut
    from unisono.recipes.clips.damage import Damage
    from unisono.recipes.clips.footage import Footage
    from unisono.recipes.clips.moments import Moment


class Scored(Protocol):
    """What a scorer gives: the score of each clip of a video, and what it has found the video to be."""

    @property
    def scores(self) -> NDArray[np.floating[Any]]: ...
    @property
    def clip_seconds(self) -> float: ...
    @property
    def duration(self) -> float: ...
    @property
    def has_sound(self) -> bool: ...
    @property
    def damage(self) -> Damage | None: ...


Scorer = Callable[[Path], Scored]


def main(words: list[str], scorer: Scorer | None = None) -> int:
    """Runs the command; whoever passes a scorer needs no run."""
    options = _options(words, needs_run=scorer is None)
    folders = _folders(options.videos, options.output_dir)
    aspect = None
    if options.crop is not None:
        from unisono.recipes.clips.crop import parse_aspect

        aspect = parse_aspect(options.crop)
    judged_by = str(options.run) if options.run else ""
    if scorer is None:
        scorer, weights = _trained(options)
        judged_by = f"{judged_by}, {weights}"
    failed = 0
    for video, folder in folders.items():
        try:
            print(_clip(video, folder, scorer, options, aspect, judged_by))
        except UserError as error:
            if len(folders) == 1:
                raise
            failed += 1  # the others are made all the same
            print(f"unisono: {error}", file=sys.stderr)
    return EXIT_USER_ERROR if failed else EXIT_DONE


def _options(words: list[str], *, needs_run: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="unisono clips",
        description="Score videos by what a run of the recipe `clips` has learnt, and cut out the best moments. Each "
        "video gets a folder with the clips, clips.json (scores and times) and a page to look at them.",
    )
    parser.add_argument("videos", type=Path, nargs="+", metavar="VIDEO", help="the videos")
    parser.add_argument("--run", type=Path, required=needs_run, help="the run's folder")
    parser.add_argument("--output_dir", type=Path, default=Path("clips"), help="where to write (default: clips)")
    parser.add_argument("--num_clips", type=int, default=5, help="at most so many of each video (default: 5)")
    parser.add_argument(
        "--lowest_score", type=float, help="cut no clip that scores below this, 0 to 1 (default: none is too low)"
    )
    parser.add_argument("--shortest", type=float, default=4.0, help="seconds (default: 4)")
    parser.add_argument("--longest", type=float, default=60.0, help="seconds (default: 60)")
    parser.add_argument("--gap", type=float, default=2.0, help="seconds between two clips, at least (default: 2)")
    parser.add_argument(
        "--snap",
        type=float,
        default=1.0,
        help="move ends to a cut or a pause this near, seconds; 0: never (default: 1)",
    )
    parser.add_argument("--exact", action="store_true", help="exact ends: encode anew (H.264, AAC) instead of copying")
    parser.add_argument("--crop", metavar="W:H", help="a shape like 9:16, following what moves; means --exact")
    parser.add_argument(
        "--page", action=argparse.BooleanOptionalAction, default=True, help="an HTML page (default: yes)"
    )
    parser.add_argument("--step", help="a step number of the run, newest (default) or best")
    parser.add_argument("--weights", choices=["auto", "ema", "model"], default="auto", help="as in unisono export")
    parser.add_argument("--recipe", help="file.py:Class, if the recipe has moved since the run")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1")
    options = parser.parse_args([_underscored(word) for word in words])
    _check(options)
    return options


def _underscored(word: str) -> str:
    """Hyphens and underscores are the same in a flag's name; argparse itself makes --no-page."""
    if not word.startswith("--"):
        return word
    name, has_value, value = word.partition("=")
    name = "--" + name[2:].replace("-", "_")
    return ("--no-page" if name == "--no_page" else name) + has_value + value


def _check(options: argparse.Namespace) -> None:
    if options.num_clips < 1:
        raise ConfigError(f"--num_clips {options.num_clips}: expected at least 1")
    if not 0 < options.shortest <= options.longest < math.inf:
        raise ConfigError(
            f"--shortest {options.shortest:g} --longest {options.longest:g}: expected 0 < shortest ≤ longest (seconds)"
        )
    if options.lowest_score is not None and not 0 <= options.lowest_score <= 1:
        raise ConfigError(f"--lowest_score {options.lowest_score:g}: expected a score, from 0 to 1")
    for name in ("gap", "snap"):
        if not 0 <= getattr(options, name) < math.inf:
            raise ConfigError(f"--{name} {getattr(options, name):g}: expected 0 or more seconds")


def _folders(videos: Sequence[Path], output_dir: Path) -> dict[Path, Path]:
    """A new folder for each video; said before hours of scoring that one cannot be used."""
    folders: dict[Path, Path] = {}
    for video in videos:
        if video.is_dir():
            raise ConfigError(f"{video} is a folder; give its videos, e.g. {video / '*.mp4'}")
        if not video.is_file():
            raise ConfigError(f"{video}: there is no such file")
        folder = output_dir / (video.stem or video.name)
        if folder in folders.values():
            raise ConfigError(f"two videos are called {video.stem}; run them with an --output_dir each")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} is not an empty folder; nothing there is overwritten: use another --output_dir"
            )
        folders[video] = folder
    return folders


def _trained(options: argparse.Namespace) -> tuple[Scorer, str]:
    from unisono.engine.export import load_trained

    device = usable_device(options.device)
    _check_run(options)
    recipe, model, weights = load_trained(options.run, step=options.step, weights=options.weights, words=options.recipe)
    from unisono.recipes.clips.model import Scorer as Model
    from unisono.recipes.clips.recipe import Clips
    from unisono.recipes.clips.scoring import score

    if not isinstance(recipe, Clips) or not isinstance(model, Model):
        raise ConfigError(
            f"{options.run} is a run of {type(recipe).__name__}, which judges no videos; give one of clips"
        )
    model = model.to(device)
    return (lambda video: score(recipe, model, video, device)), weights


def _check_run(options: argparse.Namespace) -> None:
    """Refuses a run of another recipe and a step that it has not, before anything is loaded."""
    from unisono.checkpoint.find import list_steps
    from unisono.engine.registry import BUILT_IN
    from unisono.observe.folder import RunFolder

    record = RunFolder.read(options.run)
    words = str((record or {}).get("recipe_from"))
    others = {where: name for name, where in BUILT_IN.items() if name != "clips"}
    if words in others and not options.recipe:
        raise ConfigError(f"{options.run} is a run of {others[words]}, which judges no videos; give one of clips")
    steps = [step for step, _ in list_steps(options.run / "checkpoints")]
    if record and steps and options.step and options.step.isdigit() and int(options.step) not in steps:
        there = ", ".join(map(str, steps))
        raise ConfigError(f"--step {options.step}: {options.run} has no such step; it has {there} (or newest, best)")


def _clip(
    video: Path, folder: Path, scorer: Scorer, options: argparse.Namespace, aspect: float | None, judged_by: str
) -> str:
    """Everything for one video; says what was done."""
    from unisono.recipes.clips.edges import edges_around, snap
    from unisono.recipes.clips.footage import Footage
    from unisono.recipes.clips.moments import pick
    from unisono.recipes.clips.page import write_page
    from unisono.recipes.clips.remarks import summary
    from unisono.recipes.common.bad_files import BadMedia

    began = time.monotonic()
    try:
        footage = Footage(video)
        scored = scorer(video)
        seconds = time.monotonic() - began
        # Who has read all of it knows better than the header how long it is.
        footage.duration = scored.duration
        lengths = {"shortest": options.shortest, "longest": options.longest}
        found = pick(
            scored.scores,
            scored.clip_seconds,
            number=options.num_clips,
            gap=options.gap,
            duration=footage.duration,
            **lengths,
        )
        lowest = -math.inf if options.lowest_score is None else options.lowest_score
        moments = [moment for moment in found if moment.score >= lowest]
        remarks = _remarks(scored, found, moments, options)
        for remark in remarks:
            print(f"unisono: {video}: {remark}", file=sys.stderr)
        if options.snap:
            moments = snap(moments, edges_around(footage, moments, options.snap), options.snap, **lengths)
        with _all_or_nothing(folder) as making:
            clips = [
                (moment, _cut(footage, moment, number, making, options, aspect))
                for number, moment in enumerate(moments, 1)
            ]
            _write_json(making / "clips.json", footage, scored, clips, judged_by, remarks)
            if options.page:
                page = making / "page.html"
                write_page(page, footage, scored.scores, scored.clip_seconds, clips, judged_by, remarks)
    except BadMedia as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror or error}); use another --output_dir") from None
    return f"{folder}: {summary(clips, footage.duration, seconds)}"


def _remarks(
    scored: Scored, found: Sequence[Moment], moments: Sequence[Moment], options: argparse.Namespace
) -> list[str]:
    """What is worth a word about a video, the moments found in it and those that are cut."""
    from unisono.recipes.clips.remarks import about_length, about_lowest, about_scores

    remarks = [
        str(scored.damage) if scored.damage else "",
        "" if scored.has_sound else "no sound was found: it is judged by its pictures alone",
        about_scores(scored.scores),
        about_length(scored.duration, options.shortest, moments),
        about_lowest(found, options.lowest_score),
    ]
    return [remark for remark in remarks if remark]


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder beside the wanted one, which becomes it when all is in it; the same relative links lead out of both."""
    making = folder.with_name(f".{folder.name[:100]}.{secrets.token_hex(4)}")
    making.mkdir(parents=True)
    try:
        yield making
        making.rename(folder)  # over an empty folder, but over nothing else
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _cut(
    footage: Footage, moment: Moment, number: int, folder: Path, options: argparse.Namespace, aspect: float | None
) -> Cut:
    from unisono.recipes.clips.crop import follow
    from unisono.recipes.clips.cutting import cut

    at = int(moment.start)
    name = f"{number:02}_{at // 3600:02}h{at // 60 % 60:02}m{at % 60:02}s.mp4"
    crop = follow(footage, moment, aspect) if aspect is not None else None
    return cut(footage, moment, folder / name, exact=options.exact, crop=crop)


def _write_json(
    to: Path,
    footage: Footage,
    scored: Scored,
    clips: Sequence[tuple[Moment, Cut]],
    judged_by: str,
    remarks: Sequence[str],
) -> None:
    from unisono.recipes.clips.remarks import about_scores

    content = {
        "video": footage.path.name,
        "duration": round(footage.duration, 3),
        "judged_by": judged_by,
        "damage": scored.damage.to_json() if scored.damage else None,
        "remarks": remarks,
        "nothing_stands_out": bool(about_scores(scored.scores)),
        "clip_seconds": scored.clip_seconds,
        "scores": [round(float(score), 5) if math.isfinite(score) else None for score in scored.scores],
        "clips": [
            {
                "start": round(moment.start, 3),
                "end": round(moment.end, 3),
                "score": round(moment.score, 5),
                "file": cut.path.name,
                "file_start": round(cut.start, 3),
                "file_end": round(cut.end, 3),
            }
            for moment, cut in clips
        ],
    }
    with to.open("x", encoding="utf-8", errors="replace") as file:
        json.dump(content, file, indent=2, ensure_ascii=False, allow_nan=False)
