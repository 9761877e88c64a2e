#!/usr/bin/env bash
# moto 5.2.5: a presigned URL of S3 that is expired, that was signed for another method, or whose signature is wrong is
# served as a good one. Only a URL without any signature is refused with 403.
#
# So a test over moto does not show that a client signs rightly, or what it does once its URLs expire: S3 answers 403 to
# all of these. Compare the signature yourself (HMAC-SHA256 over the canonical request), or try the real service.
#
# Exits with 0 while that is so, with 1 once it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "moto[s3]==5.2.5" flask flask-cors
cd "$folder"
venv/bin/python - <<'PYTHON'
import logging
import sys
import time
import urllib.error
import urllib.request

import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
logging.getLogger("werkzeug").disabled = True
server.start()
host, port = server.get_host_and_port()
s3 = boto3.client(
    "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", aws_access_key_id="a",
    aws_secret_access_key="b", config=boto3.session.Config(signature_version="s3v4", s3={"addressing_style": "path"}),
)  # fmt: skip
s3.create_bucket(Bucket="runs")


def status(url, method="PUT"):
    body = b"x" if method == "PUT" else None
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data=body, method=method)).status
    except urllib.error.HTTPError as error:
        return error.code


url = s3.generate_presigned_url("put_object", {"Bucket": "runs", "Key": "a"}, ExpiresIn=1)
head, _, signature = url.rpartition("=")
found = {
    "signed": status(url),
    "wrong signature": status(head + "=" + "0" * len(signature)),
    "GET by the URL of a PUT": status(url, "GET"),
    "no signature": status(url.partition("?")[0]),
}
time.sleep(2)
found["expired"] = status(url)
server.stop()
for what, code in found.items():
    print(f"{what}: {code}")
expected = {"signed": 200, "wrong signature": 200, "GET by the URL of a PUT": 200, "no signature": 403, "expired": 200}
sys.exit(0 if found == expected else 1)
PYTHON
