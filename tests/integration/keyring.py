"""Keys of a run, made and handed round as a person does it."""

from pathlib import Path
from typing import Any

from loopback import FARLOOP, Run


def new_keys(run: Run, *names: str) -> Path:
    """A folder of pairs, and an empty allow-list."""
    _commands(run, {name: ("new", "keys", "--name", name) for name in names})
    (run.folder / "allow").mkdir()
    run.tables["coordinator"] |= {
        "key": str(run.folder / "keys" / "coordinator.key"),
        "allow": str(run.folder / "allow"),
    }
    return run.folder / "keys"


def authorize(run: Run, *names: str) -> None:
    """Let these in, also while the coordinator runs."""
    _commands(run, {name: ("authorize", f"keys/{name}.pub", "--allow", "allow") for name in names})


def revoke(run: Run, name: str) -> None:
    """Shut this one out, also while the coordinator runs."""
    _commands(run, {name: ("revoke", name, "--allow", "allow")})


def keys_of(keys: Path, name: str) -> dict[str, Any]:
    """What a node's file says of them."""
    return {"key": str(keys / f"{name}.key"), "server_key": str(keys / "coordinator.pub")}


def _commands(run: Run, all_words: dict[str, tuple[str, ...]]) -> None:
    for command in [run.start(f"keys-{name}", *FARLOOP, "keys", *words) for name, words in all_words.items()]:
        assert run.until_ended(command) == 0, run.logs()
