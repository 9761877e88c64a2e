"""`farloop set` and `farloop release`: ask a running coordinator through its admin socket."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from farloop.cli.journal_commands import STATE, AsJson, StateFolder
from farloop.config.admin_client import asked, change_terms
from farloop.config.exit_codes import ended_in_one_line

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


def lines(answer: Mapping[str, Any]) -> list[str]:
    """What changes and from where on, as a person reads it."""
    head = "would be" if answer["dry_run"] else "is"
    rows = [f"{c['key']} {_shown(c['before'])} → {_shown(c['after'])} from {c['from']} on" for c in answer["changes"]]
    return [f"revision {answer['revision']} {head}:", *(f"  {row}" for row in rows)]


def _shown(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
