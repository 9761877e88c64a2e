"""A run of real processes that a real Prometheus scrapes, with the rules of monitoring/alerts: what dashboards and
alerts are held against.

    PYTHONPATH=tests/integration python tests/deploy/watched_run.py FOLDER [SECONDS]

runs it for that long (240 unless told), says where Prometheus answers, and waits for a line: to look at dashboards.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loopback import METRONOME, Daemon, Run, node_of

from farloop.local.processes import free_port
from farloop.monitoring.endpoint import METRICS, Endpoint, Response

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "monitoring" / "alerts"

NODES = ("oslo", "porto", "tallinn")
LINKS = {"oslo": "40mbit/15ms", "porto": "20mbit/40ms", "tallinn": "8mbit/80ms"}

PACE_S = {"oslo": 0.10, "porto": 0.11, "tallinn": 0.13}
"""Of an inner step: the run lasts, and leaves the machine to others."""

SETTINGS: Mapping[str, object] = {
    "name": "watched", "nodes": 3, "steps": 2600, "batch_sequences": 8, "method": "streaming", "h": 6,
    "codec_up": "q4:beta=0.5", "screen": "full", "h_rule": "qsr", "h_alpha": 0.0049, "h_max": 12,
}  # fmt: skip

BEGINS_WITHIN_S = 300.0
"""Four processes that load torch, on a machine with other things to do."""

DCGM = {
    "DCGM_FI_DEV_GPU_UTIL": (0, 100),
    "DCGM_FI_DEV_FB_USED": (20_000, 60_000),
    "DCGM_FI_DEV_FB_FREE": (20_000, 60_000),
    "DCGM_FI_DEV_GPU_TEMP": (40, 75),
    "DCGM_FI_DEV_POWER_USAGE": (200, 700),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": (0, 1),
    "DCGM_FI_DEV_XID_ERRORS": (0, 0),
}
"""Series of NVIDIA's exporter that the dashboards show, and where their values lie."""


def made_up_gpus() -> Response:
    """Stands in for NVIDIA's exporter where there is no GPU: its names and labels, and values that only look alive."""
    lines = []
    for name, (low, high) in DCGM.items():
        lines.append(f"# TYPE {name} gauge")
        for gpu in range(2):
            phase = (time.monotonic() / 40 + gpu / 5) % 1
            labels = f'gpu="{gpu}",UUID="GPU-{gpu}",device="nvidia{gpu}",modelName="made up",Hostname="oslo-0"'
            lines.append(f"{name}{{{labels}}} {low + (high - low) * (0.6 + 0.35 * abs(2 * phase - 1)):g}")
    return Response(body="\n".join([*lines, ""]).encode())


class Prometheus:
    """One process, over a folder; scrapes every second."""

    def __init__(self, folder: Path, targets: Mapping[str, list[str]], rules: Path | None = ALERTS) -> None:
        """`targets`: host:port by job."""
        self.port = free_port()
        jobs = [{"job_name": job, "static_configs": [{"targets": these}]} for job, these in targets.items()]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [f"{rules}/*.yml"] if rules else [],
            "scrape_configs": jobs,
        }
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(config))
        binary = shutil.which("prometheus")
        assert binary is not None
        self._log = (folder / "prometheus.log").open("ab")
        address = f"--web.listen-address=127.0.0.1:{self.port}"
        words = [binary, f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}", address]
        self.process = subprocess.Popen(words, stdout=self._log, stderr=self._log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, page: str, **query: object) -> Any:
        """The data of an answer of its API; an error is raised with its words."""
        address = f"{self.url}/api/v1/{page}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error

    def ask(self, expression: str, **query: object) -> list[Any]:
        """The result of an instant query."""
        result: list[Any] = self.get("query", query=expression, **query)["result"]
        return result

    def course(self, expression: str, seconds: float) -> list[Any]:
        """The result of a range query over the last so many seconds, second by second."""
        now = float(self.ask("vector(time())")[0]["value"][1])
        answer = self.get("query_range", query=expression, start=now - seconds, end=now, step=1)
        result: list[Any] = answer["result"]
        return result

    def until(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except OSError:
                pass  # it does not listen yet
            assert self.process.poll() is None, "Prometheus has ended: see prometheus.log"
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            time.sleep(0.2)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class WatchedRun:
    """A coordinator, three nodes on thin links, and Prometheus."""

    def __init__(self, folder: Path, *, rules: Path | None = ALERTS, **settings: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run = Run(folder, **{**SETTINGS, **settings})
        self.run.tables["data"] = {"max_bytes": 2_000_000}  # more than a run of minutes can learn by heart
        self.run.tables["coordinator"]["egress_price_per_gb"] = 0.09
        self.pages = {name: free_port() for name in NODES}
        self.nodes: dict[str, Daemon] = {}
        self.gpus = Endpoint("127.0.0.1", 0, {METRICS: made_up_gpus})
        self.coordinator = self.run.start_coordinator()
        for name in NODES:
            self.start_node(name)
        targets = {
            "farloop-coordinator": [f"127.0.0.1:{self.run.http}"],
            "farloop-node": [f"127.0.0.1:{port}" for port in self.pages.values()],
            "dcgm-exporter": [f"127.0.0.1:{self.gpus.port}"],
        }
        self.prometheus = Prometheus(folder, targets, rules)

    def start_node(self, name: str) -> None:
        """Over its link; the same one if it was started before."""
        link = "" if name in self.nodes else LINKS[name]
        file = self.run.node_toml(name, link, {"http": f"127.0.0.1:{self.pages[name]}"})
        words = [str(METRONOME), str(file), str(self.run.folder / "go"), str(PACE_S[name])]
        self.nodes[name] = self.run.start(f"node-{name}", *words)

    def bring_back(self, name: str) -> None:
        self.start_node(name)
        self.run.until(f"{name} is back", lambda status: node_of(status, name)["connected"], BEGINS_WITHIN_S)

    def live(self, seconds: float) -> None:
        """Let it run so long; halfway a node loses its link for a while, another dies, and the coordinator restarts."""
        run = self.run
        run.until("all train", lambda status: status["commits"] > 8, BEGINS_WITHIN_S)
        began = time.monotonic()
        time.sleep(seconds * 0.3)
        self.nodes["porto"].kill()
        run.until("it goes on without porto", lambda status: not node_of(status, "porto")["connected"], BEGINS_WITHIN_S)
        self.bring_back("porto")
        time.sleep(max(5.0, began + seconds * 0.6 - time.monotonic()))  # its new incarnation is scraped
        self.coordinator.kill()
        self.coordinator = run.start_coordinator()
        time.sleep(max(0.0, began + seconds - time.monotonic()))

    def end(self) -> None:
        self.prometheus.end()
        self.run.end()
        self.gpus.close()


def main(folder: Path, seconds: float) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    scene = WatchedRun(folder)
    try:
        print(scene.prometheus.url, scene.run.http, flush=True)  # noqa: T201 - a script for a person
        scene.live(seconds)
        print("ready; a line ends it", flush=True)  # noqa: T201
        sys.stdin.readline()
    finally:
        scene.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 240.0)
