"""What a node tells of its machine, from files of a made-up one."""

from pathlib import Path

from machines import Machine

from farloop.node.machine_info import OperatorLabels, SysfsReader, limits, look_around
from farloop.wire.machine_info import LONGEST, MOST_NICS, Inventory, Nic, trimmed


def test_a_machine_tells_cards_memory_and_how_its_connections_behave(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.netdev("eth0", speed=25_000, pci="0000:01:00.0")
    machine.write("proc/meminfo", "MemTotal:       65536000 kB\nMemFree: 1 kB")
    machine.write("proc/sys/net/ipv4/tcp_congestion_control", "cubic")
    told = look_around({"FARLOOP_LABELS": "site=oslo"}, OperatorLabels(), root=tmp_path, cpus=8)
    assert (told.site, told.site_from) == ("oslo", "annotation")
    assert [nic.name for nic in told.nics] == ["eth0"]
    assert (told.memory_bytes, told.cpus, told.congestion) == (65536000 * 1024, 8, "cubic")
    assert look_around({}, OperatorLabels(), root=tmp_path, device_bytes=80 << 30, devices=1).memory_bytes == 80 << 30


def test_the_operator_names_the_site_whatever_labels_say(tmp_path: Path) -> None:
    operator = OperatorLabels.of("bergen", "tcp://10.0.0.5:7800", "eth0=ethernet/10gbit")
    told = look_around({"FARLOOP_LABELS": "site=oslo"}, operator, root=tmp_path)
    assert (told.site, told.site_from, told.address) == ("bergen", "operator", "tcp://10.0.0.5:7800")
    assert told.nics[0].bits_per_s == 10e9


def test_a_container_has_the_memory_of_its_group(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/meminfo", "MemTotal: 65536000 kB")
    machine.write("sys/fs/cgroup/memory.max", "max")
    assert limits(SysfsReader(tmp_path)).memory_bytes == 65536000 * 1024
    machine.write("sys/fs/cgroup/memory.max", str(4 << 30))
    assert limits(SysfsReader(tmp_path)).memory_bytes == 4 << 30


def test_buffers_and_allowed_controls_are_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456")
    machine.write("proc/sys/net/ipv4/tcp_allowed_congestion_control", "reno cubic")
    found = limits(SysfsReader(tmp_path))
    assert (found.receive_bytes, found.send_bytes, found.allowed) == (6291456, None, ("reno", "cubic"))


def test_nothing_at_all_is_an_inventory_too(tmp_path: Path) -> None:
    told = look_around({}, OperatorLabels(), root=tmp_path / "nowhere")
    assert (told.nics, told.memory_bytes, told.site, told.site_from) == ((), None, "", "")


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
    assert cut.nics[0].name.startswith("?[31mnn")
    assert trimmed(cut) == cut
