"""`farloop keys …`: pairs of keys, and who may come in."""

import platform
from pathlib import Path
from typing import Annotated

import typer

from farloop.config.exit_codes import CommandError, ended_in_one_line

keys_app = typer.Typer(
    help="Make the keys of encrypted links, and say who may come in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AllowFolder = Annotated[Path, typer.Option("--allow", metavar="DIR", help="The coordinator's [coordinator] allow.")]

ALLOWED = Path("allowed")


@keys_app.command("new")
def new_keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="Made where it is missing.")],
    name: Annotated[
        str, typer.Option(metavar="NAME", show_default="this host's name", help="The node's name in the run.")
    ] = "",
) -> None:
    """Make a key pair: NAME.key stays secret (mode 0600), NAME.pub is for the other side.

    Example: farloop keys new keys --name paris
    """
    with ended_in_one_line():
        from farloop.cli.keys import write_pair

        secret, public = write_pair(folder, name or platform.node().partition(".")[0])
        typer.echo(f"{secret}  secret: stays on this machine, as key = '{secret}' in its TOML file")
        typer.echo(
            f"{public}  public: a node's goes into the coordinator's allow folder (farloop keys authorize), "
            "the coordinator's to every node"
        )


@keys_app.command("authorize")
def authorize_key(
    file: Annotated[
        Path, typer.Argument(metavar="PUBKEY_FILE", show_default=False, help="The node's .pub; a secret stays there.")
    ],
    allow: AllowFolder = ALLOWED,
    name: Annotated[
        str, typer.Option(metavar="NAME", show_default="the file's", help="The node's name in the run.")
    ] = "",
) -> None:
    """Let a node in: its public key goes into the allow folder, also while the coordinator runs.

    Example: farloop keys authorize paris.pub --allow allowed
    """
    with ended_in_one_line():
        from farloop.cli.keys import authorize

        name = name or file.stem
        if authorize(allow, file, name):
            typer.echo(f"{name} may come in: {allow / f'{name}.pub'}; a coordinator that runs knows within 2 s")
        else:
            typer.echo(f"{name} may come in already, with this key: {allow / f'{name}.pub'}")


@keys_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="As farloop keys list shows it.")],
    allow: AllowFolder = ALLOWED,
) -> None:
    """Shut a node out: its key leaves the allow folder, and a session that it has ends.

    Example: farloop keys revoke paris --allow allowed
    """
    with ended_in_one_line():
        from farloop.cli.keys import revoke

        if twins := revoke(allow, name):
            raise CommandError(
                f"{name}.pub is gone, but its key may still come in as {', '.join(twins)}: revoke that too"
            )
        typer.echo(f"{name} may come in no more; a coordinator that runs ends its session within 2 s")


@keys_app.command("list")
def list_keys(allow: AllowFolder = ALLOWED) -> None:
    """Show who may come in: a name and a public key a line. Ends with 2 where a file cannot be used.

    Example: farloop keys list --allow allowed
    """
    with ended_in_one_line():
        from farloop.cli.keys import listed

        found = listed(allow)
        width = max((len(name) for name, _, _ in found), default=0)
        for name, words, good in found:
            typer.echo(f"{name:<{width}}  {words if good else f'unusable: {words}'}")
        if not found:
            typer.echo(f"nobody may come in: {allow} holds no .pub file")
        if bad := [name for name, _, good in found if not good]:
            raise CommandError(f"nobody new is let in until these are mended or revoked: {', '.join(bad)}")
