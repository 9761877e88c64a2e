"""Daemons that begin within milliseconds: a server that has loaded what they import forks them.

A daemon spends seconds of processor time on loading torch and its kernels, and most tests start three. What is forked
is a process like any other: with its own session, environment, folder and standard files, and the test as its parent.

    python prefork.py FD: serve on this inherited socket until it is closed
"""

import contextlib
import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
MAIN = "farloop.cli.main"
LOADED = (MAIN, "farloop.cli.daemons", "farloop.coordinator.daemon", "farloop.node.trainer", "torch._dynamo")
CODECS = ("fp32", "q4", "q4r", "q8")
POLL_S = 0.01


class Process:
    """What a test needs of `subprocess.Popen`, for `python *words` in a session of its own."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], output: int) -> None:
        """`output`: a file for stdout and stderr."""
        self.pid = _server().fork(json.dumps([words, str(folder), dict(environment)]).encode(), output)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(words, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)

    def fork(self, request: bytes, output: int) -> int:
        """The number of a process that has begun, as a child of this one: orphans go to the nearest subreaper."""
        prctl = ctypes.CDLL(None).prctl
        prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._socket, [request], [output])
            return int(self._socket.recv(64))
        finally:
            prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _server() -> Server:
    """One for each process of tests, with which it ends."""
    return Server()


def serve(listener: socket.socket) -> Callable[[], None] | None:
    """In the server: None, once the tests have ended. In what it forks: what that has to do."""
    while True:
        request, descriptors, *_ = socket.recv_fds(listener, 1 << 20, 1)
        if not request:
            return None
        told, tell = os.pipe()
        if between := os.fork():
            os.close(descriptors[0])
            os.close(tell)
            os.waitpid(between, 0)  # the process is an orphan from here on, and so its parent is the test
            with open(told, "rb") as file:
                listener.send(file.read())
        elif pid := os.fork():
            os.write(tell, str(pid).encode())
            os._exit(0)
        else:
            os.close(told)
            os.close(tell)
            listener.close()
            return begun(*json.loads(request), descriptors[0])


def begun(words: list[str], folder: str, environment: dict[str, str], output: int) -> Callable[[], None]:
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if words[:2] == ["-m", MAIN]:
        sys.argv, sys.path[0] = [MAIN, *words[2:]], folder
        return importlib.import_module(MAIN).main  # type: ignore[no-any-return]
    sys.argv, sys.path[0] = [*words], str(Path(words[0]).parent)
    return lambda: runpy.run_path(words[0], run_name="__main__") and None


def load() -> None:
    import torch

    for name in LOADED:
        importlib.import_module(name)
    from farloop.quant.registry import codec_named, warm
    from farloop.quant.self_test import try_codecs

    warm(CODECS)
    try_codecs(map(codec_named, CODECS), torch.device("cpu"))
    assert len(os.listdir("/proc/self/task")) == 1, "what is forked has this thread alone"


if __name__ == "__main__":
    load()
    with contextlib.closing(socket.socket(fileno=int(sys.argv[1]))) as opened:
        work = serve(opened)
    if work is not None:
        work()
