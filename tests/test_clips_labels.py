"""Labels in every format give a score for each clip, and every mistake in them is reported with its line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from unisono.errors import ConfigError
from unisono.recipes.clips.data.feature_files import FeatureFile
from unisono.recipes.clips.data.labels import Labelled, read_labels
from unisono.recipes.common.bad_files import BadMedia

NAN = math.nan


def folder(tmp_path: Path, text: str, *files: str) -> Path:
    for name in files or ("a.mp4", "b.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "labels.csv").write_text(f"video,start,end,score\n{text}")
    return tmp_path


def scores(labelled: Labelled, num_clips: int, **further: Any) -> list[float]:
    return [round(float(score), 4) for score in labelled.scores_for(num_clips, **further)]


def refused(path: Path, *words: str, **settings: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_labels(path, 2.0, **settings)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_csv_gives_the_mean_score_of_each_clip_and_0_for_the_rest(tmp_path: Path) -> None:
    first, second = read_labels(folder(tmp_path, "a.mp4,2,5,0.8\nb.mp4,0,4,1\na.mp4,7,8,0.4\n"), 2.0)
    assert (first.name, first.video, first.features) == ("a.mp4", tmp_path / "a.mp4", None)
    assert scores(first, 5) == [0, 0.8, 0.4, 0.2, 0]
    assert scores(second, 3) == [1, 1, 0]
    assert first.scores_for(5).dtype == np.float32


def test_lines_and_columns_may_be_in_any_order(tmp_path: Path) -> None:
    folder(tmp_path, "")
    (tmp_path / "labels.csv").write_bytes(
        "\ufeffScore,end,start,video,who\r\n1,8,6,a.mp4,x\r\n.5,6,4,a.mp4,y\r\n".encode()
    )
    (only,) = read_labels(tmp_path, 2.0)
    assert scores(only, 4) == [0, 0, 0.5, 1]


def test_unlabelled_parts_have_no_score(tmp_path: Path) -> None:
    (only,) = read_labels(folder(tmp_path, "a.mp4,2,5,\na.mp4,5,6,1\n"), 2.0)
    got = only.scores_for(4)
    assert got[0] == 0 and math.isnan(got[1]) and got[3] == 0
    assert got[2] == 1  # mean over the labelled half of the clip


def test_a_short_last_clip_counts_with_its_own_length(tmp_path: Path) -> None:
    (only,) = read_labels(folder(tmp_path, "a.mp4,4,4.5,1\n"), 2.0)
    assert scores(only, 3) == [0, 0, 0.25]
    assert scores(only, 3, duration=4.5) == [0, 0, 1]


def test_times_may_be_written_as_hours_minutes_and_seconds(tmp_path: Path) -> None:
    (only,) = read_labels(folder(tmp_path, "a.mp4,1:02,0:01:04,1\n"), 2.0)
    assert only.segments[0].tolist() == [62, 64, 1]


def test_scores_go_up_to_1_or_to_highest_score(tmp_path: Path) -> None:
    path = folder(tmp_path, "a.mp4,0,2,1\na.mp4,2,4,87\n")
    refused(path, "labels.csv, line 3", "score 87", "--highest_score")
    (only,) = read_labels(path, 2.0, highest_score=100)
    assert scores(only, 2) == [0.01, 0.87]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a.mp4,5,5,1", ["line 3", "not before"]),
        ("a.mp4,7,5,1", ["line 3", "not before"]),
        ("a.mp4,-1,5,1", ["line 3", "start"]),
        ("a.mp4,nan,5,1", ["line 3", "start"]),
        ("a.mp4,1,inf,1", ["line 3", "end"]),
        ("a.mp4,x,5,1", ["line 3", "start", "x"]),
        ("a.mp4,2,5,-0.1", ["line 3", "score -0.1", "between 0 and 1"]),
        ("a.mp4,2,5,nan", ["line 3", "score nan"]),
        ("a.mp4,2,5,good", ["line 3", "good"]),
        ("a.mp4,2,5", ["line 3", "3 fields"]),
        ("a.mp4,1,5,1", ["line 3", "overlaps 0 to 2 s (line 2)"]),
        ("c.mp4,2,5,1", ["line 3", "c.mp4", "--leave_out_bad"]),
        ("../c.mp4,2,5,1", ["line 3", "leads out"]),
        ("/etc/passwd,2,5,1", ["line 3", "leads out"]),
        ('"a.mp4,2,5,1', ["line 3", "invalid CSV"]),
        (",2,5,1", ["line 3", "the column video is empty"]),
    ],
)
def test_each_mistake_in_a_csv_is_named_with_its_line(tmp_path: Path, line: str, words: list[str]) -> None:
    refused(folder(tmp_path, f"a.mp4,0,2,1\n{line}\n"), *words)


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.mp4").touch()
    inside = folder(tmp_path / "data", "a.mp4,0,2,1\nlink.mp4,0,2,1\n", "a.mp4")
    (inside / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    refused(inside, "line 3", "leads out", "--follow_links")
    assert [each.name for each in read_labels(inside, 2.0, follow_links=True)] == ["a.mp4", "link.mp4"]


def test_labels_of_missing_videos_can_be_skipped_with_a_note(tmp_path: Path) -> None:
    messages: list[str] = []
    path = folder(tmp_path, "a.mp4,0,2,1\nc.mp4,0,2,1\nd.mp4,0,2,1\n")
    (only,) = read_labels(path, 2.0, leave_out_bad=True, remark=messages.append)
    assert only.name == "a.mp4" and len(messages) == 1 and "2 videos" in messages[0] and "c.mp4" in messages[0]
    refused(folder(tmp_path / "none", "c.mp4,0,2,1\n", "a.mp4"), "c.mp4", leave_out_bad=True)


def test_labels_after_the_end_are_an_error_unless_the_video_is_truncated(tmp_path: Path) -> None:
    (only,) = read_labels(folder(tmp_path, "a.mp4,0,2,1\na.mp4,12000,14000,1\n"), 2.0)  # milliseconds
    with pytest.raises(ConfigError, match="12000 to 14000 s"):
        only.scores_for(10)
    assert scores(only, 2, cut_off=True) == [1, 0]


def test_a_folder_without_labels_says_what_is_expected(tmp_path: Path) -> None:
    refused(tmp_path, "labels.csv", "video,start,end,score")
    refused(tmp_path / "nowhere", "nowhere")
    (tmp_path / "labels.csv").write_text("a.mp4;0;2;1\n")
    refused(tmp_path, "line 1", "video,start,end,score")
    refused(folder(tmp_path, ""), "contains no labels")
    (tmp_path / "labels.csv").write_bytes(b"video,start,end,score\n\xff\xfe,1,2,1\n")
    refused(tmp_path, "line 2", "UTF-8")


def test_names_without_suffix_find_videos_and_features_in_the_folder_or_subfolders(tmp_path: Path) -> None:
    files = ("videos/j7_360.0_510.0.mp4", "features/j7_360.0_510.0.npy", "b.npz", "sub/c.MP4")
    path = folder(tmp_path, "j7_360.0_510.0,0,2,1\nb.npz,0,2,1\nsub/c.MP4,0,2,1\n", *files)
    first, second, third = read_labels(path, 2.0, feature_seconds=1.0)
    assert first.video == tmp_path / files[0]
    assert first.features == FeatureFile(tmp_path / files[1], seconds=1.0)
    assert second.video is None and second.features is not None and second.features.path == tmp_path / "b.npz"
    assert third.video == tmp_path / files[3]


def query(**changes: Any) -> dict[str, Any]:
    entry = {
        "qid": 7,
        "query": "a cat jumps",
        "vid": "a",
        "duration": 10,
        "relevant_windows": [[2, 6]],
        "relevant_clip_ids": [1, 2],
        "saliency_scores": [[4, 4, 4], [2, 3, 4]],
    }
    return {name: value for name, value in (entry | changes).items() if value is not ...}


def jsonl(tmp_path: Path, *entries: dict[str, Any]) -> Path:
    folder(tmp_path, "")
    (tmp_path / "labels.csv").unlink()
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return tmp_path


def test_qvhighlights_gives_the_mean_of_three_annotators_and_0_elsewhere(tmp_path: Path) -> None:
    path = jsonl(tmp_path, query(), query(qid=8, query="a dog", relevant_clip_ids=[0], saliency_scores=[[0, 1, 2]]))
    first, second = read_labels(path, 2.0)
    assert scores(first, 5) == [0, 1, 0.75, 0, 0]
    assert scores(second, 5) == [0.25, 0, 0, 0, 0]
    assert (first.qid, first.query, first.duration, second.qid) == (7, "a cat jumps", 10, 8)
    assert first.name == second.name == "a.mp4"
    assert first.raters == {1: (4, 4, 4), 2: (2, 3, 4)}


def test_qvhighlights_clips_of_2_s_become_clips_of_any_length(tmp_path: Path) -> None:
    (only,) = read_labels(jsonl(tmp_path, query()), 1.0)
    assert scores(only, 10) == [0, 0, 1, 1, 0.75, 0.75, 0, 0, 0, 0]
    (only,) = read_labels(tmp_path, 4.0)
    assert scores(only, 3) == [0.5, 0.375, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"saliency_scores": ...}, ["saliency_scores", "test split"]),
        ({"saliency_scores": [[4, 4, 4]]}, ["ValueError"]),
        ({"saliency_scores": [[4, 4, 5], [1, 1, 1]]}, ["0 to 4"]),
        ({"saliency_scores": [[4, 4, -1], [1, 1, 1]]}, ["0 to 4"]),
        ({"relevant_clip_ids": [1, 5]}, ["from 0 to 4"]),
        ({"relevant_clip_ids": [1, 1]}, ["expected distinct numbers"]),
        ({"duration": -3, "relevant_clip_ids": [], "saliency_scores": []}, ["-3"]),
        ({"vid": 3}, ["vid must be text"]),
        ({"vid": "../../etc/x"}, ["leads out"]),
        ({"vid": "c"}, ["no video"]),
        ({}, ["qid 7 already occurs"]),
    ],
)
def test_each_mistake_in_a_jsonl_is_named_with_its_line(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    refused(jsonl(tmp_path, query(), query(**({"qid": 8} if changes else {}) | changes)), "val.jsonl, line 2", *words)


def test_invalid_json_is_reported_with_its_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path, query())
    with (path / "val.jsonl").open("a") as file:
        file.write("[1, 2\n")
    refused(path, "val.jsonl, line 2")


def hisum(path: Path, **videos: tuple[Any, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, (features, inputs) in videos.items():
            file.create_group(name).create_dataset("features", data=features)
            file[name].create_dataset("gtscore", data=inputs)
    return path


def test_mr_hisum_gives_the_mean_of_its_seconds(tmp_path: Path) -> None:
    rows, inputs = np.arange(10, dtype=np.float32).reshape(5, 2), [0.0, 1.0, 0.5, 0.5, 0.2]
    (only,) = read_labels(hisum(tmp_path / "mr_hisum.h5", video_1=(rows, inputs)), 2.0)
    assert (only.name, only.video, only.duration) == ("video_1", None, 5.0)
    assert scores(only, 3, duration=5.0) == [0.5, 0.5, 0.2]
    assert only.features is not None
    assert only.features.clips(2.0).tolist() == [[1, 2], [5, 6], [8, 9]]
    assert only.features.clips(1.0).tolist() == rows.tolist()


def test_each_mistake_in_an_h5_is_named_with_its_video(tmp_path: Path) -> None:
    rows = np.zeros((3, 2), np.float32)
    refused(hisum(tmp_path / "a.h5", one=(rows, [0, 0, 1.2])), "a.h5, one", "between 0 and 1")
    refused(hisum(tmp_path / "b.h5", one=(rows, [0, 0, NAN])), "b.h5, one", "between 0 and 1")
    refused(hisum(tmp_path / "c.h5", one=(rows, [0, 0])), "c.h5, one", "(2,)")
    (tmp_path / "d.h5").write_text("no")
    refused(tmp_path / "d.h5", "d.h5", "HDF5")
    with h5py.File(tmp_path / "e.h5", "w") as file:  # a link to another file
        file["one"] = h5py.ExternalLink(str(tmp_path / "a.h5"), "/one")
    refused(tmp_path / "e.h5", "e.h5", "another file")


def test_feature_files_of_every_kind_give_their_rows(tmp_path: Path) -> None:
    rows = np.random.RandomState(0).standard_normal((7, 3)).astype(np.float32)
    np.save(tmp_path / "a.npy", rows)
    np.savez_compressed(tmp_path / "b.npz", features=rows, other=np.zeros(3))
    np.savez(tmp_path / "c.npz", whatever=rows.astype(np.float64))
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["features"] = rows
    for name in ("a.npy", "b.npz", "c.npz", "d.h5"):
        np.testing.assert_array_equal(FeatureFile(tmp_path / name).clips(2.0), rows)
    # Rows of 0.5 s in clips of 2 s: four per clip, and the rest in the last clip.
    halves = FeatureFile(tmp_path / "a.npy", seconds=0.5).clips(2.0)
    np.testing.assert_allclose(halves, [rows[:4].mean(0), rows[4:].mean(0)], rtol=1e-5)
    # Rows of 3 s: the second clip overlaps both rows by half.
    longer = FeatureFile(tmp_path / "a.npy", seconds=3.0).clips(2.0)
    assert len(longer) == 11
    np.testing.assert_allclose(longer[1], rows[:2].mean(0), rtol=1e-5)


def test_feature_files_execute_no_code_and_are_checked(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    np.save(tmp_path / "pickle.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "pickle.npz", features=np.array([Evil()], dtype=object), allow_pickle=True)
    np.save(tmp_path / "flat.npy", np.zeros(5))
    np.save(tmp_path / "none.npy", np.zeros((0, 5)))
    np.save(tmp_path / "nan.npy", np.full((3, 2), NAN))
    np.savez(tmp_path / "two.npz", x=np.zeros((3, 2)), y=np.zeros((3, 2)))
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "text.h5").write_text("hello")
    for name in (
        "pickle.npy",
        "pickle.npz",
        "flat.npy",
        "none.npy",
        "nan.npy",
        "two.npz",
        "text.npy",
        "text.h5",
        "no.npy",
    ):
        with pytest.raises(BadMedia, match=name):
            FeatureFile(tmp_path / name).clips(2.0)
    assert not (tmp_path / "ran").exists()
