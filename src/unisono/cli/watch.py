"""`unisono watch RUN|FOLDER`: shows runs while they train, in the terminal or as a page in the browser."""

from __future__ import annotations

import sys
from pathlib import Path

from unisono.cli.arguments import Parser
from unisono.errors import EXIT_DONE, ConfigError, UserError
from unisono.observe.status_line import print_line

_DESCRIPTION = (
    "Show runs while they train: what every rank does, the loss, events and the time left. Reads only the run folder, "
    "so it works on every machine that sees the folder, and never disturbs the run. In the terminal, q quits; if the "
    "output goes to a file or a pipe, the state is printed once."
)


def main(argv: list[str]) -> int:
    """Runs the command until the user quits."""
    parser = Parser("watch", _DESCRIPTION)
    parser.add_argument(
        "paths", type=Path, nargs="*", metavar="RUN", help="run folders, or folders that contain runs, such as runs/"
    )
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.add_argument(
        "--web",
        nargs="?",
        const="",
        metavar="PORT",
        help="serve a self-updating web page on this port instead of printing to the terminal (default port: 8420; 0: "
        "any free port)",
    )
    parser.add_argument(
        "--host",
        help="address on which --web listens (default: 127.0.0.1, this machine only; 0.0.0.0: all networks). On other "
        "addresses than this machine's own, the page can only be opened with the token in the printed address",
    )
    parser.add_argument(
        "--token", action="store_true", help="require the token on 127.0.0.1 too, if other users work on this machine"
    )
    options = parser.parse(argv)
    if options.web is None and (options.host is not None or options.token):
        raise ConfigError("--host and --token require --web; add --web")
    if options.web is not None and options.once:
        raise ConfigError("--once prints to the terminal and --web serves a page; remove one of them")
    paths, port = options.paths, options.web
    if port and not port.isdecimal():  # unisono watch --web runs/
        paths, port = [*paths, Path(port)], ""
    if not paths:
        raise UserError("watch: pass a run folder, or a folder that contains runs; for instance: unisono watch runs/")
    from unisono.observe.watch.folder_of_runs import Runs

    runs = Runs(paths)
    if port is not None:
        return _serve(runs, options.host or "127.0.0.1", _port(port), options.token)
    from unisono.observe.watch.terminal import show, show_once

    if options.once or not (sys.stdout and sys.stdout.isatty() and sys.stdin and sys.stdin.isatty()):
        show_once(runs)
    else:
        show(runs)
    return EXIT_DONE


def _serve(runs: object, host: str, port: int, with_token: bool) -> int:
    from unisono.observe.watch.folder_of_runs import Runs
    from unisono.observe.watch.server import serving

    assert isinstance(runs, Runs)
    with serving(runs, host, port, with_token=with_token) as (server, address):
        print(address, flush=True)
        print_line("unisono: open this address in a browser; Ctrl-C ends the page, not the run")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return EXIT_DONE
    return EXIT_DONE


def _port(text: str) -> int:
    from unisono.observe.watch.server import PORT

    if not text:
        return PORT
    if int(text) > 65535:
        raise ConfigError(f"--web {text}: expected a port from 0 to 65535")
    return int(text)
