#!/usr/bin/env bash
# obstore 0.12.1: some of its errors are Python's own, and are missed by whoever catches `obstore.exceptions.BaseError`.
#
# A missing object raises FileNotFoundError, and a put under the condition of an ETag (mode={"e_tag": ...}) on a
# LocalStore raises NotImplementedError; a MemoryStore takes the same put. What `put` returned cannot be given as the
# mode of the next put as it is: its "version" is None, and that is a TypeError. A put with mode="create" works on both, and
# where the object exists it raises AlreadyExistsError, which is a BaseError. So a record that has to be compared and set
# on any store, a folder too, is best a new object for each version, created under its number.
#
# Exits with 0 while that is so, with 1 once it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q obstore==0.12.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, MemoryStore

Path("objects").mkdir()
print("obstore", obstore.__version__)


def outcome(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}, {'a' if isinstance(error, BaseError) else 'not a'} BaseError"
    return "done"


seen = {}
for name, store in (("local", LocalStore(Path("objects").resolve())), ("memory", MemoryStore())):
    put = obstore.put(store, "record", b"1", mode="create")
    seen[name] = (
        outcome(lambda: obstore.get(store, "missing")),
        outcome(lambda: obstore.put(store, "record", b"2", mode="create")),
        outcome(lambda: obstore.put(store, "record", b"2", mode=put)),
        outcome(lambda: obstore.put(store, "record", b"2", mode={"e_tag": put["e_tag"]})),
    )
    for what, found in zip(("get a missing object", "create again", f"mode={put}", "by its e_tag"), seen[name]):
        print(f"{name}: {what}: {found}")
expected = ("FileNotFoundError, not a BaseError", "AlreadyExistsError, a BaseError", "TypeError, not a BaseError")
ends = {"local": "NotImplementedError, not a BaseError", "memory": "done"}
sys.exit(0 if seen == {name: (*expected, end) for name, end in ends.items()} else 1)
PYTHON
