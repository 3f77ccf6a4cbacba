"""`unisono clips VIDEO ... [--run RUN]`: scores videos and cuts out the best moments."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.atomic_files import atomic_folder
from unisono.cli.arguments import Parser
from unisono.cli.device import usable_device
from unisono.errors import EXIT_DONE, EXIT_USER_ERROR, ConfigError, UserError
from unisono.formatting import plural
from unisono.observe.progress import progress
from unisono.observe.status_line import status_line

if TYPE_CHECKING:
    from unisono.recipes.clips.cutting.cut import Cut
    from unisono.recipes.clips.cutting.moments import Moment
    from unisono.recipes.clips.scoring import Scored
    from unisono.recipes.clips.trained import VideoScorer
    from unisono.recipes.clips.video.footage import Footage
    from unisono.recipes.clips.words.transcript import Transcript

_LONG_S = 120  # for videos longer than this many seconds, progress is shown even without a terminal


def main(argv: list[str], scorer: Callable[[Path], Any] | VideoScorer | None = None) -> int:
    """Runs the command; a caller may pass a scorer of its own."""
    options = _options(argv)
    from unisono.recipes.clips.page.output_folders import output_folders

    chosen = output_folders(options.videos, options.output_dir)
    if not chosen.folders:
        raise ConfigError(chosen.problems[0])
    aspect = None
    if options.crop is not None:
        from unisono.recipes.clips.cutting.crop import parse_aspect

        aspect = parse_aspect(options.crop)
    scorer = _scorer(options, scorer)
    for text in (*chosen.notes, *chosen.problems):
        print(f"unisono: {text}", file=sys.stderr)
    failed = len(chosen.problems)
    for video, folder in chosen.folders.items():
        try:
            print(_clip(video, folder, scorer, options, aspect))
        except UserError as error:
            if len(options.videos) == 1:
                raise
            failed += 1  # continue with the other videos
            print(f"unisono: {error}", file=sys.stderr)
    if failed:
        print(f"unisono: {failed} of {len(options.videos)} videos failed, for the reasons above", file=sys.stderr)
    return EXIT_USER_ERROR if failed else EXIT_DONE


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        "clips",
        "Score videos, and cut out the best moments. The scores come from a trained run of the recipe `clips` "
        "(--run), or from the built-in scorer. Each video gets a folder with its clips, clips.json (scores and times) "
        "and an HTML page that shows them.",
    )
    parser.add_argument("videos", type=Path, nargs="+", metavar="VIDEO", help="videos to cut")
    parser.add_argument(
        "--run",
        type=Path,
        metavar="RUN",
        help="folder of a trained run of the recipe `clips` (default: the built-in scorer, which measures speech, "
        "laughter, loudness, motion, scene cuts and faces, and needs no training)",
    )
    parser.add_argument(
        "--output_dir", type=Path, metavar="FOLDER", default=Path("clips"), help="output folder (default: clips)"
    )
    parser.add_argument(
        "--num_clips", type=int, metavar="N", default=5, help="maximum number of clips per video (default: 5)"
    )
    parser.add_argument(
        "--lowest_score",
        type=float,
        metavar="SCORE",
        help="skip moments with a score below this (0 to 1; 0 skips none; default: a tenth of the video's best "
        "score, or, if higher, others + (highlights - others) / 4, where highlights and others are the mean scores of "
        "highlights and of other clips in the run's evaluation)",
    )
    parser.add_argument(
        "--shortest", type=float, metavar="S", default=4.0, help="shortest clip, in seconds (default: 4)"
    )
    parser.add_argument(
        "--longest", type=float, metavar="S", default=60.0, help="longest clip, in seconds (default: 60)"
    )
    parser.add_argument(
        "--gap", type=float, metavar="S", default=2.0, help="shortest gap between two clips, in seconds (default: 2)"
    )
    parser.add_argument(
        "--snap",
        type=float,
        metavar="S",
        help="move each end of a clip to a scene cut or a pause that is at most this many seconds away; 0: never "
        "(default: the length of a scored segment, because scores do not locate a moment more precisely)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="cut at exact frames by re-encoding (H.264, AAC) instead of copying the streams",
    )
    parser.add_argument(
        "--crop",
        metavar="W:H",
        help="crop to this aspect ratio, for instance 9:16, with a window that follows motion; implies --exact",
    )
    parser.add_argument(
        "--height",
        type=int,
        metavar="PIXELS",
        help="height of the clips in pixels; implies --exact; 0: do not scale (default: the video's height; with "
        "--crop, the height at which a clip's longer side is as long as the video's, for instance 1080x1920 for 9:16 "
        "of a 1920x1080 video)",
    )
    parser.add_argument(
        "--transcript",
        metavar="FILE",
        default="auto",
        help="what is said in the video: an .srt or .vtt file, or whisper's .json. Clips begin and end with sentences, "
        "and get titles and captions. auto: a file next to the video with its name; none: no file (default: auto)",
    )
    parser.add_argument(
        "--query",
        metavar="TEXT",
        help='cut the parts in which this is talked about, for instance "the part about pricing", instead of those '
        "with the highest scores; needs a transcript",
    )
    parser.add_argument(
        "--page", action=argparse.BooleanOptionalAction, default=True, help="write an HTML page (default: yes)"
    )
    parser.add_checkpoint_arguments()
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default: auto)")
    options = parser.parse(argv)
    _check(options)
    if options.query is not None:
        if not options.query.strip():
            raise ConfigError("--query: expected a text")
        for name in ("run", "step", "recipe"):
            if getattr(options, name):
                raise ConfigError(
                    f"--{name}: --query finds moments by what is said, and uses no run; remove one of them"
                )
        if options.transcript == "none":
            raise ConfigError("--query searches the transcript; remove --transcript none")
    if options.transcript not in ("auto", "none") and len(options.videos) > 1:
        raise ConfigError("--transcript is for one video; put the files next to the videos, with their names")
    return options


def _check(options: argparse.Namespace) -> None:
    if options.num_clips < 1:
        raise ConfigError(f"--num_clips {options.num_clips}: expected at least 1")
    if not 0 < options.shortest <= options.longest < math.inf:
        raise ConfigError(
            f"--shortest {options.shortest:g} --longest {options.longest:g}: expected 0 < shortest ≤ longest (seconds)"
        )
    if options.lowest_score is not None and not 0 <= options.lowest_score <= 1:
        raise ConfigError(f"--lowest_score {options.lowest_score:g}: expected a score from 0 to 1")
    if options.height is not None and options.height != 0 and not 16 <= options.height <= 8640:
        raise ConfigError(f"--height {options.height}: expected 16 to 8640 pixels, or 0 for the video's own")
    for name in ("gap", "snap"):
        if getattr(options, name) is not None and not 0 <= getattr(options, name) < math.inf:
            raise ConfigError(f"--{name} {getattr(options, name):g}: expected 0 or more seconds")


def _scorer(options: argparse.Namespace, scorer: Callable[[Path], Any] | VideoScorer | None) -> VideoScorer:
    from unisono.recipes.clips.trained import VideoScorer, load_scorer

    if scorer is not None:
        if isinstance(scorer, VideoScorer):
            return scorer
        return VideoScorer(lambda video, progress: scorer(video), str(options.run) if options.run else "")
    if options.query is not None:
        return _search(options)
    if options.run is None:
        return _built_in(options)
    device = usable_device(options.device)
    _check_run(options)
    return load_scorer(
        options.run, step=options.step, weights=options.weights, recipe_from=options.recipe, device=device
    )


def _search(options: argparse.Namespace) -> VideoScorer:
    """Returns a scorer by similarity to --query."""
    from unisono.recipes.clips.trained import VideoScorer
    from unisono.recipes.clips.words.search import minilm, searched

    load = cache(lambda: minilm(str(usable_device(options.device))))  # only once, and not without a transcript

    def score(video: Path, progress: Callable[[float], None]) -> Scored:
        transcript = _transcript(video, options.transcript)
        if transcript is None:
            raise UserError(
                f"{video}: --query needs a transcript: an .srt, .vtt or whisper's .json file next to the video with "
                "its name, or --transcript FILE"
            )
        return searched(video, transcript, options.query, load())

    return VideoScorer(score, f"its similarity to “{options.query}”")


def _built_in(options: argparse.Namespace) -> VideoScorer:
    """Returns the scorer that needs no run, and prints a note about it."""
    from unisono.recipes.clips.untrained import faces
    from unisono.recipes.clips.untrained.scorer import NOTE, untrained_scorer

    for name in ("step", "recipe"):
        if getattr(options, name):
            raise ConfigError(f"--{name} selects a part of a trained run; pass the run as well (--run)")
    for note in (NOTE, "" if faces.available() else faces.MISSING):
        if note:
            print(f"unisono: {note}", file=sys.stderr)
    return untrained_scorer()


def _check_run(options: argparse.Namespace) -> None:
    """Rejects a run of another recipe, or a step that the run does not have, before anything is loaded."""
    from unisono.checkpoint.find import is_step, list_steps
    from unisono.engine.start.registry import BUILT_IN
    from unisono.observe.folder import RunFolder

    record = RunFolder.read(options.run)
    origin = str((record or {}).get("recipe_from"))
    others = {where: name for name, where in BUILT_IN.items() if name != "clips"}
    if origin in others and not options.recipe:
        raise ConfigError(f"{options.run} is a run of {others[origin]}, which cannot score videos; pass a run of clips")
    steps = [step for step, _ in list_steps(options.run / "checkpoints")]
    if record and steps and options.step and is_step(options.step) and int(options.step) not in steps:
        available = ", ".join(map(str, steps))
        raise ConfigError(
            f"--step {options.step}: {options.run} has no checkpoint of this step; use {available}, newest or best"
        )


def _clip(video: Path, folder: Path, scorer: VideoScorer, options: argparse.Namespace, aspect: float | None) -> str:
    """Cuts the clips of one video; returns a line that summarises them."""
    from unisono.recipes.clips.cutting.copying import obstacle_to_copy
    from unisono.recipes.clips.page.clips_json import write_record
    from unisono.recipes.clips.page.page import write_page
    from unisono.recipes.clips.remarks import summary
    from unisono.recipes.clips.video.footage import Footage
    from unisono.recipes.clips.words.said import said_in
    from unisono.recipes.common.bad_files import BadMedia

    started = time.monotonic()
    try:
        footage = Footage(video)
        transcript = _transcript(video, options.transcript)
        # A copy could not begin at a sentence, only at the key frame before it.
        exact = options.exact or bool(options.height) or aspect is not None or transcript is not None
        obstacle = "" if exact else obstacle_to_copy(footage)
        show_progress = status_line().live or footage.duration >= _LONG_S
        num_seconds = math.ceil(footage.duration)
        with progress(f"scoring {video.name}", num_seconds, "s of video", enabled=show_progress) as advance:
            scored = scorer.score(video, advance.to)
        seconds = time.monotonic() - started
        # Scoring decodes the whole video, so its duration is more reliable than the header's.
        footage.duration = scored.duration
        moments, remarks = _chosen(footage, scored, scorer, options)
        if transcript is not None:
            moments, about_words = _at_sentences(moments, transcript, footage, options)
            remarks += about_words
        remarks += [f"{obstacle}, so the clips are re-encoded, as with --exact"] if obstacle else []
        for remark in remarks:
            print(f"unisono: {video}: {remark}", file=sys.stderr)
        cutting = progress(f"cutting {video.name}", len(moments), plural("clip", len(moments)), enabled=show_progress)
        with atomic_folder(folder) as new_folder, cutting as advance:
            clips, said = [], []
            for number, moment in enumerate(moments, 1):
                cut = _cut(footage, moment, number, new_folder, options, aspect, exact=exact or bool(obstacle))
                clips.append((moment, cut))
                said.append(said_in(transcript, cut.path, cut.start, cut.end))
                advance()
            name, trained_on = scorer.name, scorer.trained_on
            write_record(new_folder / "clips.json", footage, scored, clips, name, trained_on, remarks, said)
            if options.page:
                page = new_folder / "page.html"
                model = f"{scorer.name}, trained on {scorer.trained_on}" if scorer.trained_on else scorer.name
                write_page(page, footage, scored, clips, model, remarks, said)
    except BadMedia as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror or error}); use another --output_dir") from None
    return f"{folder}: {summary(clips, footage.duration, seconds)}"


def _transcript(video: Path, option: str) -> Transcript | None:
    from unisono.recipes.clips.words.reading import beside, read_transcript

    path = None if option == "none" else beside(video) if option == "auto" else Path(option)
    return None if path is None else read_transcript(path)


def _at_sentences(
    moments: list[Moment], transcript: Transcript, footage: Footage, options: argparse.Namespace
) -> tuple[list[Moment], list[str]]:
    """Moves both ends of each moment to sentence borders; returns the moments, and notes for the user."""
    from unisono.recipes.clips.words.borders import at_sentences

    lengths = {"shortest": options.shortest, "longest": options.longest, "gap": options.gap}
    placed, num_unfitted = at_sentences(moments, transcript, duration=footage.duration, **lengths)
    remarks = [f"clips begin and end with the sentences of {transcript.name}, so they are re-encoded, as with --exact"]
    if num_unfitted:
        remarks.append(
            f"{num_unfitted} of {len(placed)} clips begin or end within a sentence, because no sentences have the "
            "length of --shortest to --longest there"
        )
    if not transcript.has_words:
        remarks.append(f"{transcript.name} has no times of words, so a sentence is as exact as the file's captions")
    return placed, remarks


def _chosen(
    footage: Footage, scored: Scored, scorer: VideoScorer, options: argparse.Namespace
) -> tuple[list[Moment], list[str]]:
    """Returns the moments to cut, best first, and notes for the user."""
    from unisono.recipes.clips.calibration import without_low
    from unisono.recipes.clips.cutting.edges import edges_around, snap
    from unisono.recipes.clips.cutting.moments import pick
    from unisono.recipes.clips.remarks import about_length, about_lowest, about_scores

    lengths = {"shortest": options.shortest, "longest": options.longest}
    candidates = pick(
        scored.scores,
        scored.clip_seconds,
        number=options.num_clips,
        gap=options.gap,
        duration=footage.duration,
        **lengths,
    )
    if options.lowest_score is None:
        moments, about_low = without_low(candidates, scorer.calibration)
    else:
        moments = [moment for moment in candidates if moment.score >= options.lowest_score]
        about_low = about_lowest(candidates, options.lowest_score)
    remarks = [
        scorer.warning_for(footage),
        str(scored.damage) if scored.damage else "",
        "" if scored.has_sound else "no sound found: the video is scored by its frames alone",
        about_scores(scored.scores),
        about_length(scored.duration, options.shortest, moments),
        about_low,
    ]
    snap_s = scored.clip_seconds if options.snap is None else options.snap
    if snap_s:
        moments = snap(moments, edges_around(footage, moments, snap_s), snap_s, duration=footage.duration, **lengths)
    return moments, [remark for remark in remarks if remark]


def _cut(
    footage: Footage,
    moment: Moment,
    number: int,
    folder: Path,
    options: argparse.Namespace,
    aspect: float | None,
    *,
    exact: bool,
) -> Cut:
    from unisono.recipes.clips.cutting.crop import follow
    from unisono.recipes.clips.cutting.cut import cut

    start = int(moment.start)
    name = f"{number:02}_{start // 3600:02}h{start // 60 % 60:02}m{start % 60:02}s.mp4"
    crop = follow(footage, moment, aspect) if aspect is not None else None
    height = options.height or None
    if aspect is not None and options.height is None:
        longer = max(footage.height, footage.width * footage.pixel_aspect)
        height = round(longer / max(aspect, 1.0))
    return cut(footage, moment, folder / name, exact=exact, crop=crop, height=height)
