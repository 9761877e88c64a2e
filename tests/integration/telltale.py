"""A coordinator as `farloop coordinator` starts it, that also tells a file of every token it makes.

Its tokens are of hex digits, which look the same in every kind of text.

    python telltale.py TOKENS coordinator RUN.toml ...
"""

import os
import secrets
import sys
from pathlib import Path
from typing import TextIO

from farloop.cli.main import main


def tell(tokens: TextIO) -> None:
    def telling(size: int | None = None) -> bytes:
        assert size
        token = os.urandom(size).hex()[:size]
        tokens.write(f"{token}\n")
        return token.encode()

    setattr(secrets, "token_bytes", telling)  # noqa: B010 - replaced for good


if __name__ == "__main__":
    with Path(sys.argv[1]).open("a", buffering=1) as file:
        del sys.argv[1]
        tell(file)
        main()
