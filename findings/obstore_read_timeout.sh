#!/usr/bin/env bash
# obstore: `read_timeout`, the time-out of each read, also ends an upload that makes progress all the time.
#
# A server on loopback takes and gives bodies at 500 kB/s, without a pause. With read_timeout = 2 s, a download of 2 MB
# takes 4 s and succeeds: the clock starts anew with each read. An upload of the same 2 MB fails after 2 s: until the
# answer comes there is no read, so the whole body has to be sent within one read_timeout. There is no idle time-out for
# what is sent; parts that each fit into it are the way out.
#
# Exits with 0 while that is so, with 1 once it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q obstore==0.12.1
"$folder/venv/bin/python" - <<'PYTHON'
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import obstore
from obstore.store import S3Store

SIZE, STEP, BYTES_PER_S = 2_000_000, 10_000, 500_000


class Steady(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Fri, 27 Nov 2026 06:45:41 GMT")
        self.end_headers()
        for at in range(0, len(body), STEP):
            self.wfile.write(body[at : at + STEP])
            time.sleep(STEP / BYTES_PER_S)

    def do_GET(self):
        self.answer(bytes(SIZE))

    def do_PUT(self):
        left = int(self.headers["Content-Length"])
        while left and (piece := self.rfile.read(min(STEP, left))):
            left -= len(piece)
            time.sleep(STEP / BYTES_PER_S)
        if not left:
            self.answer(b"")


server = ThreadingHTTPServer(("127.0.0.1", 0), Steady)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
store = S3Store(
    "bucket",
    endpoint=f"http://127.0.0.1:{server.server_port}",
    access_key_id="a", secret_access_key="b", region="us-east-1",
    client_options={"allow_http": True, "timeout": "1h", "read_timeout": "2s"},
    retry_config={"max_retries": 0},
)
print("obstore", obstore.__version__)
outcomes = []
for name, call in (
    ("download", lambda: len(obstore.get(store, "x").bytes()) == SIZE),
    ("upload", lambda: obstore.put(store, "x", bytes(SIZE), use_multipart=False) is not None),
):
    began = time.monotonic()
    try:
        outcome, why = call(), ""
    except Exception as error:
        outcome, why = False, str(error).splitlines()[0]
    outcomes.append(outcome)
    print(f"{name} of {SIZE} bytes at {BYTES_PER_S} bytes/s: {'ok' if outcome else 'fails'} after "
          f"{time.monotonic() - began:.1f} s {why}")
sys.exit(0 if outcomes == [True, False] else 1)
PYTHON
