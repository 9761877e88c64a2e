"""Key pairs as files."""

from pathlib import Path

import pytest

from farloop.cli.keys import authorize, listed, revoke, write_pair
from farloop.config.exit_codes import CommandError
from farloop.wire.keys import AllowList, KeyFileError, load_public, load_secret


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


# --- the allow-list


@pytest.fixture
def allow(tmp_path: Path) -> Path:
    folder = tmp_path / "allow"
    folder.mkdir()
    return folder


def public_of(tmp_path: Path, name: str) -> Path:
    return write_pair(tmp_path / "keys", name)[1]


def names_in(folder: Path) -> list[str]:
    """Everything there, drafts and other litter included."""
    return sorted(path.name for path in folder.iterdir())


def test_who_is_authorized_comes_in_and_who_is_revoked_does_not(tmp_path: Path, allow: Path) -> None:
    allowed = AllowList(allow)
    oslo, lima = public_of(tmp_path, "oslo"), public_of(tmp_path, "lima")
    assert authorize(allow, oslo, "oslo") and authorize(allow, lima, "lima")
    allowed.refresh()
    assert allowed.keys == {"oslo": load_public(oslo), "lima": load_public(lima)}
    assert revoke(allow, "oslo") == []
    allowed.refresh()
    assert (allowed.owner(load_public(oslo)), allowed.owner(load_public(lima))) == (None, "lima")
    assert names_in(allow) == ["lima.pub"]


def test_to_authorize_twice_changes_nothing(tmp_path: Path, allow: Path) -> None:
    oslo = public_of(tmp_path, "oslo")
    assert authorize(allow, oslo, "oslo")
    before = (allow / "oslo.pub").stat()
    assert not authorize(allow, oslo, "oslo")
    assert (allow / "oslo.pub").stat().st_ino == before.st_ino


def test_a_name_or_a_key_that_is_taken_is_refused_with_the_mend(tmp_path: Path, allow: Path) -> None:
    oslo, lima = public_of(tmp_path, "oslo"), public_of(tmp_path, "lima")
    authorize(allow, oslo, "oslo")
    with pytest.raises(CommandError, match=r"holds another key; to change it: farloop keys revoke oslo --allow "):
        authorize(allow, lima, "oslo")
    with pytest.raises(CommandError, match=r"holds the same key: .*; revoke oslo first"):
        authorize(allow, oslo, "lima")
    assert load_public(allow / "oslo.pub") == load_public(oslo) and names_in(allow) == ["oslo.pub"]


def test_a_secret_never_gets_into_the_folder(tmp_path: Path, allow: Path) -> None:
    """Both halves look alike: 40 characters."""
    secret, _ = write_pair(tmp_path / "keys", "oslo")
    with pytest.raises(CommandError, match=r"oslo\.key is a secret key by its name.*; authorize oslo\.pub"):
        authorize(allow, secret, "oslo")
    assert names_in(allow) == []


def test_what_cannot_be_authorized_is_told_in_a_line(tmp_path: Path, allow: Path) -> None:
    oslo = public_of(tmp_path, "oslo")
    with pytest.raises(CommandError, match=r"'a b' is no node name: .*--name"):
        authorize(allow, oslo, "a b")
    with pytest.raises(KeyFileError, match=r"cannot read the key file .*nowhere\.pub"):
        authorize(allow, tmp_path / "nowhere.pub", "oslo")
    with pytest.raises(KeyFileError, match="is not a folder; put the nodes"):
        authorize(tmp_path / "typo", oslo, "oslo")
    assert not (tmp_path / "typo").exists(), "a folder that nobody reads would let nobody in"
    (allow / "broken.pub").write_text("half a key")
    with pytest.raises(KeyFileError, match=r"broken\.pub is no key file"):
        authorize(allow, oslo, "oslo")
    assert names_in(allow) == ["broken.pub"]


def test_a_write_that_fails_leaves_no_litter(tmp_path: Path, allow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oslo = public_of(tmp_path, "oslo")

    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CommandError, match=r"cannot write to .*no space left on device"):
        authorize(allow, oslo, "oslo")
    assert names_in(allow) == []


def test_a_name_that_is_not_there_is_told_with_those_that_are(tmp_path: Path, allow: Path) -> None:
    with pytest.raises(CommandError, match="holds no key of 'osl'; it holds those of: nobody"):
        revoke(allow, "osl")
    authorize(allow, public_of(tmp_path, "oslo"), "oslo")
    for typo in ("osl", "../allow/oslo", "oslo.pub", ""):
        with pytest.raises(CommandError, match="it holds those of: oslo"):
            revoke(allow, typo)
    assert names_in(allow) == ["oslo.pub"]


def test_a_broken_file_can_be_revoked_and_stands_in_no_ones_way(tmp_path: Path, allow: Path) -> None:
    authorize(allow, public_of(tmp_path, "oslo"), "oslo")
    (allow / "a b.pub").write_text("half a key")
    revoke(allow, "oslo")
    revoke(allow, "a b")
    assert names_in(allow) == []


def test_a_key_that_is_there_twice_is_told_when_one_is_revoked(tmp_path: Path, allow: Path) -> None:
    oslo = public_of(tmp_path, "oslo")
    for name in ("oslo", "twin"):
        (allow / f"{name}.pub").write_bytes(oslo.read_bytes())
    assert [(name, good) for name, _, good in listed(allow)] == [("oslo", True), ("twin", False)]
    assert revoke(allow, "oslo") == ["twin"]
    assert revoke(allow, "twin") == []


def test_the_list_shows_keys_and_what_is_wrong(tmp_path: Path, allow: Path) -> None:
    oslo = public_of(tmp_path, "oslo")
    authorize(allow, oslo, "oslo")
    (allow / "broken.pub").write_text("half a key")
    broken, good = listed(allow)
    assert good == ("oslo", load_public(oslo).decode(), True)
    assert broken[0] == "broken" and "is no key file" in broken[1] and not broken[2]
