#!/usr/bin/env bash
# libzmq: with ZMQ_IPV6 set, a socket that connects to a name with an AAAA and an A record tries the first AAAA alone.
#
# "both.test" is ::1 and 127.0.0.1, and the server listens on 127.0.0.1 alone. Python's socket.create_connection tries
# both and gets through. A ZeroMQ socket gets through without ZMQ_IPV6; with it, which the manual describes as "both
# IPv4 and IPv6 hosts", it dials ::1 for ever: the event monitor shows one refused try after the other at the same
# place. The way out is to resolve the name, to connect to each address in turn, and to set ZMQ_IPV6 by its family.
#
# The name stands in a hosts file that only this script sees (unshare). Exits with 0 while that is so, with 1 once it
# changed, with 2 where the machine has no IPv6 loopback or no mount namespaces.
set -euo pipefail
if [ -z "${INSIDE:-}" ]; then
	folder=$(mktemp -d)
	trap 'rm -rf "$folder"' EXIT
	python3 -m venv "$folder/venv"
	"$folder/venv/bin/pip" install -q pyzmq==27.3.0
	printf '127.0.0.1 localhost\n::1 both.test\n127.0.0.1 both.test\n' >"$folder/hosts"
	unshare --map-root-user --mount true || exit 2
	INSIDE=$folder unshare --map-root-user --mount bash "$0" && exit 0 || exit $?
fi
mount --bind "$INSIDE/hosts" /etc/hosts
"$INSIDE/venv/bin/python" - <<'PYTHON'
import socket
import sys

import zmq
from zmq.utils.monitor import recv_monitor_message

try:
    socket.socket(socket.AF_INET6).bind(("::1", 0))
except OSError as error:
    print("no IPv6 loopback:", error)
    sys.exit(2)
context = zmq.Context()
server = context.socket(zmq.ROUTER)
port = server.bind_to_random_port("tcp://127.0.0.1")
print("pyzmq", zmq.__version__, "libzmq", zmq.zmq_version())
print("both.test is", [end[0] for *_, end in socket.getaddrinfo("both.test", port, type=socket.SOCK_STREAM)])


def zmq_connects(ipv6):
    client = context.socket(zmq.DEALER)
    client.linger, client.ipv6 = 0, ipv6
    monitor = client.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED)
    client.connect(f"tcp://both.test:{port}")
    tries = 0
    while monitor.poll(5000):
        event = recv_monitor_message(monitor)
        tries += 1
        if event["event"] == zmq.EVENT_CONNECTED or tries == 5:
            break
    connected = event["event"] == zmq.EVENT_CONNECTED
    print(f"ZMQ_IPV6={ipv6}: {'connected' if connected else f'{tries} tries, none connected'}")
    client.disable_monitor()
    monitor.close(linger=0)
    client.close()
    return connected


socket.create_connection(("both.test", port), timeout=5).close()
print("socket.create_connection: connected")
outcomes = [zmq_connects(False), zmq_connects(True)]
server.close(linger=0)
context.term()
sys.exit(0 if outcomes == [True, False] else 1)
PYTHON
