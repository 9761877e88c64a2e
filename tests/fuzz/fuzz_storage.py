"""The doors of the state folder: a journal segment, the fold of its records, and a snapshot."""

import atexit
import json
import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random

import xxhash
from fuzz_mutator import edited, join, packed_edit, shuffled, split
from fuzz_target import Target
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from stored_runs import RECORDS

from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.errors import JournalCorrupt, SnapshotCorrupt
from farloop.coordinator.storage import segment, snapshots
from farloop.coordinator.storage.segment import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES

_GOLDEN = Path(__file__).parents[1] / "unit" / "coordinator" / "golden"
_RECORD_START = b"\x89FLR"


@cache
def folder() -> Path:
    """In memory where that can be: millions of files are written there."""
    memory = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="farloop-fuzz-", dir=memory if os.access(memory, os.W_OK) else None)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def written(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


# --- segments


def check_segment(data: bytes) -> None:
    """Raises JournalCorrupt, or tells what the segment holds: within the file, and no more than that."""
    found = segment.scan_segment(written("journal-000000.log", data), 0)
    if found.fault is not None:
        raise found.fault
    assert SEGMENT_HEADER_BYTES <= found.end <= found.size == len(data)
    assert 0 <= found.torn_bytes <= found.size - found.end
    assert all(entry.attachment.offset + entry.attachment.size <= found.end for entry in found.entries)


def seal_segment(data: bytes) -> bytes:
    """With digests that fit: of the segment's header, and of every record that says how long it is."""
    if len(data) < SEGMENT_HEADER_BYTES:
        return data
    made = bytearray(data)
    made[32:40] = xxhash.xxh3_64_intdigest(bytes(made[:32])).to_bytes(8, "little")
    salt, at = int.from_bytes(made[24:32], "little"), SEGMENT_HEADER_BYTES
    while at + RECORD_HEADER_BYTES <= len(made) and made[at : at + 4] == _RECORD_START:
        body = at + RECORD_HEADER_BYTES
        end = body + sum(int.from_bytes(made[at + o : at + o + 4], "little") for o in (8, 12))
        made[at + 32 : at + 40] = xxhash.xxh3_64_intdigest(bytes(made[body:end]), seed=salt).to_bytes(8, "little")
        digest = xxhash.xxh3_64_intdigest(bytes(made[at : at + 40]), seed=salt)
        made[at + 40 : at + 48] = digest.to_bytes(8, "little")
        at = end
    return bytes(made)


def segments() -> list[bytes]:
    journal = (_GOLDEN / "state-v1" / "journal-000000.log").read_bytes()
    golden = bytes.fromhex("".join((_GOLDEN / "segment-v1.hex").read_text().split()))
    return [golden, golden + bytes(200), journal, journal[:4000]]


def edited_segment(chance: Random, data: bytes) -> bytes:
    """Anything, or the fields of a record's header."""
    starts = [match.start() for match in re.finditer(re.escape(_RECORD_START), data)]
    if not starts or chance.random() < 0.5:
        return edited(chance, data)
    at = chance.choice(starts)
    head = edited(chance, data[at : at + RECORD_HEADER_BYTES], 4)
    return data[:at] + head[:RECORD_HEADER_BYTES].ljust(RECORD_HEADER_BYTES, b"\0") + data[at + RECORD_HEADER_BYTES :]


# --- the fold


def check_ledger(data: bytes) -> None:
    """Raises ValueError for what is no record; AssertionError, LookupError or ArithmeticError for what cannot follow.

    The latter are for our own mistakes alone: digests that hold keep everybody else from here.
    """
    items = split(data)
    if not items:
        return
    match rec.decode(*items[0]):
        case rec.RunStarted() as started:
            ledger = Ledger.begin(started)
        case rec.LedgerSaved() as saved:
            ledger = Ledger.resume(saved)
        case _:
            raise ValueError("a journal does not begin with this")
    for kind, body in items[1:]:
        ledger.apply(rec.decode(kind, body))
    saved = rec.decode(*rec.encode(ledger.saved()))
    assert isinstance(saved, rec.LedgerSaved)
    assert repr(Ledger.resume(saved).saved()) == repr(saved)


def folds() -> list[bytes]:
    kinds = {name: (data[0], data[1:]) for name, data in RECORDS.items()}
    scan = segment.scan_segment(_GOLDEN / "state-v1" / "journal-000000.log", 0)
    run = [rec.encode(entry.record) for entry in scan.entries]
    return [join(run), join(run[:6]), *(join([first, *kinds.values()]) for first in (kinds["RunStarted"], run[0]))]


# --- snapshots


def check_snapshot(data: bytes) -> None:
    """Raises SnapshotCorrupt, or gives what was saved."""
    found = snapshots.load(written("f0-v2.safetensors", data))
    assert sum(tensor.nbytes for tensor in found.tensors.values()) <= len(data)


def seal_snapshot(data: bytes) -> bytes:
    """With the length of the header, and the checksum over what can be read."""
    if len(data) < 8:
        return data
    end = data.find(b"}}", 8)
    while end >= 0 and data[end + 2 : end + 3] == b"}":
        end += 1
    if 0 < end < 100_000:
        data = (end + 2 - 8).to_bytes(8, "little") + data[8:]
    try:
        tensors = load_tensors(data)
        size = int.from_bytes(data[:8], "little")
        metadata = dict(json.loads(data[8 : 8 + size])["__metadata__"])
        was = metadata.pop("checksum")
        return data.replace(was.encode(), snapshots._checksum(tensors, metadata).encode())
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data


def snapshot_files() -> list[bytes]:
    golden = bytes.fromhex("".join((_GOLDEN / "snapshot-v1.hex").read_text().split()))
    return [(_GOLDEN / "state-v1" / "snapshots" / "f0-v2.safetensors").read_bytes(), golden]


def edited_snapshot(chance: Random, data: bytes) -> bytes:
    """Anything, or the text of its header."""
    size = min(int.from_bytes(data[:8], "little"), len(data) - 8) if len(data) > 8 else 0
    text = data[8 : 8 + size].decode(errors="replace")
    numbers = list(re.finditer(r"\d+|\"[a-zA-Z_.0-9]+\"", text))
    if not numbers or chance.random() < 0.4:
        return edited(chance, data)
    found = chance.choice(numbers)
    values = (
        "0",
        "1",
        "-1",
        "9" * 25,
        "9" * 5000,
        "1e9",
        "18446744073709551615",
        '"F32"',
        '"I8"',
        '"BF16"',
        "[]",
        '"é"',
    )
    text = text[: found.start()] + chance.choice(values) + text[found.end() :]
    header = text.encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


_NO_FOLD = (ValueError, AssertionError, LookupError, ArithmeticError)

TARGETS = (
    Target(
        name="segment",
        run=check_segment,
        allowed=(JournalCorrupt,),
        seeds=segments,
        mutate=edited_segment,
        seal=seal_segment,
    ),
    Target(name="ledger", run=check_ledger, allowed=_NO_FOLD, seeds=folds, mutate=shuffled(packed_edit)),
    Target(
        name="snapshot",
        run=check_snapshot,
        allowed=(SnapshotCorrupt,),
        seeds=snapshot_files,
        mutate=edited_snapshot,
        seal=seal_snapshot,
    ),
)
