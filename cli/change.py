"""`farloop set` and `farloop release`: what is asked of a running coordinator at its door."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from farloop.cli.exit_codes import CommandError, ExitCode, ended_in_one_line
from farloop.cli.journal_commands import STATE, AsJson, StateFolder
from farloop.coordinator.admin import NAME, ask

TIMEOUT_S = 60.0
"""For an answer: it comes once the change is durable, and a disk may have to be emptied first."""

DisbelievedNodes = Annotated[
    list[str] | None,
    typer.Option("--node", show_default=False, help="A node that is wrong; once for each by which the run is held."),
]


def set_terms(
    words: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE…", show_default=False, help="As outer_lr=0.5, h=60, codec_up=q8.")
    ],
    state: StateFolder = STATE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Change a run while it goes on: what its windows have from the next ones on, its rounds from a later one on.

    Example: farloop set outer_lr=0.5 codec_up=q8 --state state --dry-run
    """
    with ended_in_one_line():
        answer = change_terms(words, state, dry_run=dry_run)
        typer.echo(json.dumps(answer) if as_json else "\n".join(lines(answer)))


def change_terms(words: Sequence[str], state: Path, *, dry_run: bool) -> Mapping[str, Any]:
    """Ask the coordinator of this state folder; its answer.

    Raises:
        CommandError: the words are none, no coordinator runs there, or it refused: one line each.
    """
    return asked({"do": "set", "given": _given(words), "dry_run": dry_run}, state)


def release(state: StateFolder = STATE, node: DisbelievedNodes = None) -> None:
    """Go on with a run that is held because a node says it has seen more than the state folder holds.

    The node is kept out until it takes that back; the run goes on with the first other node. Use it when you know that
    the node is wrong. Where several nodes say so, the state folder is probably an old copy, and each has to be named.

    Example: farloop release --state state
    """
    with ended_in_one_line():
        answer = asked({"do": "release", **({"nodes": node} if node else {})}, state)
        typer.echo(f"not believed any more: {answer['held']}")
        still = answer.get("still")
        typer.echo(f"the run is still held: {still}" if still else "the run goes on")


def asked(request: Mapping[str, Any], state: Path) -> Mapping[str, Any]:
    """What the coordinator of this state folder answers. Raises CommandError, as `change_terms`; NoFolder."""
    from farloop.coordinator.reading import state_folder

    state_folder(state)
    try:
        answer = ask(state, request, TIMEOUT_S)
    except TimeoutError as error:
        raise CommandError(
            f"no answer from {state / NAME} within {TIMEOUT_S:g} s: farloop status says whether its disk is full",
            ExitCode.UNREACHABLE,
        ) from error
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise CommandError(
            f"no coordinator at {state / NAME}: {what.lower()}; is one running on this folder?", ExitCode.UNREACHABLE
        ) from error
    if "error" in answer:
        raise CommandError(str(answer["error"]), ExitCode.REFUSED)
    return answer


def lines(answer: Mapping[str, Any]) -> list[str]:
    """What changes and from where on, as a person reads it."""
    head = "would be" if answer["dry_run"] else "is"
    rows = [f"{c['key']} {_shown(c['before'])} → {_shown(c['after'])} from {c['from']} on" for c in answer["changes"]]
    return [f"revision {answer['revision']} {head}:", *(f"  {row}" for row in rows)]


def _shown(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _given(words: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise CommandError(f"{word!r} is not KEY=VALUE, as outer_lr=0.5")
        if key.strip() in given:
            raise CommandError(f"{key.strip()} is set twice")
        given[key.strip()] = text
    return given
