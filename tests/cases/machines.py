"""Machines made of files: what the kernel shows of network cards below a root folder."""

from collections.abc import Mapping
from pathlib import Path

GID = "fe80:0000:0000:0000:0c42:a103:0065:bafe"


class Machine:
    """A folder that looks like `/` to whoever asks for network cards."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/class/net").mkdir(parents=True)
        self.netdev("lo", kind=772, state="unknown", speed=None)

    def write(self, place: str, text: str) -> None:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def unreadable(self, place: str) -> None:
        """A file that no read gets anything from: a folder in its place fails for every user, root included."""
        (self.root / place).mkdir(parents=True)

    def link(self, place: str, target: str) -> None:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def netdev(self, name: str, *, kind: int = 1, state: str = "up", speed: int | None = 10_000, pci: str = "") -> None:
        place = f"sys/class/net/{name}"
        self.write(f"{place}/type", str(kind))
        self.write(f"{place}/operstate", state)
        self.write(f"{place}/carrier", "1" if state != "down" else "0")
        if speed is None:
            self.unreadable(f"{place}/speed")
        else:
            self.write(f"{place}/speed", str(speed))
        if pci:
            self.link(f"{place}/device", f"../../../{pci}")

    def bond(self, name: str, *members: str) -> None:
        self.netdev(name, speed=50_000)
        self.write(f"sys/class/net/{name}/bonding/slaves", " ".join(members))

    def port(
        self,
        device: str,
        *,
        layer: str,
        rate: str = "100 Gb/sec (4X EDR)",
        state: str = "4: ACTIVE",
        node_type: str = "1: CA",
        pci: str = "",
        gids: Mapping[int, tuple[str, str]] | None = None,
        verbs: bool = True,
    ) -> None:
        """`gids`: index → (type, network device); an index in between is there, and unreadable."""
        place = f"sys/class/infiniband/{device}/ports/1"
        self.write(f"sys/class/infiniband/{device}/node_type", node_type)
        self.write(f"{place}/link_layer", layer)
        self.write(f"{place}/rate", rate)
        self.write(f"{place}/state", state)
        self.write(f"{place}/phys_state", "5: LinkUp")
        self.write(f"{place}/gids/0", GID)
        for index in range(max(gids, default=-1) + 2 if gids else 0):
            if gids and index in gids:
                kind, netdev = gids[index]
                self.write(f"{place}/gid_attrs/types/{index}", kind)
                self.write(f"{place}/gid_attrs/ndevs/{index}", netdev)
            else:
                self.unreadable(f"{place}/gid_attrs/types/{index}")
        if pci:
            self.link(f"sys/class/infiniband/{device}/device", f"../../../{pci}")
        self.write(f"sys/class/infiniband_verbs/uverbs_{device}/ibdev", device)
        if verbs:
            self.write(f"dev/infiniband/uverbs_{device}", "")
