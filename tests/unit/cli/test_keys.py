"""Key pairs as files."""

from pathlib import Path

import pytest

from farloop.cli.exit_codes import CommandError
from farloop.cli.keys import write_pair
from farloop.wire.keys import load_public, load_secret


def test_a_pair_is_what_the_daemons_take(tmp_path: Path) -> None:
    secret, public = write_pair(tmp_path / "new" / "keys", "oslo")
    assert (secret.name, public.name) == ("oslo.key", "oslo.pub")
    assert load_secret(secret) != load_public(public)


def test_the_secret_is_closed_to_others(tmp_path: Path) -> None:
    secret, _ = write_pair(tmp_path / "keys", "oslo")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("there", ["oslo.key", "oslo.pub"])
def test_nothing_is_overwritten_not_even_half_of_a_pair(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("old")
    with pytest.raises(CommandError, match="never overwritten"):
        write_pair(tmp_path, "oslo")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, "old")]


def test_a_name_that_no_node_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"--name: '\.\./x' is no node name"):
        write_pair(tmp_path, "../x")


def test_a_folder_that_cannot_be_made_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="cannot write keys to"):
        write_pair(tmp_path / "file" / "keys", "oslo")
