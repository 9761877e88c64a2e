"""What the surroundings of a container tell: files of the downward API, variables, and how operators write cards."""

import json
from pathlib import Path

import pytest

from farloop.node.machine_info import LabelSource, SysfsReader, parse_nic, parse_nics, read_labels

STATUS = json.dumps(
    [
        {"name": "cbr0", "interface": "eth0", "ips": ["10.244.1.7"], "default": True},
        {"name": "default/roce", "interface": "net1", "ips": ["192.168.10.7"], "mac": "02:42:ac:11:00:02"},
    ],
    indent=4,
)


def pod(root: Path, *, labels: dict[str, str], annotations: dict[str, str]) -> SysfsReader:
    """As kubelet writes the two files: one `key="value"` a line, the value quoted with escapes."""
    folder = root / "etc/podinfo"
    folder.mkdir(parents=True)
    for name, pairs in (("labels", labels), ("annotations", annotations)):
        (folder / name).write_text("\n".join(f"{key}={json.dumps(value)}" for key, value in pairs.items()))
    return SysfsReader(root)


def test_multus_tells_networks_and_addresses_by_interface(tmp_path: Path) -> None:
    tree = pod(tmp_path, labels={}, annotations={"k8s.v1.cni.cncf.io/network-status": STATUS, "other": "x"})
    labels = read_labels(tree, {})
    assert labels.nics["net1"] == LabelSource(addresses=("192.168.10.7",), network="default/roce")
    assert labels.nics["eth0"].addresses == ("10.244.1.7",)


def test_the_site_is_our_own_label_first_then_the_zone(tmp_path: Path) -> None:
    zone = {"topology.kubernetes.io/zone": "eu-north-1a", "topology.kubernetes.io/region": "eu-north-1"}
    assert read_labels(pod(tmp_path / "a", labels=zone, annotations={}), {}).site == "eu-north-1a"
    tree = pod(tmp_path / "b", labels={**zone, "farloop/site": "oslo"}, annotations={})
    assert read_labels(tree, {}).site == "oslo"
    assert ("farloop/site", "oslo") in read_labels(tree, {}).told


def test_annotations_say_what_a_card_is_beside_what_multus_says(tmp_path: Path) -> None:
    annotations = {"k8s.v1.cni.cncf.io/network-status": STATUS, "farloop/nic.net1": "roce-v2/100gbit"}
    told = read_labels(pod(tmp_path, labels={}, annotations=annotations), {}).nics["net1"]
    assert (told.kind, told.bits_per_s, told.addresses) == ("roce-v2", 100e9, ("192.168.10.7",))


def test_the_device_plugin_tells_pci_addresses_and_its_twin_is_passed_over(tmp_path: Path) -> None:
    environ = {
        "PCIDEVICE_INTEL_COM_ROCE": "0000:3b:02.1,0000:3b:02.2",
        "PCIDEVICE_INTEL_COM_ROCE_INFO": '{"0000:3b:02.1": {}}',
        "PATH": "/bin",
    }
    nics = read_labels(SysfsReader(tmp_path), environ).nics
    assert nics == {a: LabelSource(resource="intel_com_roce") for a in ("0000:3b:02.1", "0000:3b:02.2")}


def test_docker_tells_by_one_variable(tmp_path: Path) -> None:
    labels = read_labels(SysfsReader(tmp_path), {"FARLOOP_LABELS": "site=oslo, nic.eth0=ethernet/25gbit,odd"})
    assert labels.site == "oslo"
    assert labels.nics == {"eth0": LabelSource(kind="ethernet", bits_per_s=25e9)}


@pytest.mark.parametrize("text", ["", "not json", '{"a": 1}', "[1, null]", '[{"interface": "net1", "ips": 7}]'])
def test_nothing_that_multus_could_say_makes_it_raise(tmp_path: Path, text: str) -> None:
    tree = pod(tmp_path, labels={}, annotations={"k8s.v1.cni.cncf.io/network-status": text})
    assert read_labels(tree, {}).site == ""


def test_a_card_is_a_class_a_rate_or_both() -> None:
    assert parse_nic("roce-v2/100gbit") == LabelSource(kind="roce-v2", bits_per_s=100e9)
    assert parse_nic("ethernet") == LabelSource(kind="ethernet")
    assert parse_nic("2.5Gbit") == LabelSource(bits_per_s=2.5e9)
    assert parse_nic("token-ring") is None


def test_a_card_that_cannot_be_read_is_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match=r"'eth0:fast' is no card: .*eth0=roce-v2/100gbit; kinds are infiniband, "):
        parse_nics("eth1=ethernet, eth0:fast")
    assert parse_nics("") == {}
