"""Findings about a machine's network, from values. Dialling is tried in the integration tests."""

from pathlib import Path

from machines import Machine

from farloop.cli.doctor import Finding, Way, as_the_coordinator_sees, buffers, limit_findings, machine, way_of
from farloop.monitoring.status import InventoryStatus, LinkStatus
from farloop.monitoring.units import rate_text
from farloop.node.machine_info import Limits, OperatorLabels, look_around
from farloop.wire.machine_info import Inventory, Nic

LIMITS = Limits(
    memory_bytes=1 << 34,
    memlock_bytes=None,
    nofile=65536,
    nofile_hard=65536,
    receive_bytes=6 << 20,
    send_bytes=4 << 20,
    congestion="cubic",
    allowed=("reno", "cubic"),
)


def link(source: str, target: str, bytes_per_s: float | None) -> LinkStatus:
    return {
        "from": source,
        "to": target,
        "rtt_s": 0.1,
        "rtt_median_s": 0.11,
        "bytes_per_s": bytes_per_s,
        "provenance": "probe",
        "measured_by": "probe",
        "age_s": 1.0,
        "why": "",
        "retransmit_ratio": None,
        "congestion": "",
        "suspect": False,
    }


def test_every_card_is_a_line_with_who_says_so(tmp_path: Path) -> None:
    made = Machine(tmp_path)
    made.netdev("eth0", speed=25_000, pci="0000:01:00.0")
    made.port("mlx5_0", layer="InfiniBand", verbs=False)
    told = look_around({"FARLOOP_LABELS": "site=oslo"}, OperatorLabels.of("", "", "eth0=10gbit"), root=tmp_path)
    port, card, site = machine(told)
    assert port.level == "warn" and "/dev/infiniband" in port.mend
    assert card.detail == "eth0: ethernet, 10 Gbit/s (operator), sysfs says 2.5e+10"
    assert card.data is not None and card.data["kind"] == "ethernet"
    assert site.detail == "oslo (annotation says so)"


def test_a_machine_without_cards_is_told_how_to_name_one() -> None:
    (card, _) = machine(Inventory())
    assert (card.level, card.what) == ("warn", "card") and "[node] nics" in card.mend


def test_few_files_are_a_warning_and_locked_memory_matters_with_rdma_alone() -> None:
    assert [finding.what for finding in limit_findings(LIMITS, Inventory())] == ["files"]
    few = Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"nofile": 512, "nofile_hard": 1024})
    files, memlock = limit_findings(few, Inventory(nics=(Nic(name="mlx5_0:1", kind="infiniband"),)))
    assert files.level == "warn" and "ulimit -Hn 4096" in files.mend
    assert (
        "1,024 files" in files.detail and "soft limit 512" in files.detail and "takes 704 connections" in files.detail
    )
    assert memlock.detail.endswith("without bound")


def test_a_buffer_smaller_than_the_bandwidth_delay_product_caps_a_connection() -> None:
    """4 MiB and 100 ms are 336 Mbit/s, whatever the card can do."""
    up, down, _ = buffers(LIMITS, Way(rtt_s=0.1, up_bytes_per_s=125e6, down_bytes_per_s=25e6))
    assert up.level == "warn"
    assert up.mend == ("one connection gets 336 Mbit/s at most: raise the last number of net.ipv4.tcp_wmem to 25000000")
    assert down == Finding(level="ok", what="buffers", detail="tcp_rmem: 6.29 MB; the way holds 2.50 MB")


def test_what_nobody_measured_is_not_judged() -> None:
    assert buffers(LIMITS, Way()) == []
    near = buffers(LIMITS, Way(rtt_s=0.001))
    assert [finding.level for finding in near] == ["ok"]


def test_a_control_that_suffers_from_losses_is_named_on_a_long_way() -> None:
    (finding,) = buffers(LIMITS, Way(rtt_s=0.1))
    assert finding.level == "warn" and "tcp_allowed_congestion_control" in finding.mend
    allowed = Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"allowed": ("cubic", "bbr")})
    (finding,) = buffers(allowed, Way(rtt_s=0.1))
    assert finding.mend == 'choose bbr: [node] congestion = "bbr"'


def test_the_coordinators_measurements_go_before_what_a_card_promises() -> None:
    told = Inventory(nics=(Nic(name="eth0", kind="ethernet", flow_bits_per_s=25e9, active=True),))
    seen: InventoryStatus = {"nodes": [], "links": [link("oslo", "coordinator", 1e6)]}
    way = way_of("oslo", seen, 0.1, told)
    assert (way.up_bytes_per_s, way.down_bytes_per_s) == (1e6, 25e9 / 8)
    assert way_of("oslo", None, None, Inventory()) == Way()


def test_what_the_coordinator_sees_of_a_node_is_told() -> None:
    (told,) = as_the_coordinator_sees_reached(False)
    assert told.level == "fail" and told.detail == "the coordinator does not reach tcp://198.51.100.7:7800"
    (told,) = as_the_coordinator_sees_reached(True)
    assert told.level == "ok" and not told.mend
    assert as_the_coordinator_sees_reached(None) == []
    assert as_the_coordinator_sees("oslo", None) == []


def as_the_coordinator_sees_reached(reachable: bool | None) -> list[Finding]:
    seen: InventoryStatus = {
        "nodes": [
            {
                "name": "oslo",
                "site": "",
                "site_from": "",
                "address": "tcp://198.51.100.7:7800",
                "reachable": reachable,
                "connected": True,
                "nics": [],
                "devices": 0,
                "memory_bytes": None,
                "cpus": 1,
                "memlock_bytes": None,
                "nofile": 1,
                "congestion": "",
                "seconds_per_step": None,
                "labels": [],
                "unread": [],
            }
        ],
        "links": [link("bergen", "coordinator", 1e6), link("oslo", "coordinator", None)],
    }
    return list(as_the_coordinator_sees("oslo", seen))


def test_a_link_is_a_line_of_its_own() -> None:
    seen: InventoryStatus = {"nodes": [], "links": [link("oslo", "coordinator", 25e6)]}
    assert as_the_coordinator_sees("oslo", seen) == []  # no such node
    assert rate_text(8 * 25e6) == "200 Mbit/s" and rate_text(25e9) == "25 Gbit/s" and rate_text(64e3) == "64 kbit/s"
