"""Checkpoints in object storage, on a real S3 server: killed runs and servers, damaged objects, secrets."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import TESTS, TINY, lines, losses, mark, marked, start, unisono, wait_until
from command_line import end as wait_for
from s3_server import KEY_ID, SECRET, S3Server
from tiny_recipe import HOLD
from unisono.checkpoint.find import list_steps, validate
from unisono.checkpoint.manifest import MANIFEST
from unisono.errors import ConfigError, UserError
from unisono.mirror.copies import local_run
from unisono.mirror.local_folders import working_folder
from unisono.mirror.remote_checkpoints import LATER
from unisono.mirror.restore import restore_run, split_step
from unisono.mirror.upload import Upload
from unisono.observe.folder import RunFolder
from unisono.storage.addresses import check_address, shown
from unisono.storage.store import Store, reason_of

pytest.importorskip("s3fs")
pytest.importorskip("moto")

END, EVERY = 12, 4
RUN = ["--max_steps", END, "--save_every", EVERY, "--nproc", 1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that runs unless a test has killed it."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def here(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty cache, whose processes find the server; returns an empty folder."""
    for name, value in {**server.environ(), "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture(scope="module")
def finished(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was killed in the middle of an upload, and continued on a fresh machine; its folder and address."""
    place, address = tmp_path_factory.mktemp("runs"), "s3://bucket/killed"
    environ = {**server.environ(), "XDG_CACHE_HOME": str(place / "cache")}
    hold = place / "hold"
    hold.write_text("600 after 5")
    (server.folder / "hold").write_text("step_00000008/state.json")
    mine = mark()
    words = ["-m", "unisono", "train", TINY, *RUN, "--mirror", address, "--output_dir"]
    process = start([*words, place / "one"], cwd=place, **environ, **mine, **{HOLD: str(hold)})
    try:
        wait_until(lambda: "killed/checkpoints/step_00000004/manifest.json" in server.objects(), "step 4", 120)
        hold.write_text("600 after 9")
        wait_until((server.folder / "held").exists, "an upload of step 8", 120)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not marked(mine), "the end of the upload's process")
    finally:
        (server.folder / "hold").unlink()
        process.kill()
        process.communicate()
    second = unisono(*words[2:], place / "two", cwd=place, **environ)
    assert second.code == 0, second.err
    assert "restored from s3://bucket/killed: step 4" in second.err + second.out
    (place / "output.txt").write_text(second.out + second.err)
    return place / "two", address


def test_a_run_that_is_killed_during_an_upload_continues_on_a_fresh_machine(
    finished: tuple[Path, str], server: S3Server, tmp_path: Path
) -> None:
    folder, _ = finished
    undisturbed = unisono("train", TINY, *RUN, "--output_dir", "run", cwd=tmp_path)
    assert undisturbed.code == 0, undisturbed.err
    assert losses(folder) == losses(tmp_path / "run")
    record = RunFolder.read(folder)
    assert record is not None and [each["from_step"] for each in record["starts"]] == [0, 4]
    objects = server.objects("killed/")
    for step, path in list_steps(folder / "checkpoints"):
        for file in path.iterdir():
            assert objects[f"checkpoints/step_{step:08d}/{file.name}"] == file.read_bytes()
    assert objects["metrics.jsonl"] == (folder / "metrics.jsonl").read_bytes()
    assert objects["run.json"] == (folder / "run.json").read_bytes()
    mirrored = [event["step"] for event in lines(folder, "events.jsonl") if event["kind"] == "mirrored"]
    assert sorted(mirrored) == [4, 8, 12]


def test_credentials_appear_nowhere(finished: tuple[Path, str], server: S3Server) -> None:
    folder, _ = finished
    written = [path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()]
    for content in [*written, *server.objects("killed/").values()]:
        assert SECRET.encode() not in content and KEY_ID.encode() not in content


def test_a_server_that_is_killed_delays_the_copy_and_not_the_run(server: S3Server, here: Path) -> None:
    hold = here / "hold"
    hold.write_text("600 after 6")
    words = ["-m", "unisono", "train", TINY, *RUN, "--mirror", "s3://bucket/outage", "--output_dir", "run"]
    process = start(words, cwd=here, **{HOLD: str(hold)})
    try:
        wait_until(lambda: any(e["kind"] == "mirrored" for e in lines(here / "run", "events.jsonl")), "step 4", 120)
        server.kill()
        hold.unlink()
        wait_until(lambda: any(e["kind"] == "mirror" for e in lines(here / "run", "events.jsonl")), "a failure", 120)
        wait_until(lambda: any(e["kind"] == "done" for e in lines(here / "run", "events.jsonl")), "the end of training")
        assert process.poll() is None, "the run waits for its copy"
    finally:
        server.start()
        ended = wait_for(process)
    assert ended.code == 0, ended.err
    assert len(losses(here / "run")) == END
    said = [event["text"] for event in lines(here / "run", "events.jsonl") if event["kind"] == "mirror"]
    assert "the server cannot be reached" in said[0] and said[-1] == "mirror: works again"
    assert all(line in ended.out + ended.err for line in said)
    store = server.objects("outage/checkpoints/")
    assert [f"step_{step:08d}/{MANIFEST}" in store for step in (4, 8, 12)] == [True] * 3


def test_a_run_ends_when_its_copy_cannot_be_made(server: S3Server, here: Path) -> None:
    words = ["train", TINY, *RUN, "--mirror_timeout", 1, "--mirror", "s3://other-bucket/run", "--output_dir", "run"]
    first = unisono(*words, cwd=here)
    assert (first.code, first.err.count("\n")) == (2, 1)
    assert "The specified bucket does not exist" in first.err and "Traceback" not in first.err
    assert not (here / "run").exists()
    assert unisono(*words[:-4], "--max_steps", 4, "--output_dir", "run", cwd=here).code == 0
    second = unisono(*words, cwd=here)
    assert second.code == 0, second.err
    assert "the copy cannot be reached" in second.err + second.out
    assert "mirror: did not finish in time" in second.err + second.out
    assert len(losses(here / "run")) == END


def test_output_dir_export_report_and_resume_work_with_addresses(
    finished: tuple[Path, str], server: S3Server, here: Path
) -> None:
    _, address = finished
    shutil.copytree(server.folder / "bucket", here / "before")
    exported = unisono("export", address, "weights", "--step", 8, cwd=here)
    assert (exported.code, exported.out) == (0, "weights of step_00000008 written to weights\n")
    assert (here / "weights").is_dir()
    assert unisono("report", address, cwd=here).code == 0
    assert "Tiny" in (here / "report.html").read_text()
    branch = ["train", TINY, "--max_steps", 14, "--resume", f"{address}/checkpoints/step_00000008", "--output_dir"]
    resumed = unisono(*branch, "s3://bucket/branch", cwd=here)
    assert resumed.code == 0, resumed.err
    assert "resumed from step_00000008" in resumed.out + resumed.err
    assert "s3://bucket/branch/checkpoints" not in resumed.err
    record = RunFolder.read(working_folder("s3://bucket/branch"))
    assert record is not None and record["config"]["output_dir"] == "s3://bucket/branch"
    assert [line["step"] for line in lines(working_folder("s3://bucket/branch"))] == list(range(9, 15))
    shutil.rmtree(here / "cache")  # another machine continues the branch from its own checkpoints
    again = unisono(*branch[:3], 16, *branch[4:], "s3://bucket/branch", cwd=here)
    assert again.code == 0, again.err
    assert "resumed from step_00000014" in again.out + again.err
    assert server.objects("killed/") == {  # reading changes nothing
        path.name.removeprefix("killed%2F").replace("%2F", "/"): path.read_bytes()
        for path in (here / "before").iterdir()
        if path.name.startswith("killed%2F")
    }


def test_a_damaged_object_is_skipped(finished: tuple[Path, str], server: S3Server, here: Path) -> None:
    copy(server, "killed/", "damaged/")
    name = next(name for name in server.objects("damaged/") if name.endswith("00012/state.json"))
    content = server.objects("damaged/")[name]
    Store("s3://bucket/damaged").write(name, content.replace(b"12", b"13"))
    notes = restore_run(here / "run", "s3://bucket/damaged", "Tiny", resume="auto", is_named=True)
    assert "step_00000012 skipped: the hash of state.json differs from the manifest's" in notes[0]
    assert notes[-1].endswith("step 8")
    assert [step for step, _ in list_steps(here / "run" / "checkpoints")] == [8]
    assert validate(list_steps(here / "run" / "checkpoints")[0][1]) is None
    store = Store("s3://bucket/damaged")
    for step in (4, 8):
        store.delete([f"checkpoints/step_{step:08d}/state.json"])
    with pytest.raises(UserError, match="has no valid checkpoint") as caught:
        restore_run(here / "other", "s3://bucket/damaged", "Tiny", resume="auto", is_named=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="has no valid checkpoint"), local_run("s3://bucket/damaged"):
        pass


def copy(server: S3Server, source: str, target: str) -> None:
    store = Store("s3://bucket")
    for name, content in server.objects(source).items():
        store.write(target + name, content)


def test_what_the_run_abandoned_is_set_aside_after_its_successor_is_complete(
    finished: tuple[Path, str], server: S3Server, here: Path
) -> None:
    folder, _ = finished
    copy(server, "killed/", "back/")
    shutil.copytree(folder, here / "run")
    for step, path in list_steps(here / "run" / "checkpoints"):
        if step > 4:
            path.rename(path.with_name(f"{path.name}.later-1"))
    other = here / "run" / "checkpoints" / "step_00000008"  # another branch has another state
    shutil.copytree(here / "run" / "checkpoints" / "step_00000008.later-1", other)
    state = (other / "state.json").read_bytes().replace(b"\n", b"\n ")
    (other / "state.json").write_bytes(state)
    manifest = json.loads((other / MANIFEST).read_text())
    resign(manifest, state)
    (other / MANIFEST).write_text(json.dumps(manifest, indent=1))
    assert validate(other) is None
    upload = Upload(here / "run", Store("s3://bucket/back"), keep_last=3)
    upload.open()
    upload.deliver()
    objects = server.objects("back/checkpoints/")
    complete = sorted(name.partition("/")[0] for name in objects if name.endswith(f"/{MANIFEST}"))
    assert complete[0] == "step_00000004" and complete[1].startswith("step_00000008-") and len(complete) == 2
    assert [f"step_{step:08d}/{LATER}" in objects for step in (8, 12)] == [True, True]
    assert objects[f"{complete[1]}/state.json"] == state
    restore_run(here / "fresh", "s3://bucket/back", "Tiny", resume="auto", is_named=True)
    [(step, path)] = list_steps(here / "fresh" / "checkpoints")
    assert step == 8 and (path / "state.json").read_bytes() == state


def resign(manifest: dict[str, Any], state: bytes) -> None:
    import hashlib

    manifest["files"]["state.json"] = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    manifest["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def test_old_checkpoints_are_deleted_like_local_ones(finished: tuple[Path, str], server: S3Server, here: Path) -> None:
    folder, _ = finished
    copy(server, "killed/", "pruned/")
    store = Store("s3://bucket/pruned")
    store.delete(["checkpoints/step_00000012/manifest.json"])  # as if its upload had been interrupted
    store.write("checkpoints/step_00000008-0123abcd/state.json", b"{}")  # and another one before
    store.write("checkpoints/step_00000004/notes.txt", b"of the user")
    store.write("checkpoints/other/state.json", b"of the user")
    shutil.copytree(folder, here / "run")
    for step, path in list_steps(here / "run" / "checkpoints"):
        if step < 12:
            shutil.rmtree(path)
    events = len(lines(here / "run", "events.jsonl"))
    upload = Upload(here / "run", store, keep_last=1)
    upload.open()
    upload.deliver()
    upload.deliver()
    names = {name.rpartition("/")[0] for name in server.objects("pruned/checkpoints/")}
    assert names == {"step_00000012", "step_00000004", "other"}, "a folder with a file of the user stays"
    assert len(lines(here / "run", "events.jsonl")) == events + 1, "nothing is uploaded twice"


def test_two_runs_do_not_share_an_address(finished: tuple[Path, str], server: S3Server, here: Path) -> None:
    folder, address = finished
    shutil.copytree(folder, here / "run")
    record = json.loads((here / "run" / "run.json").read_text())
    (here / "run" / "run.json").write_text(json.dumps({**record, "id": "0" * 32}))
    with pytest.raises(UserError, match="holds another run"):
        restore_run(here / "run", address, "Tiny", resume="auto", is_named=True)
    with pytest.raises(UserError, match="holds another run"):
        Upload(here / "run", Store(address), 3).open()
    with pytest.raises(UserError, match="holds a run of Tiny, not Sibling"):
        restore_run(here / "new", address, "Sibling", resume="auto", is_named=True)
    with pytest.raises(UserError, match="already holds a run; to continue it: --output_dir s3://bucket/killed"):
        restore_run(here / "new", address, "Tiny", resume="auto", is_named=False)
    with pytest.raises(UserError, match="resume never: s3://bucket/killed already holds a run"):
        restore_run(here / "new", address, "Tiny", resume="never", is_named=True)
    assert not (here / "new").exists()


def test_the_machine_that_continued_last_wins(finished: tuple[Path, str], server: S3Server, here: Path) -> None:
    folder, _ = finished
    copy(server, "killed/", "moved/")
    shutil.copytree(folder, here / "run")
    assert restore_run(here / "run", "s3://bucket/moved", "Tiny", resume="auto", is_named=True) == []
    record = json.loads((here / "run" / "run.json").read_text())
    record["starts"] = record["starts"][:1]  # this folder does not know the second start
    (here / "run" / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="continued in another folder meanwhile"):
        Upload(here / "run", Store("s3://bucket/moved"), 3).open()
    Store("s3://bucket/moved").delete(["checkpoints/step_00000012/manifest.json"])
    notes = restore_run(here / "run", "s3://bucket/moved", "Tiny", resume="auto", is_named=True)
    assert any("set aside as step_00000012.later-1" in note for note in notes) and notes[-1].endswith("step 8")
    assert len(json.loads((here / "run" / "run.json").read_text())["starts"]) == 2


@pytest.mark.parametrize(
    "address, message",
    [
        (f"s3://{KEY_ID}:{SECRET}@bucket/run", "contains a user name or a password"),
        (f"s3://bucket/run?X-Amz-Signature={SECRET}", "contains a query, which may be a secret"),
        (f"ftp://me:{SECRET}@host/run", "unknown scheme ftp://; use s3://"),
        ("s3://bucket", "expected an address such as s3://BUCKET/FOLDER, got s3://bucket"),
        ("s3:///run", "expected an address such as s3://BUCKET/FOLDER"),
        ("s3://bucket/../run", "expected an address such as s3://BUCKET/FOLDER"),
        ("s3://bucket/a b", "expected an address such as s3://BUCKET/FOLDER"),
        ("s3://bucket/[a]*", "expected an address such as s3://BUCKET/FOLDER"),
        ("s3://[bucket/run", "expected an address such as s3://BUCKET/FOLDER"),
        ("gs://bucket/run", "gs:// needs gcsfs, which is not installed; run pip install gcsfs"),
    ],
)
def test_a_bad_address_is_one_line_without_secrets(address: str, message: str) -> None:
    if address.startswith("gs:") and shutil.which("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(ConfigError) as caught:
        check_address("mirror", address)
    assert message in str(caught.value) and str(caught.value).startswith("mirror: ")
    assert "\n" not in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize("flag", ["--mirror", "--output_dir", "--resume"])
def test_the_command_refuses_a_secret_in_an_address(tmp_path: Path, flag: str) -> None:
    for option in ([], ["--print_config"]):
        ended = unisono("train", TINY, flag, f"s3://{KEY_ID}:{SECRET}@bucket/run", *option, cwd=tmp_path)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
        assert f"{flag[2:]}: the address contains a user name or a password" in ended.err
        assert SECRET not in ended.err and not list(tmp_path.iterdir())


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"s3:// needs s3fs.*; run pip install 'unisono\[storage\]'"):
        check_address("output_dir", "s3://bucket/run")


def test_addresses_have_one_form(tmp_path: Path) -> None:
    assert check_address("mirror", "S3://bucket//a/run/") == "s3://bucket/a/run"
    assert split_step("s3://bucket/run/checkpoints/step_00000012") == ("s3://bucket/run", 12)
    assert split_step("s3://bucket/run/checkpoints/step_00000012-0123abcd") == ("s3://bucket/run", 12)
    assert split_step("s3://bucket/checkpoints/run") == ("s3://bucket/checkpoints/run", None)
    assert shown(f"https://me:{SECRET}@host/data?key={SECRET}") == "https://host/data"
    with pytest.raises(ConfigError, match="mirror: expected an address such as s3://"):
        unchecked = unisono("train", TINY, "--mirror", "backup", cwd=tmp_path)
        raise ConfigError(unchecked.err.removeprefix("unisono: "))


def test_reasons_contain_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    error = OSError(f"failed: https://me:{SECRET}@host/x?X-Amz-Credential={KEY_ID}\nkey {SECRET}")
    reason = reason_of(error)
    assert SECRET not in reason and KEY_ID not in reason and "\n" not in reason


def test_a_run_without_a_copy_imports_nothing_for_it(tmp_path: Path) -> None:
    program = (
        "import sys; from unisono.cli.main import main; "
        f"code = main(['train', {TINY!r}, '--max_steps', '2', '--gpus', '0', '--output_dir', 'run']); "
        "print('loaded', [name for name in ('s3fs', 'botocore', 'unisono.mirror.upload', 'unisono.storage.store') "
        "if name in sys.modules]); sys.exit(code)"
    )
    process = start(["-c", program], cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]))
    ended = wait_for(process)
    assert ended.code == 0, ended.err
    assert "loaded []" in ended.out


@pytest.mark.parametrize("command", ["tune", "federate", "bench"])
def test_commands_with_several_runs_refuse_an_address(tmp_path: Path, command: str) -> None:
    words = [command, TINY, *(["--search", "learning_rate=0.1|0.2"] if command == "tune" else [])]
    for flag in ("--mirror", "--output_dir"):
        ended = unisono(*words, flag, "s3://bucket/run", cwd=tmp_path)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
        assert f"{flag[2:]}: " in ended.err and not list(tmp_path.iterdir())
