"""Python processes that start at once, because they are forked from one that has already imported torch.

Starting python and importing torch and its compiler takes about 3 s of processor time, a run of a test a fraction of
one. `WarmPython` is a `subprocess.Popen` for commands such as `python -m unisono train …` or `python script.py`: the
process is a fork of a server that has imported torch and nothing of unisono's. Processes that it starts through
`subprocess` with the same Python (the ranks of a launcher) are forked too. Each process has its own session,
environment, signals and exit code, and imports unisono and the recipe itself.

A fork differs from a new process in three ways, and a test for which one of them matters uses `subprocess` itself:
/proc shows the server's command line and environment, all forks of a server order sets of strings alike (the hash
seed), and variables that python or a library reads when it is loaded (PYTHON…, LC_…) have no effect.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.utils.data",
    "torch.utils.tensorboard",
    "numpy.random",
    "numpy.ctypeslib",
    "safetensors.torch",
    "yaml",
    "jinja2",
    "tqdm",
)
# Additional imports for a recipe's processes, by a word in their command or in the name of the test file.
_IMPORTED_TOO = {
    "wan": (
        "diffusers.models.transformers.transformer_wan",
        "diffusers.models.autoencoders.autoencoder_kl_wan",
        "diffusers.pipelines.wan.pipeline_wan",
        "transformers.models.umt5.modeling_umt5",
    ),
    "seo": (
        "transformers.models.auto.modeling_auto",
        "transformers.models.bert.modeling_bert",
        "transformers.models.t5.modeling_t5",
    ),
    "darkroom": ("matplotlib.pyplot", "h5py"),
    "clips": ("av",),
}
RUN_MARK = "UNISONO_TEST_RUN"
"""Variable of everything that a run of the tests starts; see `conftest.py`."""
# Environment variables that Python or a library reads when it is loaded.
_READ_AT_START: tuple[str, ...] = (
    "PYTHON",
    "LC_",
    "LANG",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "TORCH_",
    "HF_",
    "TRANSFORMERS_",
    "MPL",
)
if Path("/proc/driver/nvidia").exists():  # forks of a server that has queried GPUs cannot use them
    _READ_AT_START += ("CUDA_",)
_environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # of the server
_MAX_REQUEST = 1 << 20


class WarmPython(subprocess.Popen[str]):
    """A replacement for `subprocess.Popen` that forks processes from a server."""

    _exit_status: int  # file descriptor for the server's two lines: the process id and the wait status

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        (_, _, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_) = rest
        self._exit_status, write = os.pipe()
        request = {
            "arguments": list(map(os.fspath, args))[1:],
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "modules": _modules_of(os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0] + " ".join(args)),
        }
        try:
            streams = [fd if fd >= 0 else own for fd, own in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
            _server().send_request(request, [write, *streams])
        finally:
            os.close(write)
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self.pid = int(self._line())
        self._child_created = True

    def _line(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            byte = os.read(self._exit_status, 1)
            if not byte:
                raise RuntimeError("the server of warm processes has ended")
            text += byte
        return text.decode()

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """The result that `os.waitpid` would give if the process were a child of this one."""
        if wait_flags & os.WNOHANG and not _can_be_read(self._exit_status):
            return 0, 0
        status = int(self._line())
        os.close(self._exit_status)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def is_possible(env: Mapping[str, str]) -> bool:
    """Whether a fork behaves like a new process in this environment."""
    differing = {name for name in {*env, *_environment} if env.get(name) != _environment.get(name)}
    return not any(name.startswith(_READ_AT_START) for name in differing - {"PYTHONPATH"})


def _modules_of(text: str) -> list[str]:
    return [module for word, modules in _IMPORTED_TOO.items() if word in text for module in modules]


def is_fork(command_line: bytes, pid: int) -> bool:
    """Whether a process with this command line is one that a server forked."""
    return os.fsencode(__file__) in command_line and not any(server.process.pid == pid for server in _servers)


class _Server:
    """The server of this process; it ends when its connection does."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env={**_environment, RUN_MARK: os.environ.get(RUN_MARK, "")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def send_request(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        socket.send_fds(self.connection, [json.dumps(request).encode()], fds)

    def close(self) -> None:
        if self.owner == os.getpid():
            self.connection.close()
            self.process.wait(30)


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers or _servers[0].owner != os.getpid():
        _servers[:] = [_Server()]
        atexit.register(_servers[0].close)
    return _servers[0]


def _can_be_read(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(0))


# --- in the server -------------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Forks a process for each request. Returns the request in the fork, and None in the server at its end."""
    _import(_IMPORTED)
    running: dict[int, int] = {}  # process id -> where its wait status is written
    for note, wake in _ended_children():
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(note, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select()}
        if note in ready:
            os.read(note, 4096)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with contextlib.suppress(BrokenPipeError):
                        os.write(running[pid], f"{status}\n".encode())
                    os.close(running.pop(pid))
        if connection.fileno() in ready:
            text, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 4)
            if not text:
                return None
            request = json.loads(text)
            _import(request.pop("modules"))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for fd in (note, wake, connection.fileno(), *running.values(), fds[0]):
                    os.close(fd)
                connection.detach()
                return request, fds[1:]
            running[pid] = fds[0]
            os.write(fds[0], f"{pid}\n".encode())
            for fd in fds[1:]:
                os.close(fd)
    return None


def _import(modules: Sequence[str]) -> None:
    missing = [module for module in modules if module not in sys.modules]
    for module in missing:
        with contextlib.suppress(ImportError):
            import_module(module)
    if missing:
        gc.collect()
        gc.freeze()  # otherwise each fork would copy all pages that garbage collection touches


def _ended_children() -> Iterator[tuple[int, int]]:
    """Yields, again and again, a pipe that can be read when a child has ended."""
    note, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        yield note, wake


# --- in the forks --------------------------------------------------------------------------------------------------


def _become(arguments: Sequence[str], cwd: str, env: Mapping[str, str], streams: Sequence[int]) -> None:
    """Gives a fork the state of a new Python process with these arguments."""
    for number, fd in enumerate(streams):
        if fd >= 0:
            os.dup2(fd, number)
    os.closerange(3, 4096)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(cwd)
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)
    for path in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    import numpy as np
    import torch

    np.random.seed()  # Python's own generator reseeds itself after a fork
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]


def _run(arguments: list[str]) -> None:
    """Runs `[-u] [-P] -m module …` or `[-u] [-P] script.py …` as python does."""
    safe_path = False
    while arguments[0] in ("-u", "-P"):
        safe_path |= arguments.pop(0) == "-P"
    if arguments[0] == "-m":
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        if not safe_path:
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork_or_execute(popen: subprocess.Popen[Any], args: Any, *rest: Any) -> None:
    """`Popen._execute_child` of a fork: forks another one where it would start python with a module or a script."""
    (executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes) = rest
    words = [os.fsdecode(word) for word in args] if not isinstance(args, (str, bytes)) else [os.fsdecode(args)]
    flags = [word for word in words[1:] if word not in ("-u", "-P")]
    plain = words[0] == sys.executable and flags and (flags[0] == "-m" or flags[0].endswith(".py"))
    if not plain or executable not in (None, words[0]) or preexec_fn or pass_fds or shell:
        _execute(popen, args, *rest)
        return
    p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, _, _, _, _, start_new_session, _ = pipes
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    pid = os.fork()
    if pid == 0:
        if start_new_session:
            os.setsid()
        _be_a_child(words[1:], os.fspath(cwd or os.getcwd()), dict(env or os.environ), [p2cread, c2pwrite, errwrite])
    popen.pid = pid
    popen._child_created = True  # type: ignore[attr-defined]
    popen._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _be_a_child(arguments: list[str], cwd: str, env: dict[str, str], streams: list[int]) -> NoReturn:
    """Runs a program in a fork of a running program, and never returns to that program."""
    status = 1
    try:
        atexit._clear()
        _unregister_operators()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        for name, module in list(sys.modules.items()):
            file = str(getattr(module, "__file__", None) or "")
            if name.partition(".")[0] == "unisono" or (file and name != "__main__" and not _is_installed(file)):
                del sys.modules[name]
        sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
        sys.stderr.reconfigure(line_buffering=True)
        sys.path[:] = _first_path
        _become(arguments, cwd, env, streams)
        _run(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)


def _unregister_operators() -> None:
    """Removes unisono's operators from torch, because the new program registers them again."""
    from torch.library import _del_library

    for finalizer, info in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
        if info.func is _del_library and any(name.startswith("unisono::") for name in info.args[3]):
            finalizer()


def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(os.path.dirname(os.__file__))


if __name__ == "__main__":
    _first_path = list(sys.path)
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        os.setsid()
        asked, streams = request
        _become(asked["arguments"], asked["cwd"], asked["env"], streams)
        _run(asked["arguments"])
