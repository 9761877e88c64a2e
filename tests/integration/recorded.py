"""A daemon as its command starts it, but its machine keeps a tape, and its journal every segment.

The tape is written when the daemon ends; one that is killed leaves none.

    python recorded.py TAPE coordinator RUN.toml
    python recorded.py TAPE node NODE.toml
"""

import sys
from pathlib import Path
from unittest import mock

from tapes import recording

from farloop.cli.main import main
from farloop.coordinator.storage.journal import Journal


def record(file: Path, *command: str) -> None:
    with recording() as tapes, mock.patch.object(Journal, "prune", lambda *_: None):
        sys.argv = ["farloop", *command]
        try:
            main()
        finally:
            (tape,) = tapes
            file.write_text(tape.dumps())


if __name__ == "__main__":
    record(Path(sys.argv[1]), *sys.argv[2:])
