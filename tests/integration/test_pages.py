"""What README.md, docs/quickstart.md and docs/two-clusters.md tell a reader to type, typed: every machine is a folder.

The start paths of docs/index.md lead through the last of them; tests/cluster and tests/deploy take those of schedulers.

A page's commands are taken from the page, in any order, by how they begin; one that was not taken fails the test, so a
page cannot gain a command that is not run. `SMALLER` makes runs short and lets them share this machine; each of its
texts must stand in the page, so a page that changes is noticed.
"""

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import object_server
import pytest
from loopback import DEADLINE_S, POLL_S, Daemon, environment
from test_commands import ROOT, blocks, typed

from farloop.local.processes import free_port, page

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NANO = 'model = "nano"\nbatch_sequences = 4\nsequence_tokens = 32\nevaluation_sequences = 8\nwarmup_steps = 5'

ELSEWHERE = ("make ", "python3 -m venv", ". .venv", "pip install ", ".venv/bin/farloop lab chaos")
"""test_demo.py and test_chaos.py run these, tests/deploy/test_release.py installs; a test does not run the tests."""

MODEL = """
import torch
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters())

def next_loss(model, device):
    tokens = torch.randint(16, (4, 8), device=device)
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), tokens.numel()

"""
"""What the reader of README's loop has already."""


class Reader:
    """Types the commands of one page into shells, and starts the daemons that it names.

    Args:
        smaller: texts of the page, and what stands in their place here.
    """

    def __init__(self, page: str, folder: Path, smaller: Mapping[str, str]) -> None:
        self.folder, self._smaller = folder, smaller
        self.text = (ROOT / page).read_text(encoding="utf-8")
        for text in smaller:
            assert text in self.text, f"{page} does not say {text!r} any more"
        found = list(blocks(ROOT / page))
        self.left = [one for block in found for one in block.commands if not one.startswith(ELSEWHERE)]
        self._files = ["\n".join(block.text) + "\n" for block in found if block.language in ("toml", "python")]
        self.daemons: list[Daemon] = []
        self.taken: list[str] = []

    def machine(self, name: str) -> Path:
        """The folder that stands for a machine."""
        (self.folder / name).mkdir(exist_ok=True)
        return self.folder / name

    def take(self, beginning: str) -> str:
        """The page's next command that begins so, made smaller."""
        (line, *_) = [line for line in self.left if line.startswith(beginning)] or [""]
        assert line, f"the page has no command left that begins with {beginning!r}: {self.left}"
        self.left.remove(line)
        self.taken.append(line)
        return self._shrunk(line)

    def run(self, line: str, machine: str) -> str:
        """Type a line and wait until it ends well; what it printed."""
        done = subprocess.run(
            ["bash", "-c", line],
            **{"cwd": self.machine(machine), "env": as_activated(), "timeout": DEADLINE_S},
            **{"capture_output": True, "text": True},
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def start(self, line: str, machine: str, name: str = "") -> Daemon:
        """Type a line whose command goes on."""
        command = ["bash", "-c", f"exec {line}"]
        self.daemons.append(Daemon(name or line.split()[1], command, self.machine(machine), as_activated()))
        return self.daemons[-1]

    def write(self, first_line: str, machine: str, name: str, *, before: str = "", **changes: str) -> None:
        """Copy a file of the page, found by its first line, to a machine."""
        (text,) = (text for text in self._files if text.startswith(first_line))
        for old, new in changes.items():
            text = text.replace(old, new)
        (self.machine(machine) / name).write_text(before + self._shrunk(text), encoding="utf-8")

    def make_keys(self, *nodes: str, on: Mapping[str, str] | None = None) -> None:
        """Every machine makes its key; the public halves are copied as the page says."""
        self.run(self.take("mkdir allowed && farloop keys new"), "coordinator")
        keys = self.machine("coordinator") / "keys"
        line = self.take("farloop keys new keys --name oslo")
        for node in nodes:
            machine = (on or {}).get(node, node)
            self.run(line.replace("oslo", node), machine)
            if machine != "coordinator":
                shutil.copy(keys / "coordinator.pub", self.machine(machine) / "keys")
                shutil.copy(self.machine(machine) / f"keys/{node}.pub", keys)

    def wait_for_the_end(self) -> None:
        for daemon in self.daemons:
            code = daemon.process.wait(DEADLINE_S)
            assert code == 0, f"{daemon.name} ended with {code}\n{self.logs()}"

    def until_answered(self, http: int) -> None:
        """Wait for the coordinator's page."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and self.daemons[0].running:
            with suppress(OSError), socket.create_connection(("127.0.0.1", http)):
                return
            time.sleep(POLL_S)
        raise AssertionError(self.logs())

    def logs(self) -> str:
        return "\n".join(f"--- {daemon.log}\n{daemon.said[-3000:]}" for daemon in self.daemons)

    def _shrunk(self, text: str) -> str:
        for old, new in self._smaller.items():
            text = text.replace(old, new)
        return text


def as_activated() -> dict[str, str]:
    """The environment of a reader who has activated the virtual environment."""
    return {**(ours := environment()), "PATH": f"{Path(sys.executable).parent}:{ours['PATH']}"}


Open = Callable[..., Reader]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens a page; whatever its reader has started ends with the test."""
    readers: list[Reader] = []

    def open_page(page: str, smaller: Mapping[str, str]) -> Reader:
        readers.append(Reader(page, tmp_path, smaller))
        return readers[-1]

    yield open_page
    for reader in readers:
        for daemon in reader.daemons:
            daemon.end()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("obstore") is None, reason="needs the extra 'cloud' (obstore)")
def test_a_second_coordinator_by_two_clusters_step_by_step(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader is killed; the run goes on to its end with the other."""
    ports = {host: (free_port(), free_port(), free_port()) for host in ("coordinator", "second")}
    places = {
        f"{name}.example:{7700 + what}": f"127.0.0.1:{each[what]}"
        for name, each in zip("ab", ports.values(), strict=True)
        for what in (0, 1)
    }
    small = {"steps = 2000": f"steps = 100\n{NANO}", "nproc = 8": "nproc = 1", 'model = "small"\n': ""}
    reader = opened("docs/two-clusters.md", small | places | {"s3://BUCKET/": "s3://runs/"})
    reader.make_keys("oslo", "lima")
    for node in ("oslo", "lima"):
        reader.run(f"farloop keys authorize keys/{node}.pub --allow allowed", "coordinator")
        reader.write("# node.toml", node, "node.toml", **{"oslo": node, "tcp://coordinator.example:7700": BOTH})
    assert f'`coordinator = "{BOTH}"`' in reader.text
    shutil.copytree(reader.machine("coordinator"), reader.machine("second"), dirs_exist_ok=True)
    with object_server.serving(monkeypatch):
        for host, (bind, mirror, http) in ports.items():
            own = {"0.0.0.0:7700": f"0.0.0.0:{bind}", ":9700": f":{http}", "0.0.0.0:7701": f"0.0.0.0:{mirror}"}
            reader.write("# run.toml\n", host, "run.toml", **own)
            own["leads_by"] = f'name = "{host}"\nleads_by'  # the two hosts have one name here
            first = (reader.machine(host) / "run.toml").read_text()
            reader.write("# run.toml, on both hosts", host, "run.toml", before=first, **own)
            reader.run("farloop doctor run.toml", host)
            reader.start("farloop coordinator run.toml", host, host)
            reader.until_answered(http)
        for node in ("oslo", "lima"):
            reader.start("farloop node node.toml", node, node)
        deadline = time.monotonic() + DEADLINE_S
        while not (
            (status := page(ports["coordinator"][2])) and status["standby"]["in_sync"] and status["outer_steps"]
        ):
            assert time.monotonic() < deadline, reader.logs()
            time.sleep(POLL_S)
        reader.daemons.pop(0).kill()
        reader.wait_for_the_end()
    assert (reader.machine("second") / "state/model.safetensors").is_file()


def two_machines(http: int, run: str = NANO) -> dict[str, str]:
    """Smaller: two nodes that meet a coordinator at coordinator.example:7700."""
    port = free_port()
    return {
        "steps = 2000": f"steps = 40\n{run}",
        'allow = "allowed"': f'allow = "allowed"\nhttp = "127.0.0.1:{http}"',
        "0.0.0.0:7700": f"0.0.0.0:{port}",
        "coordinator.example:7700": f"127.0.0.1:{port}",
        "status --watch": f"status --watch --url 127.0.0.1:{http}",
    }


def test_readme_two_machines(opened: Open) -> None:
    reader = opened("README.md", two_machines(http := free_port()))
    reader.make_keys("oslo", "lima")
    assert "`farloop keys authorize NAME.pub`" in reader.text
    reader.write("# run.toml", "coordinator", "run.toml")
    for node in ("oslo", "lima"):
        reader.run(f"farloop keys authorize keys/{node}.pub", "coordinator")
        reader.write("# node.toml", node, "node.toml", oslo=node)
    reader.run(reader.take("farloop doctor run.toml"), "coordinator")
    reader.start(reader.take("farloop coordinator run.toml"), "coordinator")
    reader.until_answered(http)
    reader.start(reader.take("farloop status --watch"), "coordinator", "status")
    line = reader.take("farloop node node.toml")
    for node in ("oslo", "lima"):
        reader.start(line, node)
    reader.wait_for_the_end()
    assert (reader.machine("coordinator") / "state/model.safetensors").is_file()
    assert not reader.left, "commands of the page that were not run"
    models = opened("docs/models.md", {" --tokenizer llama/": ""})
    models.run(models.take("farloop export"), "coordinator")
    assert [*(reader.machine("coordinator") / "out/model").iterdir()]


@pytest.mark.slow
def test_readme_a_loop_of_ones_own(opened: Open) -> None:
    smaller = two_machines(http := free_port(), 'init = "first.safetensors"')
    reader = opened("README.md", smaller | {"--nproc-per-node 8": "--nproc-per-node 2"})
    reader.make_keys("oslo", "lima")
    save = re.search(r"`(safetensors\.torch\.save_file\(.+?\))`", reader.text)
    assert save and 'put `init = "first.safetensors"` into `[run]`' in reader.text
    (reader.machine("coordinator") / "save.py").write_text(f"import safetensors.torch\n{MODEL}{save[1]}\n")
    reader.run("python save.py", "coordinator")
    reader.write("# run.toml", "coordinator", "run.toml")
    for node in ("oslo", "lima"):
        reader.run(f"farloop keys authorize keys/{node}.pub", "coordinator")
        reader.write("from pathlib import Path", node, "loop.py", before=MODEL, oslo=node)
    reader.start(reader.take("farloop coordinator run.toml"), "coordinator")
    reader.until_answered(http)
    ranks = re.search(r"`(torchrun --nproc-per-node 8 loop\.py)`", reader.text)
    assert ranks
    reader.start("python loop.py", "oslo", "loop")
    reader.start(f"{ranks[1].replace('8', '2')} --rdzv-backend c10d --rdzv-endpoint localhost:0", "lima", "loop")
    reader.wait_for_the_end()
    assert (reader.machine("coordinator") / "state/model.safetensors").is_file()


@pytest.mark.slow
def test_quickstart_by_hand(opened: Open, tmp_path: Path) -> None:
    reader = opened("docs/quickstart.md", {})
    examples = shutil.copytree(ROOT / "examples", reader.machine("here") / "examples")
    port, http = free_port(), free_port()
    for file in ("run", "node-a", "node-b"):
        text = (examples / f"{file}.toml").read_text()
        for old, new in {
            "steps = 300": "steps = 30\nbatch_sequences = 2\nsequence_tokens = 32",
            'model = "tiny"': 'model = "nano"',
            "7700": str(port),
            "9700": str(http),
        }.items():
            assert file != "run" or old in text
            text = text.replace(old, new)
        (examples / f"{file}.toml").write_text(text)
    reader.run(reader.take("farloop config check"), "here")
    reader.start(reader.take("farloop coordinator"), "here", "coordinator")
    reader.until_answered(http)
    reader.start(reader.take("farloop status --watch") + f" --url 127.0.0.1:{http}", "here", "status")
    for name in ("a", "b"):
        reader.start(reader.take(f"farloop node examples/node-{name}.toml"), "here", name)
    reader.wait_for_the_end()
    verify = "farloop journal verify out/example/coordinator"
    assert f"`{verify}`" in reader.text
    reader.run(verify, "here")
    for file in ("model.safetensors", "metrics.jsonl"):
        assert (reader.machine("here") / "out/example/coordinator" / file).is_file()
    assert not reader.left, "commands of the page that were not run"


BOTH = "tcp://a.example:7700, tcp://b.example:7700"

START_PATHS = {
    "Two laptops": {"oslo": "coordinator", "lima": "lima"},
    "A GPU box and a rented one": {"oslo": "oslo", "lima": "coordinator"},
    "Four clusters": {name: name for name in ("oslo", "lima", "rome", "kyiv")},
}
"""What the reader of docs/index.md has: nodes, and the machine that each is on."""


@pytest.mark.slow
@pytest.mark.parametrize("have", START_PATHS)
def test_a_start_path_by_two_clusters_step_by_step(have: str, opened: Open) -> None:
    nodes = START_PATHS[have]
    smaller = two_machines(http := free_port())
    page_http = {'model = "small"\n': "", "nproc = 8": "nproc = 1", '"127.0.0.1:9700"': f'"127.0.0.1:{http}"'}
    del smaller['allow = "allowed"']
    reader = opened("docs/two-clusters.md", smaller | page_http)
    reader.make_keys(*nodes, on=nodes)
    reader.take("farloop keys new keys --name lima")
    allow, _ = (reader.take("farloop keys authorize") for _ in "12")
    reader.run(" && ".join(allow.replace("oslo", node) for node in nodes), "coordinator")
    reader.run(reader.take("farloop keys list"), "coordinator")
    reader.write("# run.toml\n", "coordinator", "run.toml", **{"nodes = 2": f"nodes = {len(nodes)}"})
    for node, machine in nodes.items():
        reader.write("# node.toml", machine, "node.toml", oslo=node)
    reader.run(reader.take("farloop config check run.toml"), "coordinator")
    reader.run(reader.take("farloop config show node.toml"), nodes["oslo"])
    reader.run(reader.take("farloop doctor run.toml"), "coordinator")
    reader.start(reader.take("farloop coordinator run.toml"), "coordinator")
    reader.until_answered(http)
    reader.run(reader.take("farloop doctor node.toml"), nodes["oslo"])
    line, follow = reader.take("farloop node node.toml"), reader.take("farloop journal show --follow")
    following = Daemon("follow", ["bash", "-c", f"exec {follow}"], reader.machine("coordinator"), as_activated())
    reader.start(reader.take("farloop status --watch"), "coordinator", "status")
    for node, machine in nodes.items():
        reader.start(line, machine, node)
    for plan in [line for line in typed(have) if line.startswith("farloop plan")]:
        (reader.machine("coordinator") / "model.toml").write_text("[model]\nlayers = 4\nparameters = 1e6\n")
        loop = (
            f"until {plan.replace('9700', str(http))}; do sleep 1; farloop status --url 127.0.0.1:{http} || exit; done"
        )
        reader.run(loop, "coordinator")  # nodes have to join first
        reader.taken.append(plan)
    reader.wait_for_the_end()
    following.end()
    assert "commit" in following.said
    explained = reader.run(reader.take("farloop explain f0:812").replace("812", "1"), "coordinator")
    assert all(node in explained for node in nodes)
    assert (reader.machine("coordinator") / "state/model.safetensors").is_file()
    assert not reader.left, "commands of the page that were not run"
    assert set(typed(have)) <= set(reader.taken), "commands of the start page that were not run"
