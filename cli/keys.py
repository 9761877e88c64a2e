"""`farloop keys`: key pairs, and the allow folder with the public keys of the nodes that may join."""

import contextlib
import os
import platform
import secrets
from pathlib import Path
from typing import Annotated

import typer

from farloop.cli.options import Commands
from farloop.config.exit_codes import CommandError, cannot_write
from farloop.wire.keys import KeyFileError, check_name, fingerprint, key_files, load_public, load_publics

keys_app = Commands("Create keys for encrypted links and manage the allow list.")

AllowFolder = Annotated[Path, typer.Option("--allow", metavar="DIR", help="The coordinator's folder of public keys.")]

ALLOWED = Path("allowed")
NEXT = ".next"  # ends the name of the pair that a rotation makes beside the old one


@keys_app.command("new")
def new_keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="Created if it is missing.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="this host's name", help="The node's name in the run.")
    ] = None,
) -> None:
    """Create a key pair: NAME.key is secret (mode 0600), NAME.pub is for the other side.

    Example: farloop keys new keys --name paris
    """
    secret, public = write_pair(folder, platform.node().partition(".")[0] if name is None else name)
    typer.echo(f"{secret}  secret: stays on this machine, as key = '{secret}' in its TOML file")
    typer.echo(
        f"{public}  public: a node's goes into the coordinator's allow folder (farloop keys authorize), "
        "the coordinator's to every node"
    )


@keys_app.command("rotate")
def rotate_key(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The node's name in the run.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of its key files.")] = Path("keys"),
    switch: Annotated[
        bool, typer.Option("--switch", help="Put the next pair in the place of the old one, which is deleted.")
    ] = False,
) -> None:
    """Make the next key pair beside the old one; once it is authorized, switch to it.

    Example: farloop keys rotate paris keys
    """
    if switch:
        switch_pair(folder, name)
        typer.echo(f"{folder / name}.key is the new key: restart the daemon that uses it")
        return typer.echo(f"then, on the coordinator's machine: farloop keys revoke {name} --old")
    if not (folder / f"{name}.key").exists():
        raise CommandError(f"{folder} holds no {name}.key to rotate; make a pair with: farloop keys new DIR")
    _, public = write_pair(folder, f"{name}{NEXT}")
    typer.echo(f"{public}  public: for the coordinator's machine: farloop keys authorize {public.name}")
    typer.echo(f"then, here: farloop keys rotate {name} {folder} --switch")


@keys_app.command("authorize")
def authorize_key(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="PUBKEY_FILE", show_default=False, help="The node's .pub file; its .key file stays on the node."
        ),
    ],
    allow: AllowFolder = ALLOWED,
    name: Annotated[
        str, typer.Option(metavar="NAME", show_default="the file's", help="The node's name in the run.")
    ] = "",
) -> None:
    """Admit a node: copy its public key into the allow folder, also while the coordinator runs.

    NAME.next.pub, of farloop keys rotate, is admitted beside the key of NAME that is there.

    Example: farloop keys authorize paris.pub --allow allowed
    """
    name = name or file.stem.removesuffix(NEXT)
    if authorize(allow, file, name):
        typer.echo(f"{name} is admitted: {allow / f'{name}.pub'}; a running coordinator knows within 2 s")
    else:
        typer.echo(f"{name} is already admitted with this key: {allow / f'{name}.pub'}")


@keys_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="As farloop keys list shows it.")],
    allow: AllowFolder = ALLOWED,
    old: Annotated[bool, typer.Option("--old", help="Remove the old key alone: the next one stays.")] = False,
) -> None:
    """Remove a node's key from the allow folder, and end its session.

    Example: farloop keys revoke paris --allow allowed
    """
    if old:
        revoke_old(allow, name)
        return typer.echo(f"{name} is admitted with its next key alone; a running coordinator knows within 2 s")
    if twins := revoke(allow, name):
        raise CommandError(
            f"{name}.pub is removed, but its key is still admitted as {', '.join(twins)}: revoke that too"
        )
    typer.echo(f"{name} is no longer admitted; a running coordinator ends its session within 2 s")
    typer.echo(f"to end alerts about it: farloop run forget {name}")


@keys_app.command("list")
def list_keys(allow: AllowFolder = ALLOWED) -> None:
    """List the admitted nodes: name and fingerprint of the key, one per line. Exits with 2 if a file cannot be used.

    Example: farloop keys list --allow allowed
    """
    found = listed(allow)
    width = max((len(name) for name, _, _ in found), default=0)
    for name, words, good in found:
        typer.echo(f"{name:<{width}}  {words if good else f'unusable: {words}'}")
    if not found:
        typer.echo(f"no node is admitted: {allow} holds no .pub file")
    if bad := [name for name, _, good in found if not good]:
        raise CommandError(f"no new node is admitted until these files are fixed or revoked: {', '.join(bad)}")


def write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """`NAME.key`, mode 0600, and `NAME.pub` in a folder that is made where it is missing.

    Raises CommandError: one of the files is there already, or cannot be written; nothing was changed.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise CommandError(f"--name: {error}") from error
    secret_path, public_path = _pair(folder, name)
    for path in (secret_path, public_path):
        if path.exists():
            raise CommandError(f"{path} exists, and keys are never overwritten; delete it, or choose another --name")
    from farloop.node.zmq_dealer import new_key_pair

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
        raise cannot_write(folder, error) from error
    return secret_path, public_path


def _pair(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.key", folder / f"{name}.pub"


def switch_pair(folder: Path, name: str) -> None:
    """The next pair takes the place of the old one; one that was switched by half is switched.

    Raises CommandError: there is no next pair, or it cannot be moved.
    """
    moves = [(new, old) for new, old in zip(_pair(folder, f"{name}{NEXT}"), _pair(folder, name), strict=True)]
    if not any(new.exists() for new, _ in moves):
        raise CommandError(f"{folder} holds no {name}{NEXT}.key; make it with: farloop keys rotate {name} {folder}")
    try:
        for new, old in moves:
            if new.exists():
                new.replace(old)
        _sync(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


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


def authorize(folder: Path, public_path: Path, name: str) -> bool:
    """Let the node `name` in with the key in `public_path`; False where it was let in already.

    A coordinator that reads the folder meanwhile sees the file whole or not at all.
    Raises CommandError: no such name, not a public key's file, the name or the key is taken, or nothing can be written.
    Raises KeyFileError: the file, or one that is in the folder, cannot be used.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise CommandError(f"{error}; give it one with --name") from error
    if public_path.suffix == ".key":
        raise CommandError(
            f"{public_path} is a secret key by its name, and must stay on its node; "
            f"authorize {public_path.with_suffix('.pub').name}"
        )
    key = load_public(public_path)
    old = list[bytes]()
    for path in key_files(folder):
        there = load_publics(path)
        if path.stem == name and key in there:
            return False
        if path.stem == name:
            old = there
            if not public_path.stem.endswith(NEXT):
                raise CommandError(
                    f"{path} holds another key; to change it: farloop keys rotate {name}, on its machine; or farloop "
                    f"keys revoke {name} --allow {folder}, then authorize"
                )
            if len(old) > 1:
                raise CommandError(f"{path} holds two keys; first: farloop keys revoke {name} --old --allow {folder}")
        elif key in there:
            raise CommandError(
                f"{path} holds the same key: a node has one name; revoke {path.stem} first, or make a pair"
            )
    _replace(folder, name, [*old, key])
    return True


def _replace(folder: Path, name: str, keys: list[bytes]) -> None:
    """Let these keys of a node in, and no others. Raises CommandError."""
    draft = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        _write_new(draft, b"\n".join(keys), 0o644)
        try:
            draft.replace(folder / f"{name}.pub")
        except OSError:
            draft.unlink()
            raise
        _sync(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def revoke_old(folder: Path, name: str) -> None:
    """Take all but the newest key of the node `name` out of the folder. Raises CommandError, KeyFileError."""
    path = folder / f"{name}.pub"
    keys = load_publics(path) if path in key_files(folder) else []
    if len(keys) < 2:
        raise CommandError(
            f"{folder} holds no next key of {name!r}: farloop keys authorize {name}{NEXT}.pub comes first"
        )
    _replace(folder, name, keys[-1:])


def revoke(folder: Path, name: str) -> list[str]:
    """Take the key of the node `name` out of the folder, whatever is in the file.

    Returns:
        Names under which the same key is still in the folder.

    Raises:
        CommandError: there is none, or it cannot be removed.
        KeyFileError: the folder cannot be read.
    """
    files = {path.stem: path for path in key_files(folder)}
    if name not in files:
        raise CommandError(f"{folder} holds no key of {name!r}; it holds those of: {', '.join(files) or 'no node'}")
    path = files.pop(name)
    keys = _keys_in(path)
    try:
        path.unlink()
        _sync(folder)
    except OSError as error:
        raise CommandError(f"cannot remove {path}: {(error.strerror or str(error)).lower()}") from error
    return [other for other, file in files.items() if keys & _keys_in(file)]


def listed(folder: Path) -> list[tuple[str, str, bool]]:
    """Name, fingerprint and True of each key in the folder; or name, what is wrong with it, and False.

    Raises KeyFileError: the folder cannot be read.
    """
    found: list[tuple[str, str, bool]] = []
    for path in key_files(folder):
        try:
            check_name(path.stem)
            keys = load_publics(path)
        except (KeyFileError, ValueError) as error:
            found.append((path.stem, str(error), False))
            continue
        for key in map(fingerprint, keys):
            twin = next((name for name, other, good in found if good and other == key), None)
            words = f"the same key as {twin}'s: a node has one name" if twin else key
            found.append((path.stem, words, not twin))
    return found


def _keys_in(path: Path) -> set[bytes]:
    try:
        return set(load_publics(path))
    except KeyFileError:
        return set()


def _sync(folder: Path) -> None:
    """A revocation that a power cut undoes is none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
