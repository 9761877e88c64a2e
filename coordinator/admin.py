"""The admin socket: a unix socket in the state folder, one JSON line in, one out.

It is not on the network, works inside a container, and admits the folder's owner: `admin.sock`, mode 0600. A request is
`{"do": "set", …}`; an answer holds the result, or `{"error": "one sentence", "not_now": …}`. `not_now` is true if the
state of the run forbids the request, and false if the request itself is wrong.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from farloop.coordinator.errors import NotNow
from farloop.coordinator.storage.files import is_locked
from farloop.monitoring.status import dumps

_log = logging.getLogger(__name__)

NAME: Final = "admin.sock"

MAX_BYTES: Final = 64 << 10  # of a request
MAX_ANSWER_BYTES: Final = 16 << 20  # a status of thousands of nodes
PATIENCE_S: Final = 10.0  # longest wait for a request after a connection
_LONGEST_PATH: Final = 107  # bytes that the address of a unix socket has room for
Request = Mapping[str, Any]
Answer = Mapping[str, Any]
Handler = Callable[[Request], Awaitable[Answer]]  # raises ValueError or NotNow, one sentence


@contextlib.contextmanager
def address_of(folder: Path) -> Iterator[str]:
    """The socket's path while the block lasts: through a descriptor, so short enough however deep the folder is."""
    plain = str((folder / NAME).absolute())
    if len(os.fsencode(plain)) <= _LONGEST_PATH:
        yield plain
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)


class AdminSocket:
    """Listens from `open` to `close`; the state's lock excludes another one."""

    def __init__(self, folder: Path, handlers: Mapping[str, Handler]) -> None:
        self._path, self._folder, self._handlers = folder / NAME, folder, handlers
        self._server: asyncio.Server | None = None
        self._inode = 0

    async def open(self) -> None:
        """Listen. Without sockets in the file system the run continues without one, and logs it."""
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)  # of a start that was killed
            with address_of(self._folder) as address:
                door.bind(address)
            self._path.chmod(0o600)  # before it listens
            self._inode = self._path.stat().st_ino
            door.setblocking(False)
            self._server = await asyncio.start_unix_server(self._serve, sock=door, limit=MAX_BYTES)
        except OSError as error:
            door.close()
            _log.warning("admin socket unavailable path=%s why=%r note='no farloop run set'", self._path, str(error))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            try:
                if self._path.stat().st_ino == self._inode:  # else that of a coordinator which took the state over
                    self._path.unlink()
            except FileNotFoundError:
                pass
            except OSError as error:  # a folder that became read-only ends the coordinator with a line of its own
                _log.warning("admin socket not removed path=%s why=%r", self._path, str(error))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await reader.readline()
            writer.write(dumps(await self._answer(line)).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ValueError, OSError) as error:  # ValueError: a line without an end
            _log.info("admin client disconnected why=%r", str(error))
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or request.get("do") not in self._handlers:
                raise ValueError(f'a request is {{"do": …}} with one of {", ".join(self._handlers)}')
            return await self._handlers[request["do"]](request)
        except NotNow as error:
            return {"error": str(error), "not_now": True}
        except (ValueError, RecursionError) as error:
            return {"error": str(error), "not_now": False}


def over(name: str, steps: int, folder: Path) -> str:
    """The refusal of a change to a finished run, and how to train on from the model in its state folder."""
    return (
        f"run {name} is finished after {steps} steps; to train on, begin another run from its weights: [run] init = "
        f'"{folder / "model.safetensors"}", with a folder of its own (--state DIR)'
    )


def ask(folder: Path, request: Request, timeout_s: float) -> Answer:
    """What the coordinator that holds this state folder answers; blocks.
    Raises OSError: no coordinator listens; TimeoutError where it takes too long.
    Raises ValueError: the answer is none, or a coordinator holds the folder and does not listen."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door, address_of(folder) as address:
            door.settimeout(timeout_s)
            door.connect(address)
            door.sendall(dumps(request).encode() + b"\n")
            with door.makefile("rb") as answers:
                answer = json.loads(answers.readline(MAX_ANSWER_BYTES))
    except (FileNotFoundError, ConnectionRefusedError):
        if is_locked(folder / "lock"):
            raise ValueError("it does not lead: it starts, or stands by for another, which is to be asked") from None
        raise
    if not isinstance(answer, dict):
        raise ValueError("that is no answer of a coordinator")
    return answer
