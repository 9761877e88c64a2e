"""`farloop journal …` and `farloop explain`: a state folder, read beside its coordinator, or repaired without it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farloop.config.exit_codes import CommandError, ended_in_one_line

journal_app = typer.Typer(
    help="Look into a coordinator's state folder, running or not; nothing but salvage --write changes it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

StateFolder = Annotated[Path, typer.Option("--state", metavar="DIR", help="The coordinator's state_dir.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")]
OneFragment = Annotated[int | None, typer.Option(metavar="N", show_default=False, help="Of this fragment alone.")]

STATE = Path("state")


@journal_app.command("show")
def show_journal(
    state: StateFolder = STATE,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", show_default=False, help="commit, delta, drop, leave, …; may be repeated."),
    ] = None,
    fragment: OneFragment = None,
    node: Annotated[str | None, typer.Option(metavar="NAME", show_default=False, help="About this node alone.")] = None,
    last: Annotated[int, typer.Option(min=1, help="How many records at most.")] = 40,
    everything: Annotated[bool, typer.Option("--all", help="Every record that the journal still has.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what was decided and stored, newest last; with --json a line per record.

    Example: farloop journal show --kind commit --fragment 0 --follow
    """
    with ended_in_one_line():
        from farloop.cli.journal_view import Filter, show

        wanted = Filter(kinds=tuple(kind or ()), fragment=fragment, node=node)
        limit = None if everything else last
        show(state, wanted, Console(highlight=False), last=limit, follow=follow, as_json=as_json)


@journal_app.command("verify")
def verify_journal(state: StateFolder = STATE, as_json: AsJson = False) -> None:
    """Hold everything in the folder against its digests and against each other; ends with 6 where it is damaged.

    Example: farloop journal verify --state state
    """
    with ended_in_one_line():
        from farloop.cli.journal_view import check

        check(state, Console(highlight=False), as_json=as_json)


@journal_app.command("salvage")
def salvage_journal(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", show_default=False, help="The same as --state DIR.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="DIR", show_default="state", help="The coordinator's state_dir."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Carry it out: move the old files into DIR/before-salvage-N, write the new.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find the newest consistent state in a folder that a start refuses, and say what would be given up.

    Changes nothing without --write. Stop the coordinator first. Ends with 6 where no consistent state is left.

    Example: farloop journal salvage --state state --write
    """
    with ended_in_one_line():
        from farloop.cli.journal_view import repair

        if folder is not None and state is not None:
            raise CommandError(f"the folder is given twice: {folder} and --state {state}; give one")
        repair(folder or state or STATE, Console(highlight=False), write=write, as_json=as_json)


@journal_app.command("replay")
def replay_journal(
    versions: Annotated[
        str, typer.Argument(metavar="[FROM:TO]", show_default="all that can be", help="Versions, as 800:812.")
    ] = ":",
    state: StateFolder = STATE,
    fragment: OneFragment = None,
    as_json: AsJson = False,
) -> None:
    """Make commits again from the stored deltas, and compare every bit; ends with 6 where one does not come out.

    It begins at a snapshot, so the oldest version that can be made again is the one behind the oldest snapshot.

    Example: farloop journal replay 800:812 --fragment 0
    """
    with ended_in_one_line():
        from farloop.cli.journal_view import again

        again(state, versions, fragment, Console(highlight=False), as_json=as_json)


def explain(
    window: Annotated[str, typer.Argument(metavar="WINDOW", help="f0:812, or 812 for that of every fragment.")],
    state: StateFolder = STATE,
    as_json: AsJson = False,
) -> None:
    """Say why a window closed as it did: who was expected, who came when, weights, who is missing and why.

    Example: farloop explain f0:812
    """
    with ended_in_one_line():
        from farloop.cli.explain import explain_window

        explain_window(state, window, Console(highlight=False), as_json=as_json)
