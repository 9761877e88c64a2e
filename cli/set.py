"""`farloop run set`, `release` and `forget`: requests to a running coordinator through its admin socket."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from farloop.cli.options import STATE, AsJson, Commands, StateFolder
from farloop.monitoring.status import dumps

run_app = Commands("Change a live run, or let it go on, through its coordinator.")

DisbelievedNodes = Annotated[
    list[str] | None, typer.Option("--node", show_default=False, help="A node whose claim is wrong; repeatable.")
]


@run_app.command("set")
def set_terms(
    words: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE…", show_default=False, help="E.g. h=60; an unknown KEY lists all."),
    ],
    state: StateFolder = STATE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the change without making it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Change hyperparameters of a live run; some apply from the next window, others from a later round.

    Example: farloop run set outer_lr=0.5 codec_up=q8 --state state --dry-run
    """
    from farloop.config.admin_client import change_terms

    answer = change_terms(words, state, dry_run=dry_run)
    typer.echo(dumps(answer) if as_json else "\n".join(lines(answer)))


@run_app.command()
def release(state: StateFolder = STATE, node: DisbelievedNodes = None) -> None:
    """Continue a run that is held because of its nodes.

    A node that reports newer versions than the state folder has is rejected until it withdraws the report, and the
    run continues with the first other node: use this if you know that the node is wrong. If several report it, the
    folder is probably an old copy, and each must be named. A run of which too few live nodes are merged continues,
    and is held again if that is so three rounds later.

    Example: farloop run release --state state
    """
    from farloop.config.admin_client import asked

    answer = asked({"do": "release", **({"nodes": node} if node else {})}, state)
    typer.echo(f"released: {answer['held']}")
    typer.echo(answer["still"] or "the run continues")


@run_app.command()
def forget(
    node: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The node.")],
    state: StateFolder = STATE,
) -> None:
    """Stop missing a node that does not come back: a lost machine, a revoked key, another name.

    It vanishes from status, metrics and alerts, and its samples go to others, until it comes back under this
    name.

    Example: farloop run forget oslo --state state
    """
    from farloop.config.admin_client import asked

    known = asked({"do": "forget", "node": node}, state)["nodes"]
    typer.echo(f"node {node} is forgotten; known nodes: {', '.join(known) or 'none'}")


def lines(answer: Mapping[str, Any]) -> list[str]:
    head = "would be" if answer["dry_run"] else "is"
    rows = [f"{c['key']} {_shown(c['before'])} → {_shown(c['after'])} from {c['from']} on" for c in answer["changes"]]
    return [f"revision {answer['revision']} {head}:", *(f"  {row}" for row in rows)]


def _shown(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else dumps(value)
