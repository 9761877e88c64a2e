"""Covers `node/machine_info.py`: cards, memory and labels of a machine, as its files tell them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GID, Machine

from farloop.node.machine_info import (
    LabelSource,
    SysfsReader,
    limits,
    parse_nic,
    parse_nics,
    read_inventory,
    read_labels,
    read_nics,
)
from farloop.wire.machine_info import LONGEST, MOST_NICS, Fact, Inventory, Nic, trimmed


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def seen(machine: Machine, **told: object) -> dict[str, Nic]:
    return {nic.name: nic for nic in read_nics(SysfsReader(machine.root), **told)}  # type: ignore[arg-type]


# --- the machine


def test_a_machine_tells_cards_memory_and_how_its_connections_behave(machine: Machine) -> None:
    machine.netdev("eth0", speed=25_000, pci="0000:01:00.0")
    machine.write("proc/meminfo", "MemTotal:       65536000 kB\nMemFree: 1 kB")
    machine.write("proc/sys/net/ipv4/tcp_congestion_control", "cubic")
    root, labels = machine.root, {"FARLOOP_LABELS": "site=oslo"}
    told = read_inventory(labels, root=root)
    assert (told.site, told.site_from) == ("oslo", "annotation")
    assert [nic.name for nic in told.nics] == ["eth0"]
    assert (told.memory_bytes, told.congestion) == (65536000 * 1024, "cubic")
    operator = "bergen", "tcp://10.0.0.5:7800", "eth0=ethernet/10gbit"
    told = read_inventory(labels, *operator, root=root)
    assert (told.site, told.site_from, told.address) == ("bergen", "operator", "tcp://10.0.0.5:7800")
    assert told.nics[0].bits_per_s == 10e9


def test_memory_buffers_and_allowed_controls_are_read(machine: Machine) -> None:
    """A container has the memory of its group."""
    machine.write("proc/meminfo", "MemTotal: 65536000 kB")
    for text, num_bytes in (("max", 65536000 * 1024), (str(4 << 30), 4 << 30)):
        machine.write("sys/fs/cgroup/memory.max", text)
        assert limits(SysfsReader(machine.root)).memory_bytes == num_bytes
    machine.write("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456")
    machine.write("proc/sys/net/ipv4/tcp_allowed_congestion_control", "reno cubic")
    found = limits(SysfsReader(machine.root))
    assert (found.receive_bytes, found.send_bytes, found.allowed) == (6291456, None, ("reno", "cubic"))


def test_nothing_at_all_is_an_inventory_too(tmp_path: Path) -> None:
    told = read_inventory({}, root=tmp_path / "nowhere")
    assert (told.nics, told.memory_bytes, told.site, told.site_from) == ((), None, "", "")
    (tmp_path / "sys/class").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband").write_text("a file where a folder should be")
    assert read_nics(SysfsReader(tmp_path)) == ()


def test_what_a_node_tells_is_cut_to_size() -> None:
    long = Inventory(
        site="x" * 9999,
        nics=tuple(Nic(name="\x1b[31m" + "n" * 500, bits_per_s=float("inf"), why="w" * 999) for _ in range(999)),
        memory_bytes=-1,
        devices=-4,
        labels=(("k" * 999, "v"),) * 999,
    )
    cut = trimmed(long)
    assert len(cut.site) == LONGEST and len(cut.nics) == MOST_NICS and cut.devices == 0
    assert (cut.nics[0].bits_per_s, cut.memory_bytes) == (None, None)
    assert cut.nics[0].name.startswith("?[31mnn") and trimmed(cut) == cut


# --- cards


def test_infiniband_edr_is_one_card_with_its_subnet_and_its_ip_device(machine: Machine) -> None:
    machine.port("mlx5_0", layer="InfiniBand", pci="0000:3b:00.0")
    machine.netdev("ib0", kind=32, speed=100_000, pci="0000:3b:00.0")
    nics = seen(machine)
    assert nics.keys() == {"mlx5_0:1"}
    nic = nics["mlx5_0:1"]
    assert (nic.kind, nic.netdev, nic.bits_per_s) == ("infiniband", "ib0", 100e9)
    assert nic.active and nic.usable and not nic.why
    assert nic.fabric == ":".join(GID.split(":")[:4])
    assert Fact(about="rate", value="100 Gb/sec (4X EDR)", source="sysfs") in nic.facts


def test_roce_v2_over_a_bond_has_the_sum_and_one_connection_has_one_member(machine: Machine) -> None:
    machine.netdev("eth1", speed=25_000, pci="0000:5e:00.0")
    machine.netdev("eth2", speed=25_000, pci="0000:5e:00.1")
    machine.bond("bond0", "eth1", "eth2")
    gids = {0: ("IB/RoCE v1", "bond0"), 1: ("RoCE v2", "bond0"), 3: ("RoCE v2", "bond0")}
    machine.port("mlx5_bond_0", layer="Ethernet", rate="25 Gb/sec (1X EDR)", gids=gids)
    nics = seen(machine)
    assert nics.keys() == {"mlx5_bond_0:1"}
    nic = nics["mlx5_bond_0:1"]
    assert (nic.kind, nic.netdev, nic.members) == ("roce-v2", "bond0", ("eth1", "eth2"))
    assert (nic.bits_per_s, nic.flow_bits_per_s) == (50e9, 25e9)


def test_a_bond_counts_only_members_whose_link_is_up(machine: Machine) -> None:
    machine.netdev("eth1", speed=25_000, pci="0000:5e:00.0")
    machine.netdev("eth2", state="down", speed=None, pci="0000:5e:00.1")
    machine.bond("bond0", "eth1", "eth2")
    nic = seen(machine)["bond0"]
    assert (nic.kind, nic.bits_per_s, nic.flow_bits_per_s) == ("ethernet", 25e9, 25e9)
    assert nic.members == ("eth1", "eth2")


@pytest.mark.parametrize(
    ("port", "kind"), [({"gids": {0: ("IB/RoCE v1", "eth3")}}, "roce-v1"), ({"node_type": "4: RNIC"}, "iwarp")]
)
def test_first_roce_and_iwarp_are_classes_of_their_own(machine: Machine, port: dict[str, Any], kind: str) -> None:
    machine.netdev("eth3", speed=40_000, pci="0000:af:00.0")
    machine.port("mlx4_0", layer="Ethernet", pci="0000:af:00.0", **port)
    assert [(nic.kind, nic.netdev) for nic in seen(machine).values()] == [(kind, "eth3")]


@pytest.mark.parametrize(
    ("port", "told", "active", "why"),
    [
        ({"state": "1: DOWN", "rate": "10 Gb/sec (4X SDR)"}, {}, False, "its link is down"),
        ({"verbs": False}, {}, True, "/dev/infiniband"),  # the container cannot open it
        ({}, {"memlock_bytes": 8 << 20}, True, "memlock"),  # RDMA needs memory that may be locked
    ],
)
def test_a_card_that_cannot_be_used_is_told_with_the_cause(
    machine: Machine, port: dict[str, Any], told: dict[str, Any], active: bool, why: str
) -> None:
    machine.port("mlx5_0", layer="InfiniBand", **port)
    nic = seen(machine, **told)["mlx5_0:1"]
    assert (nic.active, nic.usable) == (active, False) and why in nic.why


@pytest.mark.parametrize(
    ("speed", "pci", "kind"), [(10_000, "", "virtual"), (-1, "virtio0", "ethernet"), (None, "virtio0", "ethernet")]
)
def test_a_rate_that_the_kernel_does_not_have_or_a_veth_claims_stays_unknown(
    machine: Machine, speed: int | None, pci: str, kind: str
) -> None:
    machine.netdev("eth0", speed=speed, pci=pci)
    nic = seen(machine)["eth0"]
    assert (nic.kind, nic.bits_per_s, nic.active) == (kind, None, True)


def test_what_is_there_and_cannot_be_read_is_told(machine: Machine) -> None:
    machine.netdev("eth0", pci="0000:01:00.0")
    tree = SysfsReader(machine.root)
    read_nics(tree)
    assert tree.unread == []
    machine.unreadable("sys/class/infiniband/mlx5_9/ports/1/state")
    read_nics(tree)
    assert any("mlx5_9/ports/1/state" in missed for missed in tree.unread)


@settings(max_examples=20)
@given(texts=st.lists(st.text(max_size=40), min_size=8, max_size=8))
def test_no_content_of_the_files_makes_it_raise(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    kept = [text.replace("\x00", "").encode(errors="replace").decode() for text in texts]
    machine.port("d", layer=kept[0], rate=kept[1], state=kept[2], node_type=kept[3], gids={0: (kept[4], "eth0")})
    machine.netdev("eth0", state=kept[5], pci="p")
    machine.write("sys/class/net/eth0/speed", kept[6])
    machine.write("sys/class/net/eth0/bonding/slaves", kept[7].replace("/", "."))
    assert all(isinstance(nic, Nic) for nic in read_nics(SysfsReader(machine.root)))


# --- what others say of the cards


def test_the_operator_is_believed_first_then_the_kernel_then_annotations(machine: Machine) -> None:
    machine.netdev("eth0", speed=25_000, pci="0000:01:00.0")
    annotated = {"eth0": LabelSource(kind="roce-v2", bits_per_s=100e9, addresses=("10.0.0.7",))}
    nic = seen(machine, labels=annotated)["eth0"]
    assert (nic.kind, nic.bits_per_s, nic.source("bits_per_s")) == ("ethernet", 25e9, "sysfs")
    assert nic.addresses == ("10.0.0.7",)
    assert Fact(about="kind", value="roce-v2", source="annotation") in nic.facts
    nics = seen(machine, labels=annotated, operator=parse_nics("eth0=iwarp/40gbit, fabric0=infiniband/200gbit"))
    nic, hidden = nics["eth0"], nics["fabric0"]
    assert (nic.kind, nic.bits_per_s, nic.source("kind")) == ("iwarp", 40e9, "operator")
    assert [fact.source for fact in nic.facts if fact.about == "bits_per_s"] == ["operator", "sysfs", "annotation"]
    assert (hidden.kind, hidden.bits_per_s, hidden.active) == ("infiniband", 200e9, True), "a card that is not shown"


def test_an_annotation_tells_what_the_kernel_does_not_know(machine: Machine) -> None:
    machine.netdev("net1", speed=10_000)
    machine.netdev("net2", speed=25_000, pci="0000:3b:02.1")
    nics = seen(machine, labels={
        "net1": LabelSource(bits_per_s=100e9, network="kube-system/roce"),
        "0000:3b:02.1": LabelSource(resource="intel_com_roce"),
    })  # fmt: skip
    assert (nics["net1"].bits_per_s, nics["net1"].source("bits_per_s")) == (100e9, "annotation")
    assert Fact(about="network", value="kube-system/roce", source="annotation") in nics["net1"].facts
    assert Fact(about="resource", value="intel_com_roce", source="annotation") in nics["net2"].facts


STATUS = json.dumps([
    {"name": "cbr0", "interface": "eth0", "ips": ["10.244.1.7"], "default": True},
    {"name": "default/roce", "interface": "net1", "ips": ["192.168.10.7"], "mac": "02:42:ac:11:00:02"},
], indent=4)  # fmt: skip
MULTUS = "k8s.v1.cni.cncf.io/network-status"


def pod(root: Path, *, labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None) -> SysfsReader:
    """As kubelet writes the two files: one `key="value"` a line, the value quoted with escapes."""
    folder = root / "etc/podinfo"
    folder.mkdir(parents=True)
    for name, pairs in (("labels", labels), ("annotations", annotations)):
        (folder / name).write_text("\n".join(f"{key}={json.dumps(value)}" for key, value in (pairs or {}).items()))
    return SysfsReader(root)


def test_multus_tells_networks_and_addresses_by_interface_and_annotations_what_a_card_is(tmp_path: Path) -> None:
    tree = pod(tmp_path, annotations={MULTUS: STATUS, "farloop/nic.net1": "roce-v2/100gbit", "other": "x"})
    nics = read_labels(tree, {}).nics
    assert nics["net1"] == LabelSource(
        kind="roce-v2", bits_per_s=100e9, addresses=("192.168.10.7",), network="default/roce"
    )
    assert nics["eth0"].addresses == ("10.244.1.7",)


@pytest.mark.parametrize("text", ["", "not json", '{"a": 1}', "[1, null]", '[{"interface": "net1", "ips": 7}]'])
def test_nothing_that_multus_could_say_makes_it_raise(tmp_path: Path, text: str) -> None:
    assert read_labels(pod(tmp_path, annotations={MULTUS: text}), {}).site == ""


def test_the_site_is_our_own_label_first_then_the_zone(tmp_path: Path) -> None:
    zone = {"topology.kubernetes.io/zone": "eu-north-1a", "topology.kubernetes.io/region": "eu-north-1"}
    assert read_labels(pod(tmp_path / "a", labels=zone), {}).site == "eu-north-1a"
    labels = read_labels(pod(tmp_path / "b", labels={**zone, "farloop/site": "oslo"}), {})
    assert labels.site == "oslo" and ("farloop/site", "oslo") in labels.told


def test_the_device_plugin_tells_pci_addresses_and_docker_tells_by_one_variable(tmp_path: Path) -> None:
    """The plugin's twin variable is passed over."""
    environ = {
        "PCIDEVICE_INTEL_COM_ROCE": "0000:3b:02.1,0000:3b:02.2",
        "PCIDEVICE_INTEL_COM_ROCE_INFO": '{"0000:3b:02.1": {}}',
        "PATH": "/bin",
    }
    nics = read_labels(SysfsReader(tmp_path), environ).nics
    assert nics == {a: LabelSource(resource="intel_com_roce") for a in ("0000:3b:02.1", "0000:3b:02.2")}
    labels = read_labels(SysfsReader(tmp_path), {"FARLOOP_LABELS": "site=oslo, nic.eth0=ethernet/25gbit,odd"})
    assert (labels.site, labels.nics) == ("oslo", {"eth0": LabelSource(kind="ethernet", bits_per_s=25e9)})


def test_a_card_is_a_class_a_rate_or_both_and_anything_else_is_refused_with_an_example() -> None:
    assert parse_nic("roce-v2/100gbit") == LabelSource(kind="roce-v2", bits_per_s=100e9)
    assert parse_nic("ethernet") == LabelSource(kind="ethernet")
    assert parse_nic("2.5Gbit") == LabelSource(bits_per_s=2.5e9)
    assert parse_nic("token-ring") is None and parse_nics("") == {}
    with pytest.raises(
        ValueError, match=r"'eth0:fast' is not a network card: .*eth0=roce-v2/100gbit; kinds are infiniband, "
    ):
        parse_nics("eth1=ethernet, eth0:fast")
