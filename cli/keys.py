"""Makes the key pair of one daemon as two files."""

import contextlib
import os
from pathlib import Path

from farloop.cli.exit_codes import CommandError
from farloop.node.link import new_key_pair
from farloop.wire.keys import check_name


def write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """`NAME.key`, mode 0600, and `NAME.pub` in a folder that is made where it is missing.

    Raises:
        CommandError: one of the files is there already, or cannot be written; nothing was changed.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise CommandError(f"--name: {error}") from error
    secret_path, public_path = folder / f"{name}.key", folder / f"{name}.pub"
    for path in (secret_path, public_path):
        if path.exists():
            raise CommandError(f"{path} exists, and keys are never overwritten; delete it, or choose another --name")
    public, secret = new_key_pair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(secret_path, secret, 0o600)
        try:
            _write_new(public_path, public, 0o644)
        except OSError:
            secret_path.unlink()
            raise
    except OSError as error:
        raise CommandError(f"cannot write keys to {folder}: {(error.strerror or str(error)).lower()}") from error
    return secret_path, public_path


def _write_new(path: Path, key: bytes, mode: int) -> None:
    """The mode is set at birth: at no moment is a secret open to others."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
