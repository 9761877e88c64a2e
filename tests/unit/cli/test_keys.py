"""`farloop keys`: pairs of keys as files, and the allow folder that a coordinator reads."""

from pathlib import Path

import pytest
from command_line import error_line, farloop

from farloop.cli.keys import write_pair
from farloop.config.exit_codes import ExitCode
from farloop.wire.keys import AllowList, KeyFileError, fingerprint, load_public, load_publics, load_secret


@pytest.fixture
def allow(tmp_path: Path) -> Path:
    folder = tmp_path / "allow"
    folder.mkdir()
    return folder


@pytest.fixture
def oslo(tmp_path: Path) -> Path:
    return write_pair(tmp_path / "keys", "oslo")[1]


@pytest.fixture
def lima(tmp_path: Path) -> Path:
    return write_pair(tmp_path / "keys", "lima")[1]


def said(command: str, *words: object, allow: Path) -> str:
    result = farloop("keys", command, *map(str, words), "--allow", str(allow))
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(command: str, *words: object, allow: Path) -> str:
    return error_line("keys", command, *map(str, words), "--allow", str(allow))


def names_in(folder: Path) -> list[str]:
    """Everything there, drafts included."""
    return sorted(path.name for path in folder.iterdir())


def test_a_pair_is_what_the_daemons_read_and_its_secret_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    result = farloop("keys", "new", str(folder), "--name", "oslo")
    assert [line.split()[0] for line in result.stdout.splitlines()] == [f"{folder}/oslo.key", f"{folder}/oslo.pub"]
    secret = load_secret(folder / "oslo.key")
    assert secret != load_public(folder / "oslo.pub") and secret.decode() not in result.stdout
    assert (folder / "oslo.key").stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("there", ["oslo.key", "oslo.pub"])
def test_a_pair_that_cannot_be_made_is_one_line_and_nothing_is_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("old")
    assert "never overwritten" in error_line("keys", "new", str(tmp_path), "--name", "oslo")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, "old")]
    assert "--name: '' is not a node name" in error_line("keys", "new", str(tmp_path), "--name", "")
    assert "--name: '../x' is not a node name" in error_line("keys", "new", str(tmp_path), "--name", "../x")
    assert "is a file, not a folder" in error_line("keys", "new", str(tmp_path / there / "keys"), "--name", "oslo")


def test_authorized_nodes_are_allowed_and_revoked_ones_are_not(allow: Path, oslo: Path, lima: Path) -> None:
    allowed = AllowList(allow)
    assert said("list", allow=allow).startswith("no node is admitted")
    assert said("authorize", oslo, allow=allow).startswith("oslo is admitted: ")
    assert said("authorize", lima, "--name", "lima-2", allow=allow).startswith("lima-2 is admitted: ")
    inode = (allow / "oslo.pub").stat().st_ino
    assert "already" in said("authorize", oslo, allow=allow) and (allow / "oslo.pub").stat().st_ino == inode
    listed = dict(line.split() for line in said("list", allow=allow).splitlines())
    assert listed == {"lima-2": fingerprint(load_public(lima)), "oslo": fingerprint(load_public(oslo))}
    allowed.refresh()
    assert allowed.keys == {"oslo": (load_public(oslo),), "lima-2": (load_public(lima),)}
    said("revoke", "oslo", allow=allow)
    allowed.refresh()
    assert (allowed.owner(load_public(oslo)), allowed.owner(load_public(lima))) == (None, "lima-2")
    assert names_in(allow) == ["lima-2.pub"]


def test_a_name_or_a_key_that_is_taken_is_refused_with_the_fix(allow: Path, oslo: Path, lima: Path) -> None:
    said("authorize", oslo, allow=allow)
    taken = refused("authorize", lima, "--name", "oslo", allow=allow)
    assert "holds another key; to change it: farloop keys rotate oslo, on its machine; or farloop keys revoke" in taken
    twice = refused("authorize", oslo, "--name", "lima", allow=allow)
    assert "holds the same key: " in twice and "; revoke oslo first" in twice
    assert load_public(allow / "oslo.pub") == load_public(oslo) and names_in(allow) == ["oslo.pub"]


def test_what_cannot_be_authorized_is_one_line_and_leaves_the_folder(tmp_path: Path, allow: Path, oslo: Path) -> None:
    secret = refused("authorize", oslo.with_suffix(".key"), allow=allow)
    assert "oslo.key is a secret key by its name" in secret and "; authorize oslo.pub" in secret
    assert "'a b' is not a node name: " in refused("authorize", oslo, "--name", "a b", allow=allow)
    assert "cannot read the key file " in refused("authorize", tmp_path / "nowhere.pub", allow=allow)
    assert "is not a folder; put the nodes" in refused("authorize", oslo, allow=tmp_path / "typo")
    assert not (tmp_path / "typo").exists()
    (allow / "broken.pub").write_text("half a key")
    assert "broken.pub is not a key file" in refused("authorize", oslo, allow=allow)
    assert names_in(allow) == ["broken.pub"]


def test_a_write_that_fails_leaves_no_draft(allow: Path, oslo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    line = error_line("keys", "authorize", str(oslo), "--allow", str(allow), code=ExitCode.STORAGE)
    assert f"cannot write {allow}: no space left on device" in line
    assert names_in(allow) == []


def test_only_names_that_are_there_can_be_revoked_broken_files_included(allow: Path, oslo: Path) -> None:
    assert "holds no key of 'osl'; it holds those of: no node" in refused("revoke", "osl", allow=allow)
    said("authorize", oslo, allow=allow)
    for typo in ("osl", "../allow/oslo", "oslo.pub", ""):
        assert "it holds those of: oslo" in refused("revoke", typo, allow=allow)
    (allow / "a b.pub").write_text("half a key")
    said("revoke", "oslo", allow=allow)
    said("revoke", "a b", allow=allow)
    assert names_in(allow) == []


def test_unusable_files_and_keys_that_are_there_twice_are_listed(allow: Path, oslo: Path) -> None:
    for name in ("oslo", "twin"):
        (allow / f"{name}.pub").write_bytes(oslo.read_bytes())
    (allow / "broken.pub").write_text("half a key")
    listed = farloop("keys", "list", "--allow", str(allow))
    assert listed.exit_code == 2 and listed.stderr.rstrip().endswith("fixed or revoked: broken, twin")
    broken, good, twin = listed.stdout.splitlines()
    assert "is not a key file" in broken and good.split() == ["oslo", fingerprint(load_public(oslo))]
    assert "unusable: the same key as oslo's" in twin
    assert "is still admitted as twin" in refused("revoke", "oslo", allow=allow)


def test_a_rotated_key_is_admitted_beside_the_old_one_until_that_is_revoked(allow: Path, oslo: Path) -> None:
    keys, allowed = oslo.parent, AllowList(allow)
    said("authorize", oslo, allow=allow)
    old = load_public(oslo)
    farloop("keys", "rotate", "oslo", str(keys))
    following = load_public(keys / "oslo.next.pub")
    assert "holds no next key of 'oslo'" in refused("revoke", "oslo", "--old", allow=allow)
    assert said("authorize", keys / "oslo.next.pub", allow=allow).startswith("oslo is admitted: ")
    assert "already" in said("authorize", keys / "oslo.next.pub", allow=allow)
    allowed.refresh()
    assert allowed.keys == {"oslo": (old, following)} and len(said("list", allow=allow).splitlines()) == 2
    assert "never overwritten" in error_line("keys", "rotate", "oslo", str(keys))
    assert farloop("keys", "rotate", "oslo", str(keys), "--switch").exit_code == 0
    assert names_in(keys) == ["oslo.key", "oslo.pub"] and load_public(oslo) == following
    assert (keys / "oslo.key").stat().st_mode & 0o777 == 0o600
    assert "holds no oslo.next.key" in error_line("keys", "rotate", "oslo", str(keys), "--switch")
    said("revoke", "oslo", "--old", allow=allow)
    allowed.refresh()
    assert allowed.keys == {"oslo": (following,)} and names_in(allow) == ["oslo.pub"]


def test_a_third_key_and_the_rotation_of_none_are_refused(allow: Path, oslo: Path, lima: Path) -> None:
    keys = oslo.parent
    assert "holds no rome.key to rotate" in error_line("keys", "rotate", "rome", str(keys))
    said("authorize", oslo, allow=allow)
    for name in ("oslo", "lima"):
        farloop("keys", "rotate", name, str(keys))
    said("authorize", keys / "oslo.next.pub", allow=allow)
    third = refused("authorize", keys / "lima.next.pub", "--name", "oslo", allow=allow)
    assert "holds two keys; first: farloop keys revoke oslo --old" in third


def test_a_secret_key_and_a_missing_file_are_no_servers_key(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"c.key is a secret key by its name; give the coordinator's .pub"):
        load_publics(tmp_path / "c.key")
    with pytest.raises(KeyFileError, match=r"there is no .*c.pub; copy the coordinator's .pub there"):
        load_publics(tmp_path / "c.pub")
