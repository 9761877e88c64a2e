"""What is local to a coordinator. Loads no torch."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import parse_qs, urlsplit

from farloop.monitoring.addresses import check_listening, check_tcp_listening, parse_each_tcp, parse_host_port
from farloop.monitoring.tcp_connection import check_congestion
from farloop.monitoring.units import TIME, AtLeast, OneOf, check_duration
from farloop.wire.keys import check_name
from farloop.wire.limits import Limits, Timing
from farloop.wire.uplink import UplinkLimit, parse_hours, parse_rate

QUIET_S: Final = 10.0
"""Seconds without waiting transfers before a probe: until then `router.py` paces downloads, and probes with them."""


PROBE_SHARE: Final = 0.01
"""Share of the bytes that a node's link has moved for the run that probes of the link may take."""


ADAPTS: Final = ("off", "advise", "drop", "act")
"""What is done: nothing; links are measured again; nodes that miss their deadline are dropped from the window
(`deadlines.py`); everything possible."""


SCHEMES = ("s3", "gs", "az", "file")


def check_url(url: str) -> str:
    """The scheme of an object store's URL. Raises ValueError, one sentence: farloop cannot copy there."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"the URL of an object store begins with {', '.join(f'{known}://' for known in SCHEMES)}")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ValueError(
            f"a folder is written with three slashes, as file:///{(parts.netloc + parts.path) or 'backup'}"
        )
    if parts.scheme != "file" and not parts.netloc:
        raise ValueError(f"the name of the bucket is missing, as {parts.scheme}://BUCKET/PREFIX")
    return parts.scheme


def check_bulk_url(url: str) -> None:
    """Raises ValueError, one sentence: nodes cannot be given URLs of what is there."""
    parts = urlsplit(url)
    known = ("s3", "gs", "az", "https", "http")
    if parts.scheme not in known:
        raise ValueError(f"expected {', '.join(f'{scheme}://' for scheme in known)}; a node is given URLs of objects")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"expected {parts.scheme}://PLACE/PREFIX alone; credentials come from the environment")
    if not parts.netloc:
        raise ValueError(f"the host or bucket is missing, as {parts.scheme}://PLACE/PREFIX")


_OF_KUBERNETES = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?"  # a name, as RFC 1123 has it


def check_leads_by(url: str) -> None:
    """Raises ValueError, one sentence: no record of the leader can be kept there."""
    parts = urlsplit(url)
    shapes = {"etcd": "etcd://HOST:2379/KEY", "k8s": "k8s://NAMESPACE/NAME"}
    options = {"etcd": ["ca", "cert", "key"], "k8s": ["account", "api"]}
    if parts.scheme in SCHEMES:
        check_url(url)
    elif parts.scheme not in shapes:
        known = ", ".join(f"{scheme}://" for scheme in (*SCHEMES, *shapes))
        raise ValueError(f"expected a URL that begins with one of {known}; got {url!r}")
    else:
        name, given = parts.path.strip("/"), parse_qs(parts.query, keep_blank_values=True)
        if not parts.netloc or not name or (parts.scheme == "k8s" and "/" in name):
            raise ValueError(f"expected {shapes[parts.scheme]}; got {url!r}")
        if not given.keys() <= {*options[parts.scheme]}:
            raise ValueError(f"expected options out of {', '.join(options[parts.scheme])}; got {parts.query!r}")
        if blank := [option for option, values in given.items() if "" in values]:
            raise ValueError(f"expected a value for {', '.join(blank)}; got {parts.query!r}")
        if "key" in given and "cert" not in given:
            raise ValueError(f"key goes with cert; got {parts.query!r}")
        if parts.scheme == "k8s" and not all(re.fullmatch(_OF_KUBERNETES, part) for part in (parts.netloc, name)):
            raise ValueError(f"expected small letters, digits, - and . in {shapes['k8s']}; got {url!r}")
        if parts.scheme == "etcd":
            parse_host_port(parts.netloc)
        for text in given.get("api", ()):
            api = urlsplit(text)
            if api.scheme not in ("http", "https") or not api.netloc:
                raise ValueError(f"expected api=https://HOST:PORT; got {text!r}")
            parse_host_port(api.netloc if ":" in api.netloc.rpartition("]")[2] else f"{api.netloc}:443")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    state_dir: Path
    """Journal, snapshots, metrics.jsonl and the final model."""
    bind: Annotated[str, check_tcp_listening] = "tcp://127.0.0.1:7700"
    """The one port that nodes must reach. Host * is every interface, of IPv4 and IPv6; an IPv6 address stands in
    brackets, as tcp://[::1]:7700."""
    key: Path | None = None
    """Secret key file. CURVE is on with it, and required beyond loopback."""
    allow: Path | None = None
    """Folder of the nodes' public keys."""
    http: Annotated[str, check_listening] = "127.0.0.1:9700"
    """Where /metrics, /healthz, /readyz and /status are served; an empty text serves nothing."""
    http_names: str = ""
    """Comma-separated public host names under which these pages may be requested, e.g. oslo.example.com. IP addresses
    and private names are always allowed; * allows any name."""
    min_participation: Annotated[float | None, AtLeast(0.0, most=1.0, wanted="0 to 1, as 0.5")] = None
    """Smallest share of the live nodes that must have been merged in the last rounds; below it the run is held. 0 never
    holds it. Default: 0.5 if windows wait for all expected nodes, 0 with a quorum."""
    bulk_url: Annotated[str, check_bulk_url] = ""
    """The object store of [run] bulk = "store": s3://BUCKET/PREFIX, gs://… or az://…. Or http://HOST/PREFIX, a web
    server that takes PUT, for private networks: whoever reaches it may write."""
    copy_to: Annotated[str, check_url] = ""
    """Where the state is copied to: s3://BUCKET/PREFIX, gs://…, az://… or file:///PATH. Without it, there are no
    copies."""
    copy_every_s: Annotated[float, check_duration] = 600.0
    """Seconds between two copies, also over restarts. One more is made at the run's end, and at an orderly stop."""
    recover: Annotated[str, OneOf(("off", "auto"))] = "off"
    """"auto": a start with an empty `state_dir` restores the newest copy of `copy_to`, adopts what nodes hold beyond
    it, and takes the lead from a coordinator whose state is lost. It needs `copy_to` and `leads_by`."""
    leads_by: Annotated[str, check_leads_by] = ""
    """Where the record of who leads is kept, for several coordinators: s3://BUCKET/PREFIX, gs://…, az://…,
    file:///PATH, etcd://HOST:2379/KEY or k8s://NAMESPACE/NAME."""
    name: Annotated[str, check_name] = ""
    """This coordinator in that record; the host's name unless given. Two must not have one name."""
    mirror: Annotated[str, check_tcp_listening] = ""
    """Where it listens for standbys while it leads, as tcp://0.0.0.0:7701. They hold everything that nodes are told,
    and have the same `key`."""
    peers: Annotated[str, parse_each_tcp] = ""
    """The `mirror` addresses of all coordinators of the run, as tcp://a:7701, tcp://b:7701; its own may be among
    them."""
    follow: bool = True
    """While it stands by, keep the state in memory (12 bytes a parameter) and repeat each commit, so that it leads
    within milliseconds. Without it, leading costs a start."""
    map_buffers: bool = False
    """Keep anchors, targets and the optimizer's state (12 bytes a parameter) in mapped files of the state folder,
    for models larger than memory. Every commit then writes to the disk."""
    egress_price_per_gb: Annotated[float, AtLeast(0.0, wanted="0 or more")] = 0.0
    """What 10⁹ bytes that leave a site cost, for metrics and `farloop config check`."""
    egress_currency: str = "USD"
    """The currency of that price, as dashboards name it."""
    congestion: Annotated[str, check_congestion] = ""
    """Congestion control of its TCP connections, e.g. bbr. Default: the system's."""
    max_uplink: Annotated[str, parse_rate] = ""
    """Most that all sessions send together, as 20mbit, and as much to an object store; empty: as fast as the links."""
    quiet_hours: Annotated[str, parse_hours] = ""
    """Hours of the day, in local time, in which it sends at most `quiet_uplink`, as 08:00-18:00 or 22:00-06:00."""
    quiet_uplink: Annotated[str, parse_rate] = ""
    """Most that it sends in the quiet hours, as 2mbit."""
    probe_bytes: Annotated[int, AtLeast(0)] = 32 << 20
    """Most bytes of one probe of a link; 0: none."""
    probe_share: Annotated[float, AtLeast(0.0, wanted="0 or more, as 0.01")] = PROBE_SHARE
    """Probes of a node's link, as a share of the bytes that it moves, beyond one of 64 KiB in each direction."""
    probe_idle_s: Annotated[float, TIME] = QUIET_S
    """Seconds without waiting transfers before a link is probed."""
    after_end: Annotated[str, OneOf(("stop", "serve"))] = "stop"
    """What the coordinator does once the run is finished. "stop": it serves until all nodes know of the end, 13 s where
    some are away, and ends. "serve": it serves until it is stopped."""
    mitigation: Annotated[str, OneOf(ADAPTS)] = "drop"
    """About nodes and links that become slow or silent. "off": nothing. "advise": measure links again and report
    what would help. "drop": also close a window without a node that misses its deadline. "act": also give a slow
    node lighter terms, or leave it out of a round."""
    limits: Limits = field(default_factory=Limits)
    timing: Timing = field(default_factory=Timing)

    @property
    def uplink(self) -> UplinkLimit:
        """Raises ValueError: a rate or the hours cannot be read."""
        return UplinkLimit.parse(self.max_uplink, self.quiet_hours, self.quiet_uplink)
