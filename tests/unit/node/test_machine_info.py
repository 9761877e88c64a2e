"""Covers `node/machine_info.py`: cards, memory and labels of a machine, as its files tell them."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import Machine
from stories import StoryText, all_stories, check_story, python

import farloop.node.machine_info
from farloop.node.machine_info import (
    LabelSource,
    SysfsReader,
    read_labels,
    read_nics,
)
from farloop.wire.machine_info import LONGEST, MOST_NICS, Inventory, Nic, trimmed


def seen(machine: Machine, **told: object) -> dict[str, Nic]:
    return {nic.name: nic for nic in read_nics(SysfsReader(machine.root), **told)}  # type: ignore[arg-type]


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


STATUS = json.dumps([
    {"name": "cbr0", "interface": "eth0", "ips": ["10.244.1.7"], "default": True},
    {"name": "default/roce", "interface": "net1", "ips": ["192.168.10.7"], "mac": "02:42:ac:11:00:02"},
], indent=4)  # fmt: skip
MULTUS = "k8s.v1.cni.cncf.io/network-status"


def pod(root: Path, *, labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None) -> SysfsReader:
    """As kubelet writes the two files: one `key="value"` a line, the value quoted with escapes."""
    folder = root / "etc/podinfo"
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("labels", labels), ("annotations", annotations)):
        (folder / name).write_text("\n".join(f"{key}={json.dumps(value)}" for key, value in (pairs or {}).items()))
    return SysfsReader(root)


def differing(told: Nic | LabelSource) -> str:
    """Its fields that are not the default's, but for the facts."""
    plain = type(told)(name="") if isinstance(told, Nic) else LabelSource()
    names = [field.name for field in dataclasses.fields(told) if field.name != "facts"]
    return " ".join(f"{name}={getattr(told, name)}" for name in names if getattr(told, name) != getattr(plain, name))


@all_stories(__file__, "cards")
def test_stories(path: Path, story: StoryText, tmp_path: Path, rewrite: bool) -> None:
    machine = Machine(tmp_path)

    def cards(**told: object) -> None:
        sys.stdout.writelines(f"{differing(nic)}\n" for nic in seen(machine, **told).values())

    def facts(name: str, **told: object) -> None:
        facts = seen(machine, **told)[name].facts
        sys.stdout.writelines(f"{fact.about}: {fact.value} ({fact.source})\n" for fact in facts)

    def multus(**annotations: str) -> None:
        named = {MULTUS if name == "status" else f"farloop/nic.{name}": text for name, text in annotations.items()}
        nics = read_labels(pod(tmp_path, annotations={**named, "other": "x"}), {}).nics
        sys.stdout.writelines(f"{name}: {differing(label) or 'nothing'}\n" for name, label in nics.items())

    words = {"machine": machine, "root": tmp_path, "tree": SysfsReader(tmp_path)}
    words |= {"cards": cards, "facts": facts, "multus": multus}
    play = python(vars(farloop.node.machine_info), globals(), words)
    check_story(path, story, lambda line: play(line).replace(str(tmp_path), ""), rewrite=rewrite)
