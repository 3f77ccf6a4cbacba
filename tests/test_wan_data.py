"""Dataset folders in every common format give the same samples; an error in one is reported in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unisono.errors import ConfigError
from unisono.recipes.wan.data.sources import Source, read_sources

# These tests open no video, so any bytes will do.


def put(root: Path, name: str, content: str | bytes = b"film") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pairs(sources: list[Source]) -> list[tuple[str, str | None]]:
    return [(source.name, source.caption) for source in sources]


def refusal(folder: Path, *parts: str, leave_out_bad: bool = False) -> str:
    with pytest.raises(ConfigError) as refused:
        read_sources(folder, leave_out_bad=leave_out_bad)
    message = str(refused.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


CLIPS = {"b": "a dog runs", "a": "a cat, asleep; 'no \"quotes\"'"}  # in the order of the lists, not of the names


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    for name in CLIPS:
        put(tmp_path, f"{name}.mp4")
    return tmp_path


# ---- forms


def test_a_text_file_is_the_caption_of_the_video_or_image_with_its_name(tmp_path: Path) -> None:
    kinds = ["mp4", "avi", "mov", "mkv", "webm", "gif", "png", "jpg", "jpeg", "webp", "bmp", "MP4"]
    for number, kind in enumerate(kinds):
        put(tmp_path, f"{number:02}.{kind}")
        put(tmp_path, f"{number:02}.txt", f" caption {number}\r\n")
    put(tmp_path, "notes.txt", "not a caption of anything")
    put(tmp_path, ".hidden.mp4")
    sources = read_sources(tmp_path)
    assert pairs(sources) == [(f"{number:02}", f"caption {number}") for number in range(len(kinds))]
    assert sources[0].media == tmp_path / "00.mp4"


def test_subfolders_are_read_in_the_order_of_the_names(tmp_path: Path) -> None:
    for name in ("b", "a/z", "c.d/e.f", "a/deep/er/x"):
        put(tmp_path, f"{name}.png")
        put(tmp_path, f"{name}.txt", name)
    assert pairs(read_sources(tmp_path)) == [(name, name) for name in ("a/deep/er/x", "a/z", "b", "c.d/e.f")]


def test_files_of_a_run_in_the_folder_are_not_data(tmp_path: Path) -> None:
    for name in ("a", "runs/mine/previews/step_00000002_samples", "runs/other/b"):
        put(tmp_path, f"{name}.png")
    put(tmp_path, "a.txt", "mine")
    put(tmp_path, "runs/other/b.txt", "mine too")
    for name in ("run.json", "events.jsonl"):
        put(tmp_path, f"runs/mine/{name}", "{}")
    assert pairs(read_sources(tmp_path)) == [("a", "mine"), ("runs/other/b", "mine too")]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("metadata.csv", "file_name,caption,Caption\na.mp4,x,y\n"),
        ("metadata.jsonl", '{"file_name": "a.mp4", "caption": "x", "caption": "y"}\n'),
        ("metadata.json", '[{"file_name": "a.mp4", "caption": "x", "caption": "y"}]'),
    ],
)
def test_a_duplicate_name_is_refused(clips: Path, table: str, text: str) -> None:
    put(clips, table, text)
    with pytest.raises(ConfigError, match="caption occurs 2 times"):
        read_sources(clips)


def test_an_empty_text_file_is_an_empty_caption_and_reported(tmp_path: Path) -> None:
    put(tmp_path, "a.mp4")
    put(tmp_path, "a.txt", "\n")
    messages: list[str] = []
    assert pairs(read_sources(tmp_path, report=messages.append)) == [("a", "")]
    assert messages == ["1 of 1 captions are empty; these samples are trained without text"]


@pytest.mark.parametrize("media", ["video", "image", "file", "file_name"])
@pytest.mark.parametrize("caption", ["prompt", "caption", "text"])
def test_a_csv_has_a_column_for_the_file_and_one_for_the_caption(clips: Path, media: str, caption: str) -> None:
    quoted = {name: '"' + text.replace('"', '""') + '"' for name, text in CLIPS.items()}
    rows = "".join(f"{name}.mp4,x,{text}\r\n" for name, text in quoted.items())
    put(clips, "metadata.csv", f"\ufeff{media.upper()},extra, {caption}\r\n{rows}\r\n")
    assert pairs(read_sources(clips)) == list(CLIPS.items())


@pytest.mark.parametrize("media", ["file_path", "video", "video_path", "image_path", "file_name", "path"])
@pytest.mark.parametrize("table", ["metadata.json", "metadata.jsonl"])
def test_json_lists_files_and_captions_in_its_order(clips: Path, table: str, media: str) -> None:
    entries = [{media: f"{name}.mp4", "text": text, "type": "video", "width": 8} for name, text in CLIPS.items()]
    lines = "\n\n".join(map(json.dumps, entries)) if table.endswith("l") else json.dumps(entries, indent=1)
    put(clips, table, lines)
    assert pairs(read_sources(clips)) == list(CLIPS.items())


def test_videos2caption_finds_its_videos_in_videos_and_takes_the_first_of_many_captions(tmp_path: Path) -> None:
    put(tmp_path, "videos/a.mp4")
    put(tmp_path, "b.mp4")
    entries = [{"path": "a.mp4", "cap": ["first", "second"], "fps": 24.0}, {"path": "b.mp4", "cap": "only"}]
    put(tmp_path, "videos2caption.json", json.dumps(entries))
    messages: list[str] = []
    assert pairs(read_sources(tmp_path, report=messages.append)) == [("videos/a", "first"), ("b", "only")]
    assert messages == ["1 samples have more than one caption; the first of each is used"]


@pytest.mark.parametrize("names", [("videos.txt", "prompts.txt"), ("videos.txt", "prompt.txt")])
def test_two_lists_belong_together_line_by_line(clips: Path, names: tuple[str, str]) -> None:
    put(clips, names[0], "b.mp4\r\na.mp4\n\n")
    put(clips, names[1], "a dog\u2028runs\na cat")  # only \n ends a line
    assert pairs(read_sources(clips)) == [("b", "a dog\u2028runs"), ("a", "a cat")]
    assert read_sources(clips / names[0]) == read_sources(clips / names[1]) == read_sources(clips)


def test_prompt_txt_is_the_caption_of_prompt_mp4(tmp_path: Path) -> None:
    for name in ("prompt", "video"):
        put(tmp_path, f"{name}.mp4")
        put(tmp_path, f"{name}.txt", f"of {name}")
    assert pairs(read_sources(tmp_path)) == [("prompt", "of prompt"), ("video", "of video")]


def test_a_list_takes_precedence_over_text_files_and_can_be_the_dataset_path(clips: Path) -> None:
    put(clips, "a.txt", "not this")
    put(clips, "metadata.csv", "video,prompt\na.mp4,this\n")
    assert pairs(read_sources(clips)) == [("a", "this")]
    (clips / "metadata.csv").rename(clips / "mine.CSV")
    assert pairs(read_sources(clips / "mine.CSV")) == [("a", "this")]


def test_precomputed_files_replace_video_and_caption(tmp_path: Path) -> None:
    put(tmp_path, "all.mp4")
    put(tmp_path, "all.txt", "all")
    put(tmp_path, "film.mp4")
    for name in ("all", "latent", "neither"):
        put(tmp_path, f"{name}.latent.safetensors")
    for name in ("all", "film", "neither", "stray"):  # a stray file belongs to no sample
        put(tmp_path, f"{name}.safetensors")
    put(tmp_path, "latent.txt", "latent")

    def beside(name: str) -> tuple[Path, Path]:
        return tmp_path / f"{name}.latent.safetensors", tmp_path / f"{name}.safetensors"

    assert read_sources(tmp_path) == [
        Source("all", tmp_path / "all.mp4", "all", *beside("all")),
        Source("film", tmp_path / "film.mp4", None, None, beside("film")[1]),
        Source("latent", None, "latent", beside("latent")[0], None),
        Source("neither", None, None, *beside("neither")),
    ]
    put(tmp_path, "metadata.jsonl", '{"video": "latent.mp4", "caption": "x"}\n{"video": "film.mp4"}')
    assert read_sources(tmp_path) == [
        Source("latent", None, "x", beside("latent")[0], None),
        Source("film", tmp_path / "film.mp4", None, None, beside("film")[1]),
    ]


def test_a_latent_without_a_video_is_named_by_its_whole_file_name(tmp_path: Path) -> None:
    names = ["a.mp4", "a.v1", "a.v2"]
    for name in names:
        put(tmp_path, f"{name}.latent.safetensors")
        put(tmp_path, f"{name}.txt", name)
    sources = read_sources(tmp_path)
    assert pairs(sources) == [(name, name) for name in names]
    assert [source.latent for source in sources] == [tmp_path / f"{name}.latent.safetensors" for name in names]
    put(tmp_path, "videos/b.latent.safetensors")
    put(tmp_path, "videos2caption.json", '[{"path": "b.mp4", "cap": "x"}]')
    assert read_sources(tmp_path) == [Source("videos/b", None, "x", tmp_path / "videos/b.latent.safetensors", None)]


def test_names_are_unique_and_as_short_as_they_can_be(tmp_path: Path) -> None:
    for name in ("a.mp4", "a.png", "b.mp4", "b#2.mp4"):
        put(tmp_path, name)
    for name in ("a", "b", "b#2"):
        put(tmp_path, f"{name}.txt", name)
    assert [source.name for source in read_sources(tmp_path)] == ["a.mp4", "a.png", "b", "b#2"]
    put(
        tmp_path,
        "metadata.csv",
        "video,text\n" + "".join(f"{each},x\n" for each in ("b#2.mp4", *["b.mp4"] * 3, "a.png")),
    )
    assert [source.name for source in read_sources(tmp_path)] == ["b#2", "b", "b#3", "b#4", "a"]


# ---- mistakes


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path / "missing", "no such folder")
    refusal(tmp_path, "no video or image", ".mp4")
    put(tmp_path, "train/metadata.csv", "video,prompt\na.mp4,x\n")
    refusal(tmp_path, "train/metadata.csv", "pass its folder instead")
    refusal(put(tmp_path, "prompts.txt", "a cat"), "expected a folder")
    (tmp_path / "train/metadata.csv").write_text("video,prompt\n")
    refusal(tmp_path / "train", "no video or image")


def test_a_folder_without_captions_is_refused(clips: Path) -> None:
    refusal(clips, "none of 2 samples has a caption", "a.txt next to a.mp4", leave_out_bad=True)


def test_a_video_without_a_caption_is_reported_or_skipped_by_option(clips: Path) -> None:
    put(clips, "a.txt", "x")
    refusal(clips, "b.mp4: has no caption", "b.txt", "--leave_out_bad")
    for number in range(5):
        put(clips, f"c{number}.png")
    messages: list[str] = []
    assert pairs(read_sources(clips, leave_out_bad=True, report=messages.append)) == [("a", "x")]
    [message] = messages
    assert message.startswith("skipped 6 of 7 samples: ") and message.endswith("and 3 more")
    assert f"{clips}/b.mp4 (has no caption)" in message


def test_two_lists_of_one_folder_are_both_named(clips: Path) -> None:
    put(clips, "metadata.csv", "video,prompt\na.mp4,x\n")
    put(clips, "metadata.jsonl", '{"video": "a.mp4", "text": "x"}')
    refusal(clips, "metadata.csv and metadata.jsonl")
    (clips / "metadata.jsonl").unlink()
    put(clips, "videos.txt", "a.mp4")
    assert len(read_sources(clips)) == 1  # a list of files alone lists no samples
    put(clips, "prompts.txt", "x")
    refusal(clips, "metadata.csv and videos.txt and prompts.txt")


@pytest.mark.parametrize(
    ("table", "content", "expected"),
    [
        ("metadata.csv", "film,words\na.mp4,x\n", ["the columns are 'film, words'", "file_name", "caption"]),
        ("metadata.csv", "", ["the columns are ''"]),
        ("metadata.csv", "video,prompt\nb.mp4,x\na.mp4,a cat, asleep\n", ["line 3", "3 fields", "double quotes"]),
        ("metadata.csv", 'video,prompt\na.mp4,"never closed\nb.mp4,y\n', ["line 3", "invalid CSV"]),
        ("metadata.csv", f"video,prompt\na.mp4,{'x' * 200_000}\n", ["line 2", "invalid CSV", "field"]),
        ("metadata.csv", "video,prompt\na.mp4,x\nc.mp4,y\n", ["line 3", "no such file", "c.mp4"]),
        ("metadata.csv", "video,prompt\na.mp3,x\n", ["line 2", "a.mp3 is not a video or image"]),
        ("metadata.csv", b"video,prompt\nb.mp4,x\na.mp4,caf\xe9\n", ["line 3", "UTF-8"]),
        ("metadata.jsonl", '{"video": "a.mp4", "text": "x"}\n{"video": "b.mp4", "te', ["line 2", "invalid JSON"]),
        ("metadata.jsonl", '{"text": "x"}', ["line 1", "names no file", "video_path"]),
        ("metadata.jsonl", '["a.mp4", "x"]', ["line 1", "got ['a.mp4', 'x']"]),
        ("metadata.jsonl", '{"video": "a.mp4", "text": {"en": "x"}}', ["line 1", "must be text"]),
        (
            "metadata.jsonl",
            '{"video": "a.mp4"}\n{"video": "b.mp4", "text": "x"}',
            ["line 1: has no caption", "--leave"],
        ),
        ("metadata.jsonl", "[" * 100_000, ["line 1", "invalid JSON"]),
        ("metadata.jsonl", '{"video": "a.mp4", "text": ' + "9" * 10_000 + "}", ["line 1", "invalid JSON"]),
        ("metadata.jsonl", json.dumps({"video": "a.mp4", "text": "x" * 70_000}), ["more than 65,536 characters"]),
        ("metadata.jsonl", r'{"video": "a.mp4", "text": "\ud800"}', ["not valid Unicode"]),
        ("metadata.json", '[{"video": "a.mp4",\n "text": "x"},\n]', ["metadata.json: invalid JSON", "line 3"]),
        ("metadata.json", '{"a.mp4": "x"}', ["expected a list"]),
        ("metadata.json", '[{"video": "a.mp4", "text": "x"}, {"video": 5}]', ["entry 2", "names no file"]),
        ("videos.txt", "a.mp4\nb.mp4\n", ["has 2 lines", "has 1;"]),
    ],
)
def test_a_bad_list_is_refused_with_the_place_in_it(clips: Path, table: str, content: str, expected: list[str]) -> None:
    put(clips, table, content)
    if table == "videos.txt":
        put(clips, "prompts.txt", "one")
    refusal(clips, str(clips), *expected)


def test_bad_samples_of_a_list_are_skipped_by_option(clips: Path) -> None:
    put(clips, "metadata.csv", "video,prompt\ngone.mp4,x\na.mp4,y\n")
    messages: list[str] = []
    assert pairs(read_sources(clips, leave_out_bad=True, report=messages.append)) == [("a", "y")]
    assert messages == [f"skipped 1 of 2 samples: {clips}/metadata.csv, line 2 (no such file: {clips}/gone.mp4)"]
    put(clips, "metadata.csv", "video,prompt\ngone.mp4,x\n")
    refusal(clips, "no such file", leave_out_bad=True)


def test_a_caption_that_is_too_long_or_not_text_is_reported_with_its_sample(clips: Path) -> None:
    put(clips, "a.txt", b"caf\xe9")
    put(clips, "b.txt", "x" * 300_000)
    put(clips, "c.png")
    put(clips, "c.txt", "x" * 70_000)
    put(clips, "d.png")
    put(clips, "d.txt", "fine")
    refusal(clips, "a.txt, line 1: not UTF-8", "2 more of 4")
    (clips / "a.txt").unlink()
    (clips / "a.mp4").unlink()
    refusal(clips, "b.txt has 300,000 bytes", "1 more of 3")
    assert pairs(read_sources(clips, leave_out_bad=True)) == [("d", "fine")]


def test_a_latent_that_could_belong_to_two_files_is_rejected(clips: Path) -> None:
    put(clips, "a.png")
    put(clips, "a.latent.safetensors")
    refusal(clips, "a.latent.safetensors could belong to a.mp4 or a.png")


def test_a_name_that_is_not_unicode_is_reported_with_its_sample(clips: Path) -> None:
    for name in (b"caf\xe9\n\x1b[2J.mp4", b"caf\xe9\n\x1b[2J.txt"):
        (clips / os.fsdecode(name)).write_bytes(b"x")
    for name in CLIPS:
        put(clips, f"{name}.txt", "x")
    assert refusal(clips, "not valid Unicode").isprintable()
    assert len(read_sources(clips, leave_out_bad=True)) == 2


# ---- attacks


@pytest.mark.parametrize(
    "path", ["../outside.mp4", "videos/../../outside.mp4", "/etc/hostname", "{outside}", "link.mp4", "..", "/"]
)
def test_a_list_cannot_name_a_file_outside_its_folder(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "data"
    put(folder, "a.mp4")
    outside = put(tmp_path, "outside.mp4")
    (folder / "link.mp4").symlink_to(outside)
    entries = [{"video": "a.mp4", "text": "x"}, {"video": path.format(outside=outside), "text": "x"}]
    put(folder, "metadata.jsonl", "\n".join(map(json.dumps, entries)))
    for leave_out_bad in (False, True):
        refusal(folder, "metadata.jsonl, line 2", "leads outside", leave_out_bad=leave_out_bad)


@pytest.mark.parametrize("path", ["links/outside.mp4", "b\0.mp4", ".", "https://x.org/a.mp4"])
def test_a_dataset_ignores_files_outside_its_folder(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "data"
    put(folder, "a.mp4")
    put(tmp_path, "outside.mp4")
    (folder / "links").symlink_to(tmp_path)
    entries = [{"video": "a.mp4", "text": "x"}, {"video": path, "text": "x"}]
    put(folder, "metadata.jsonl", "\n".join(map(json.dumps, entries)))
    refusal(folder, "metadata.jsonl, line 2")
    assert len(read_sources(folder, leave_out_bad=True)) == 1


def test_links_next_to_videos_cannot_lead_outside_the_folder(tmp_path: Path) -> None:
    secret = put(tmp_path, "secret.txt", "root:x:0:0")
    for name in ("a.txt", "a.mp4", "a.safetensors", "a.latent.safetensors", "metadata.csv"):
        folder = tmp_path / name
        put(folder, "a.mp4")
        put(folder, "a.txt", "x")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        refusal(folder, f"the link {folder / name} leads outside", leave_out_bad=True)


def test_paths_and_links_inside_the_folder_are_fine(tmp_path: Path) -> None:
    folder, alias = tmp_path / "data", tmp_path / "alias"
    put(folder, "sub/a.mp4")
    alias.symlink_to(folder)
    (folder / "b.mp4").symlink_to("sub/a.mp4")
    names = ["sub/a.mp4", "./sub//a.mp4", "sub/../b.mp4", str(folder / "b.mp4"), str(alias / "b.mp4")]
    put(folder, "metadata.json", json.dumps([{"path": name, "cap": "x"} for name in names]))
    assert [source.name for source in read_sources(alias)] == ["sub/a", "sub/a#2", "b", "b#2", "b#3"]


def test_the_hub_cache_can_be_the_data_folder_although_it_consists_of_links(tmp_path: Path) -> None:
    put(tmp_path, "blobs/1f")
    put(tmp_path, "blobs/2e", "a cat")
    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "a.mp4").symlink_to("../../blobs/1f")
    (folder / "a.txt").symlink_to("../../blobs/2e")
    assert pairs(read_sources(folder)) == [("a", "a cat")]


def test_links_to_folders_are_not_followed_and_reported(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    put(folder, "a.mp4")
    put(folder, "a.txt", "x")
    (folder / "again").symlink_to(".")  # following this link would never end
    messages: list[str] = []
    assert len(read_sources(folder, report=messages.append)) == 1
    assert messages == ["skipped links to folders: again"]


def test_reading_a_pipe_does_not_block(tmp_path: Path) -> None:
    put(tmp_path, "a.mp4")
    os.mkfifo(tmp_path / "a.txt")
    refusal(tmp_path, "none of 1 samples has a caption")
