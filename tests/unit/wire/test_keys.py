"""Key files and the allow-list (protocol U): what is let in, and one line with the mend for what is not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from farloop.wire.keys import AllowList, KeyFileError, check_name, load_public, load_secret

KEY = b"Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
OTHER = b"D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_names_are_those_that_a_file_and_a_label_can_carry() -> None:
    for name in ("a", "node-1", "Oslo.rack_2", "0", "x" * 63):
        assert check_name(name) == name
    for name in ("", ".", "..", "-a", "_a", "a b", "a/b", "ä", "a\n", "a\0", "x" * 64):
        with pytest.raises(ValueError, match="is not a node name: letters, digits"):
            check_name(name)


# --- Key files


def test_a_public_key_is_no_secret_one_whatever_its_mode(tmp_path: Path) -> None:
    for mode in (0o600, 0o644):
        path = written(tmp_path / "a.pub", KEY, mode)
        with pytest.raises(KeyFileError, match=r"a\.pub is a public key by its name.*: .*a\.key$"):
            load_secret(path)


def test_a_key_is_one_line_of_40_characters(tmp_path: Path) -> None:
    for ending in (b"", b"\n", b"\r\n", b"  \n"):
        path = written(tmp_path / "a.key", KEY + ending)
        assert load_secret(path) == load_public(path) == KEY
    for content in (b"", KEY[:-1], KEY + b"x", KEY + b"\n" + KEY, b'"' * 40, b"\xff" * 40):
        path = written(tmp_path / "a.key", content)
        for load in (load_secret, load_public):
            with pytest.raises(KeyFileError, match=r"a\.key is not a key file: expected one line of 40"):
                load(path)


def test_a_secret_that_others_can_touch_is_refused(tmp_path: Path) -> None:
    for mode in (0o600, 0o400, 0o700):
        assert load_secret(written(tmp_path / f"{mode}.key", KEY, mode)) == KEY
    for mode in (0o640, 0o604, 0o660, 0o620, 0o601, 0o777):
        path = written(tmp_path / f"{mode}.key", KEY, mode)
        with pytest.raises(KeyFileError, match=f"mode {mode:04o}.*chmod 600"):
            load_secret(path)
        assert load_public(path) == KEY


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, r"No such file or directory; make a pair with: farloop keys new"),
        (
            lambda path: path.symlink_to(written(path.with_name("real.key"), KEY)),
            r"a\.key holds a secret and is a symbolic link, .*; name the file itself",
        ),
        (lambda path: os.mkfifo(path, 0o600), r"a\.key is not a file"),  # it would hold a daemon for ever
        (lambda path: path.mkdir(mode=0o700), r"a\.key is not a file"),
    ],
    ids=["missing", "link", "pipe", "folder"],
)
def test_a_secret_that_is_no_file_of_its_own_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    make(tmp_path / "a.key")
    with pytest.raises(KeyFileError, match=words):
        load_secret(tmp_path / "a.key")


def test_a_public_key_may_be_behind_a_link_and_a_secret_of_no_other_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.key", KEY)
    (tmp_path / "link.key").symlink_to(path)
    assert load_public(tmp_path / "link.key") == KEY
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(KeyFileError, match=rf"belongs to another user \(uid {owner}, .*; run: chown {owner + 1} "):
        load_secret(path)


# --- The allow-list


@pytest.fixture
def allowed(tmp_path: Path) -> AllowList:
    """Of oslo and lima, in the folder `allow`."""
    folder = tmp_path / "allow"
    folder.mkdir()
    written(folder / "oslo.pub", KEY)
    written(folder / "lima.pub", OTHER)
    written(folder / "lima.key", b"x" * 40)
    found = AllowList(folder)
    assert found.owner(KEY) is None, "nothing is believed before it was read"
    found.refresh()
    assert found.keys == {"oslo": (KEY,), "lima": (OTHER,)}
    return found


@pytest.fixture
def folder(allowed: AllowList, tmp_path: Path) -> Path:
    return tmp_path / "allow"


def test_the_files_name_is_the_owner_of_the_key(allowed: AllowList) -> None:
    assert (allowed.owner(KEY), allowed.owner(OTHER), allowed.owner(b"x" * 40)) == ("oslo", "lima", None)


def test_a_key_that_is_removed_is_revoked_without_a_restart(allowed: AllowList, folder: Path) -> None:
    """U: every frame is checked against the live list. What is added or replaced counts from then on."""
    (folder / "oslo.pub").unlink()
    allowed.refresh()
    assert allowed.owner(KEY) is None
    written(folder / "rome.pub", KEY)
    allowed.refresh()
    assert allowed.owner(KEY) == "rome"
    os.utime(written(folder / "rome.pub", b"x" * 40), ns=(1, 1))
    allowed.refresh()
    assert (allowed.owner(KEY), allowed.owner(b"x" * 40)) == (None, "rome")


def test_a_file_of_two_lines_admits_both_keys_until_one_is_taken_out(allowed: AllowList, folder: Path) -> None:
    following = b"x" * 40
    for lines, keys in (([KEY, following], (KEY, following)), ([following], (following,))):
        (folder / "oslo.pub").write_bytes(b"\n".join(lines) + b"\n")
        allowed.refresh()
        assert allowed.keys["oslo"] == keys
        assert allowed.owner(KEY) == ("oslo" if KEY in keys else None) and allowed.owner(following) == "oslo"


def test_a_replaced_file_counts_though_it_keeps_the_old_time(allowed: AllowList, folder: Path) -> None:
    """As rsync and cp -p write it."""
    times = (folder / "oslo.pub").stat()
    draft = written(folder / "draft", b"x" * 40)
    os.utime(draft, ns=(times.st_atime_ns, times.st_mtime_ns))
    draft.replace(folder / "oslo.pub")
    allowed.refresh()
    assert allowed.keys == {"oslo": (b"x" * 40,), "lima": (OTHER,)}


def test_files_are_read_again_only_when_something_changed(allowed: AllowList, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> bytes:
        raise AssertionError(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    allowed.refresh()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("broken.pub", b"half a key", r"broken\.pub is not a key file"),
        ("broken.pub", None, r"broken\.pub"),
        ("a b.pub", b"x" * 40, r"'a b' is not a node name"),
        ("rome.pub", OTHER, r"rome\.pub holds the same key as lima\.pub"),
    ],
    ids=["not a key", "a link to nothing", "not a name", "the key of two nodes"],
)
def test_a_broken_file_stands_in_the_way_of_no_revocation(
    allowed: AllowList, folder: Path, name: str, content: bytes | None, sentence: str
) -> None:
    """One identity per key: else which of the two a node is would depend on the order of files."""
    if content is None:
        (folder / name).symlink_to(folder / "nowhere")
    else:
        written(folder / name, content)
    (folder / "oslo.pub").unlink()
    for _ in range(2):
        with pytest.raises(KeyFileError, match=sentence):
            allowed.refresh()
        assert allowed.keys == {"lima": (OTHER,)}


def test_a_key_that_was_replaced_is_revoked_beside_a_broken_file_and_a_half_written_one_is_not(
    allowed: AllowList, folder: Path
) -> None:
    written(folder / "oslo.pub", b"x" * 40)
    written(folder / "lima.pub", OTHER[:20])
    with pytest.raises(KeyFileError, match=r"lima\.pub is not a key file"):
        allowed.refresh()
    assert allowed.keys == {"lima": (OTHER,)}


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_folder_that_is_gone_for_a_moment_shuts_no_node_out_and_is_named(
    allowed: AllowList, folder: Path, tmp_path: Path, kind: str
) -> None:
    """As while a disk is mounted again; to shut everybody out is to remove the files."""
    folder.rename(tmp_path / "away")
    if kind == "file":
        folder.write_bytes(KEY)
    with pytest.raises(KeyFileError, match="is not a folder; put the nodes"):
        allowed.refresh()
    assert allowed.owner(KEY) == "oslo"
