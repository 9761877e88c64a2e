"""Key files and the allow-list (protocol U): what is let in, and one line with the mend for what is not."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.wire.keys import AllowList, KeyFileError, check_name, load_public, load_secret

KEY = b"Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
OTHER = b"D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("name", ["a", "node-1", "Oslo.rack_2", "0", "x" * 63])
def test_names_that_a_file_and_a_label_can_carry(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "_a", "a b", "a/b", "ä", "a\n", "a\0", "x" * 64])
def test_other_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(ValueError, match="is no node name: letters, digits"):
        check_name(name)


@given(st.text(max_size=80))
def test_a_name_never_leaves_its_folder(name: str) -> None:
    try:
        checked = check_name(name)
    except ValueError:
        return
    assert Path(f"/allow/{checked}.pub").name == f"{name}.pub" and not checked.startswith(".")


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n", b"  \n"])
def test_a_key_is_one_line_of_40_characters(tmp_path: Path, ending: bytes) -> None:
    path = written(tmp_path / "a.key", KEY + ending)
    assert load_secret(path) == load_public(path) == KEY


@pytest.mark.parametrize("content", [b"", KEY[:-1], KEY + b"x", KEY + b"\n" + KEY, b'"' * 40, b"\xff" * 40])
def test_what_is_no_key_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path / "a.key", content)
    for load in (load_secret, load_public):
        with pytest.raises(KeyFileError, match=r"a\.key is no key file: one line of 40 characters"):
            load(path)


def test_a_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"No such file or directory; make a pair with: farloop keys new"):
        load_secret(tmp_path / "a.key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o601, 0o777])
def test_a_secret_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "a.key", KEY, mode)
    with pytest.raises(KeyFileError, match=f"mode {mode:04o}.*chmod 600"):
        load_secret(path)
    assert load_public(path) == KEY


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_secret_of_its_owner_alone_is_read(tmp_path: Path, mode: int) -> None:
    assert load_secret(written(tmp_path / "a.key", KEY, mode)) == KEY


def test_the_files_name_is_the_owner_of_the_key(tmp_path: Path) -> None:
    written(tmp_path / "oslo.pub", KEY)
    written(tmp_path / "lima.pub", OTHER)
    written(tmp_path / "lima.key", KEY)
    allowed = AllowList(tmp_path)
    assert allowed.owner(KEY) is None, "nothing is believed before it was read"
    allowed.refresh()
    assert (allowed.owner(KEY), allowed.owner(OTHER), allowed.owner(b"x" * 40)) == ("oslo", "lima", None)


def test_a_key_that_is_removed_is_revoked_without_a_restart(tmp_path: Path) -> None:
    """U: every frame is checked against the live list."""
    path = written(tmp_path / "oslo.pub", KEY)
    allowed = AllowList(tmp_path)
    allowed.refresh()
    path.unlink()
    allowed.refresh()
    assert allowed.owner(KEY) is None


def test_a_key_that_is_added_or_replaced_counts_from_then_on(tmp_path: Path) -> None:
    allowed = AllowList(tmp_path)
    allowed.refresh()
    path = written(tmp_path / "oslo.pub", KEY)
    allowed.refresh()
    assert allowed.owner(KEY) == "oslo"
    written(path, OTHER)
    os.utime(path, ns=(1, 1))
    allowed.refresh()
    assert (allowed.owner(KEY), allowed.owner(OTHER)) == (None, "oslo")


def test_files_are_read_again_only_when_something_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "oslo.pub", KEY)
    allowed = AllowList(tmp_path)
    allowed.refresh()
    reads: list[Path] = []
    read = Path.read_bytes

    def note(path: Path) -> bytes:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", note)
    allowed.refresh()
    assert reads == []


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("lima.pub", b"half a key", r"lima\.pub is no key file"),
        ("a b.pub", OTHER, r"'a b' is no node name"),
        ("lima.pub", KEY, r"oslo\.pub holds the same key as lima\.pub"),
    ],
    ids=["not a key", "not a name", "the key of two nodes"],
)
def test_a_file_that_cannot_be_used_leaves_the_list_as_it_was(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    """One identity per key: else which of the two a node is would depend on the order of files."""
    written(tmp_path / "oslo.pub", KEY)
    allowed = AllowList(tmp_path)
    allowed.refresh()
    written(tmp_path / name, content)
    for _ in range(2):
        with pytest.raises(KeyFileError, match=sentence):
            allowed.refresh()
        assert (allowed.owner(KEY), allowed.owner(OTHER)) == ("oslo", None)


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_an_allow_list_that_is_no_folder_says_so(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "allow"
    if kind == "file":
        folder.write_bytes(KEY)
    with pytest.raises(KeyFileError, match="is not a folder; put the nodes"):
        AllowList(folder).refresh()


@pytest.mark.parametrize("kind", ["not a key", "a link to nothing"])
def test_a_broken_file_stands_in_the_way_of_no_revocation(tmp_path: Path, kind: str) -> None:
    for name, key in (("oslo", KEY), ("lima", OTHER)):
        written(tmp_path / f"{name}.pub", key)
    allowed = AllowList(tmp_path)
    allowed.refresh()
    if kind == "not a key":
        written(tmp_path / "broken.pub", b"half a key")
    else:
        (tmp_path / "broken.pub").symlink_to(tmp_path / "nowhere")
    (tmp_path / "oslo.pub").unlink()
    for _ in range(2):
        with pytest.raises(KeyFileError, match=r"broken\.pub"):
            allowed.refresh()
        assert (allowed.owner(KEY), allowed.owner(OTHER)) == (None, "lima")


def test_a_key_that_was_replaced_is_revoked_beside_a_broken_file_and_a_half_written_one_is_not(tmp_path: Path) -> None:
    for name, key in (("oslo", KEY), ("lima", OTHER)):
        written(tmp_path / f"{name}.pub", key)
    allowed = AllowList(tmp_path)
    allowed.refresh()
    written(tmp_path / "oslo.pub", b"x" * 40)
    written(tmp_path / "lima.pub", OTHER[:20])
    with pytest.raises(KeyFileError, match=r"lima\.pub is no key file"):
        allowed.refresh()
    assert allowed.keys == {"lima": OTHER}


def test_a_replaced_file_counts_though_it_keeps_the_old_time(tmp_path: Path) -> None:
    """As rsync and cp -p write it."""
    path = written(tmp_path / "oslo.pub", KEY)
    allowed = AllowList(tmp_path)
    allowed.refresh()
    times = path.stat()
    draft = written(tmp_path / "draft", OTHER)
    os.utime(draft, ns=(times.st_atime_ns, times.st_mtime_ns))
    draft.replace(path)
    allowed.refresh()
    assert allowed.keys == {"oslo": OTHER}


def test_a_folder_that_is_gone_for_a_moment_shuts_nobody_out(tmp_path: Path) -> None:
    """As while a disk is mounted again; to shut everybody out is to remove the files."""
    folder = tmp_path / "allow"
    folder.mkdir()
    written(folder / "oslo.pub", KEY)
    allowed = AllowList(folder)
    allowed.refresh()
    folder.rename(tmp_path / "away")
    with pytest.raises(KeyFileError, match="is not a folder"):
        allowed.refresh()
    assert allowed.owner(KEY) == "oslo"


def test_a_secret_behind_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "a.key"
    link.symlink_to(written(tmp_path / "real.key", KEY))
    with pytest.raises(KeyFileError, match=r"a\.key holds a secret and is a symbolic link, .*; name the file itself"):
        load_secret(link)
    assert load_public(link) == KEY


def test_a_secret_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.key", KEY)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(KeyFileError, match=rf"belongs to another user \(uid {owner}, .*; run: chown {owner + 1} "):
        load_secret(path)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_secret_that_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A pipe that nobody writes to would hold a daemon for ever."""
    path = tmp_path / "a.key"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(mode=0o700)
    with pytest.raises(KeyFileError, match=r"a\.key is no file"):
        load_secret(path)
