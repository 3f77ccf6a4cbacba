"""Transcripts: reading them, clips that begin and end with sentences, titles, and caption files that players read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import Browser
from test_clips_cutting import made
from test_clips_page import ATTACK, Judged
from unisono.cli import clips
from unisono.cli.main import main
from unisono.errors import UserError
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.words.borders import at_sentences
from unisono.recipes.clips.words.captions import captions_of, title_of, write_captions
from unisono.recipes.clips.words.reading import beside, read_transcript
from unisono.recipes.clips.words.transcript import Piece, joined, transcript_of

HOSTILE = "<script>alert(1)</script> --> & <b onclick=alert(2)>"


def spoken(*sentences: tuple[float, float, str]) -> dict[str, Any]:
    """The JSON file of whisper for sentences whose words are evenly spaced; a segment ends in the middle of one."""
    words = []
    for start, end, text in sentences:
        parts = text.split()
        step = (end - start) / len(parts)
        words += [
            {"start": start + i * step, "end": start + (i + 0.9) * step, "word": f" {w}"} for i, w in enumerate(parts)
        ]
    groups = [words[at : at + 5] for at in range(0, len(words), 5)]
    return {
        "text": "",
        "segments": [
            {"start": g[0]["start"], "end": g[-1]["end"], "text": "".join(w["word"] for w in g), "words": g}
            for g in groups
        ],
    }


TALK = spoken(
    (0.4, 5.1, "Welcome to this talk about pricing."),
    (5.5, 12.8, "So, um, the first thing that I learned is that nobody reads the small print."),
    (13.1, 17.9, "It was expensive."),
    (18.3, 26.2, "Now we show the price on the first page and people stay."),
    (26.5, 33.0, "Dr. Who would not agree with any of this, of course."),
    (33.2, 39.0, "Thank you for listening to me!"),
)


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- reading


def test_subrip_and_webvtt_are_read_with_their_markup_removed(tmp_path: Path) -> None:
    srt = "\ufeff1\r\n00:00:01,500 --> 00:00:03,25\r\n<i>Hello</i> {\\an8}there\r\nyou.\r\n\r\n"
    srt += "2\r\n01:00:00,000 --> 01:00:02,000\r\nBye &amp; thanks.\r\n"
    vtt = "WEBVTT\n\nNOTE no caption\n\nid\n00:01.500 --> 00:03.250 align:start\n<v Ann><00:01.900>Hello there you.\n\n"
    vtt += "01:00:00.000 --> 01:00:02.000\nBye &amp; thanks."
    expected = [Piece(1.5, 3.25, "Hello there you."), Piece(3600.0, 3602.0, "Bye & thanks.")]
    for name, text in (("a.srt", srt), ("a.vtt", vtt)):
        transcript = read_transcript(write(tmp_path / name, text))
        assert list(transcript.captions) == expected and not transcript.has_words
        assert [sentence.text for sentence in transcript.sentences] == ["Hello there you.", "Bye & thanks."]


def test_sentences_are_found_across_the_segments_of_whisper(tmp_path: Path) -> None:
    transcript = read_transcript(write(tmp_path / "talk.json", TALK))
    assert transcript.has_words and len(transcript.captions) > 6
    assert [sentence.text for sentence in transcript.sentences][3:5] == [
        "Now we show the price on the first page and people stay.",
        "Dr. Who would not agree with any of this, of course.",
    ]
    assert transcript.sentences[3].start == 18.3


def test_speech_without_full_stops_ends_at_pauses_and_before_it_gets_too_long() -> None:
    words = [Piece(i * 0.5, i * 0.5 + 0.4, f"w{i}") for i in range(100)] + [Piece(60.0, 60.4, "end")]
    sentences = transcript_of("a", words, words).sentences
    assert sentences[-1].text == "end" and all(each.end - each.start <= 30 for each in sentences)
    assert joined(["你好。", "世界", "hello", "you"]) == "你好。 世界hello you"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "x", "expected a transcript whose name ends in .srt, .vtt or .json"),
        ("a.srt", "no times", "contains no captions with times"),
        ("a.vtt", "WEBVTT\n\n00:03.000 --> 00:01.000\nbackwards", "contains no captions with times"),
        ("a.json", "{", "is not a transcript"),
        ("a.json", "[" * 100_000, "is not a transcript"),
        ("a.json", '{"segments": 3}', 'expected an object with "segments"'),
        (
            "a.json",
            '{"segments": [{"start": NaN, "end": 1, "text": "x"}, {"start": "0", "end": 1, "text": "x"}, 3]}',
            "no ",
        ),
    ],
)
def test_a_file_that_is_no_transcript_is_an_error_of_one_line(
    name: str, content: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        read_transcript(write(tmp_path / name, content))
    assert says in str(error.value) and "\n" not in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([".srt", ".vtt", ".json"]))
def test_no_bytes_crash_the_readers(tmp_path_factory: pytest.TempPathFactory, data: bytes, ending: str) -> None:
    path = tmp_path_factory.mktemp("fuzz") / f"a{ending}"
    path.write_bytes(b"1\n00:00:01,000 --> 00:00:02,000\n" + data if ending != ".json" else data)
    try:
        transcript = read_transcript(path)
    except UserError:
        return
    assert all(piece.text.isprintable() and piece.start <= piece.end for piece in transcript.captions)


def test_a_transcript_next_to_the_video_is_found(tmp_path: Path) -> None:
    video = tmp_path / "talk.mp4"
    assert beside(video) is None
    write(tmp_path / "talk.json", {"duration": 3})
    write(tmp_path / "talk.en.srt", "")
    assert beside(video) == tmp_path / "talk.en.srt", "talk.json is something else"
    write(tmp_path / "talk.json", TALK)
    assert beside(video) == tmp_path / "talk.json"


# --- borders


def check_borders(moments: list[Moment], pieces: list[Piece]) -> None:
    for moment in moments:
        cut = [p for p in pieces for time in (moment.start, moment.end) if p.start + 1e-4 < time < p.end - 1e-4]
        assert not cut, (moment, cut)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 1.5), st.floats(0.1, 4.0), st.booleans()), min_size=1, max_size=60),
    st.lists(st.tuples(st.floats(0, 60), st.floats(4, 20)), min_size=1, max_size=5),
)
def test_no_word_is_cut_and_lengths_and_gaps_are_kept(
    parts: list[tuple[float, float, bool]], spans: list[tuple[float, float]]
) -> None:
    words, time = list[Piece](), 0.0
    for length, pause, ends in parts:
        words.append(Piece(time, time + length, "word." if ends else "word"))
        time += length + (pause if ends else 0.0)
    duration = max(time, 81.0)
    moments: list[Moment] = []
    for start, seconds in spans:
        if all(start >= m.end + 2 or start + seconds <= m.start - 2 for m in moments):
            moments.append(Moment(start, start + seconds, 1.0 - len(moments) / 10))
    placed, unfitted = at_sentences(
        moments, transcript_of("a", words, words), shortest=4, longest=60, gap=2, duration=duration
    )
    if not unfitted:
        check_borders(placed, words)
    for moment in placed:
        assert 4 - 1e-3 <= moment.seconds <= 60 + 1e-3 and 0 <= moment.start < moment.end <= duration
    ordered = sorted(placed, key=lambda moment: moment.start)
    assert all(left.end <= right.start + 1e-3 for left, right in pairwise(ordered))


def test_the_nearest_sentences_win_and_silence_may_stay(tmp_path: Path) -> None:
    transcript = read_transcript(write(tmp_path / "talk.json", TALK))
    [moment], unfitted = at_sentences([Moment(19.0, 25.0, 1.0)], transcript, shortest=4, longest=60, duration=60)
    assert unfitted == 0 and 18.1 <= moment.start <= 18.3 and moment.end == pytest.approx(26.2, abs=0.35)
    [silent], _ = at_sentences([Moment(45.0, 52.0, 1.0)], transcript, shortest=4, longest=60, duration=60)
    assert (silent.start, silent.end) == (45.0, 52.0)
    [long], unfitted = at_sentences([Moment(6.0, 11.0, 1.0)], transcript, shortest=4, longest=5, duration=60)
    assert unfitted == 0 and 4 <= long.seconds <= 5, "no sentence is that short, so it lies between two words"
    check_borders([long], [piece for each in transcript.sentences for piece in each.pieces])


# --- titles and captions


def test_titles_say_something_and_are_short(tmp_path: Path) -> None:
    transcript = read_transcript(write(tmp_path / "talk.json", TALK))
    assert title_of(transcript.sentences[1:]) == "The first thing that I learned is that nobody reads the small print"
    assert title_of(transcript.sentences[2:4]) == "Now we show the price on the first page and people stay"
    assert title_of([]) == "" and len(title_of(transcript_of("a", [Piece(0, 9, "word " * 40)]).sentences)) <= 82


def read_back(path: Path) -> list[tuple[float, float, str]]:
    """The captions of a file, as FFmpeg reads them."""
    with av.open(str(path)) as container:
        stream = container.streams.subtitles[0]
        return [
            (float(p.pts * stream.time_base), float((p.pts + p.duration) * stream.time_base), bytes(p).decode())
            for p in container.demux(stream)
            if p.pts is not None and p.duration
        ]


def test_captions_are_cut_and_shifted_and_ffmpeg_reads_them(tmp_path: Path) -> None:
    transcript = read_transcript(write(tmp_path / "talk.json", TALK))
    captions = captions_of(transcript, 18.2, 33.1)
    assert captions[0].start == pytest.approx(0.1) and captions[-1].end <= 14.9
    assert all(len(caption.text) <= 42 and caption.end - caption.start <= 6 for caption in captions)
    assert joined(caption.text for caption in captions).startswith("Now we show the price")
    for path in write_captions(tmp_path / "01_clip", captions):
        found = read_back(path)
        assert len(found) == len(captions)
        for (start, end, text), caption in zip(found, captions, strict=True):
            assert (start, end) == pytest.approx(
                (caption.start, caption.end), abs=2e-3
            ) and text.strip() == caption.text
    with pytest.raises(FileExistsError):
        write_captions(tmp_path / "01_clip", captions)


def test_a_hostile_caption_stays_text(tmp_path: Path) -> None:
    srt, vtt = write_captions(tmp_path / "a", [Piece(0, 1, HOSTILE)])
    assert srt.read_text().count("-->") == vtt.read_text().count("-->") == 1
    assert len(read_back(srt)) == len(read_back(vtt)) == 1 and "<script" not in vtt.read_text()


# --- the command


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a video that was cut with whisper's JSON next to it; a sentence of it is hostile."""
    folder = tmp_path_factory.mktemp("words")
    video = made(folder / "talk.mp4", seconds=40)
    hostile = {**TALK, "segments": [*TALK["segments"]]}
    last = hostile["segments"][-1]
    words = [*last["words"], {"start": 39.2, "end": 39.6, "word": " &lt;img src=x onerror=alert(1)&gt;"}]
    hostile["segments"][-1] = {**last, "words": words}
    write(folder / "talk.json", hostile)

    def scorer(video: Path) -> Judged:
        return Judged(np.array([0.1] * 9 + [0.9, 0.8, 0.85] + [0.1] * 5 + [0.7, 0.75, 0.7]))

    assert clips.main([str(video), "--output-dir", str(folder / "out"), "--num-clips=2"], scorer) == 0
    return folder / "out" / "talk"


def test_the_files_begin_and_end_with_sentences(done: Path) -> None:
    record = json.loads((done / "clips.json").read_text())
    assert any("sentences of talk.json" in remark for remark in record["remarks"])
    words = [Piece(w["start"], w["end"], w["word"]) for s in TALK["segments"] for w in s["words"]]
    assert len(record["clips"]) == 2
    for clip in record["clips"]:
        span = Moment(clip["file_start"], clip["file_end"], 1.0)
        # Frames are 40 ms apart: a file contains whole frames.
        assert not [w for w in words for t in (span.start, span.end) if w.start + 0.04 < t < w.end - 0.04], clip
        with av.open(str(done / clip["file"])) as container:
            assert container.duration / av.time_base == pytest.approx(span.seconds, abs=0.05)
        assert [Path(name).suffix for name in clip["captions"]] == [".srt", ".vtt"]
        for name in clip["captions"]:
            found = read_back(done / name)
            assert found and found[-1][1] <= span.seconds + 0.01
    first = record["clips"][0]
    assert first["title"] == "Now we show the price on the first page and people stay"
    assert first["text"].startswith("Now we show") and first["text"].endswith(("stay.", "course."))


def test_the_page_shows_titles_and_captions_and_runs_nothing(done: Path, browser: Browser) -> None:
    browser.events.clear()
    browser("Page.navigate", url=(done / "page.html").as_uri())
    browser.wait("document.readyState === 'complete'")
    titles = browser.ask("[...document.querySelectorAll('li h3')].map(e => e.textContent)")
    assert titles[0] == "Now we show the price on the first page and people stay"
    assert "<img src=x onerror=alert(1)>" in browser.ask("document.body.textContent")
    assert browser.ask("document.querySelectorAll('img').length") == 0
    cues = (
        "[...document.querySelectorAll('li video')].every(v => v.textTracks[0].cues && v.textTracks[0].cues.length > 0)"
    )
    browser.wait(cues)
    assert not [event for event in browser.events if event["method"] == "Log.entryAdded"]


def test_the_title_of_a_hostile_transcript_is_escaped(tmp_path: Path) -> None:
    video = made(tmp_path / "a.mp4", seconds=8)
    write(
        tmp_path / "words.srt",
        f"1\n00:00:00,200 --> 00:00:07,500\nThis is &lt;script&gt;alert(1)&lt;/script&gt; {ATTACK}.\n",
    )
    words = [str(video), "--output-dir", str(tmp_path / "out"), "--transcript", str(tmp_path / "words.srt")]
    assert clips.main(words, lambda video: Judged(np.array([0.1, 0.9, 0.8, 0.2]))) == 0
    page = (tmp_path / "out/a/page.html").read_text()
    assert "&lt;script&gt;alert(1)" in page and "<script>alert" not in page and "<img" not in page
    [clip] = json.loads((tmp_path / "out/a/clips.json").read_text())["clips"]
    assert "<script>" in clip["title"]


def test_without_a_transcript_nothing_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = made(tmp_path / "a.mp4", seconds=8)
    write(tmp_path / "a.json", TALK)
    words = [str(video), "--output-dir", str(tmp_path / "out"), "--transcript", "none"]
    assert clips.main(words, lambda video: Judged(np.array([0.1, 0.9, 0.8, 0.2]))) == 0
    assert not list((tmp_path / "out/a").glob("*.srt")) and "sentences" not in capsys.readouterr().err
    assert main(["clips", str(video), str(video), "--transcript", str(tmp_path / "a.json")]) == 2
    assert "--transcript is for one video" in capsys.readouterr().err


# --- search


PLANTED = {
    "pricing": "The monthly plan costs ten dollars. Most customers were glad to pay more for the yearly subscription.",
    "dogs": "My dog loves to swim in the lake. Every morning we throw a stick and he jumps into the water.",
    "training": "The neural network was trained on eight graphics cards. The loss went down after the first epoch.",
    "cooking": "Fry the onions in butter until they are brown. Then add the tomatoes and a little salt.",
    "travel": "The train to Lisbon leaves at night. You wake up next to the sea and have coffee on the beach.",
}
QUERIES = {
    "pricing": "the part about pricing",
    "dogs": "playing with a pet",
    "training": "deep learning on GPUs",
    "cooking": "a recipe with vegetables",
    "travel": "a journey to Portugal",
}


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video in which five topics are talked about, 12 seconds each."""
    folder = tmp_path_factory.mktemp("search")
    video = made(folder / "talk.mp4", seconds=60)
    sentences = []
    for number, text in enumerate(PLANTED.values()):
        first, second = (f"{part.strip('.')}." for part in text.split(". "))
        sentences += [(12 * number + 0.3, 12 * number + 5.5, first), (12 * number + 6.0, 12 * number + 11.6, second)]
    write(folder / "talk.json", spoken(*sentences))
    return video


def test_a_query_finds_the_part_that_is_about_it(topics: Path, tmp_path: Path) -> None:
    for number, (topic, query) in enumerate(QUERIES.items()):
        out = tmp_path / topic
        words = [str(topics), "--output-dir", str(out), "--query", query, "--num-clips=1", "--no-page", "--longest=15"]
        assert main(["clips", *words]) == 0
        assert not {word for word in query.lower().split() if len(word) > 3} & set(PLANTED[topic].lower().split())
        record = json.loads((out / "talk/clips.json").read_text())
        [clip] = record["clips"]
        middle = (clip["start"] + clip["end"]) / 2
        assert 12 * number <= middle < 12 * (number + 1), (topic, clip)
        assert clip["text"].split(".")[0] in PLANTED[topic] and record["judged_by"] == f"its similarity to “{query}”"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--query", " "), "--query: expected a text"),
        (("--query", "x", "--run", "r"), "--run: --query finds moments by what is said"),
        (("--query", "x", "--transcript", "none"), "--query searches the transcript"),
        (("--query", "x"), "--query needs a transcript"),
    ],
)
def test_a_mistake_about_a_query_is_one_line(
    flags: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = made(tmp_path / "a.mp4", seconds=4)
    assert main(["clips", str(video), "--output-dir", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert says in error and error.strip().count("\n") == 0
