"""The dashboards, drawn with Grafana's own libraries in a real browser over a real run's data: no panel is empty.

Needs Prometheus, Chromium, and what `tests/deploy/setup.sh dashboards` builds in tests/deploy/dashview, or in the
folder that DASHVIEW names.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from watched_run import ROOT, WatchedRun

DASHVIEW = Path(os.environ.get("DASHVIEW", Path(__file__).with_name("dashview")))
MISSING = [name for name in ("prometheus", "chromium", "node") if shutil.which(name) is None]
if not (DASHVIEW / "dist" / "view.js").exists():
    MISSING.append(f"{DASHVIEW}/dist: tests/deploy/setup.sh dashboards builds it")

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=f"draws dashboards, and is missing: {', '.join(MISSING)}"),
]

LIVE_S = 60.0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    scene = WatchedRun(tmp_path_factory.mktemp("drawn"), steps=100_000)
    try:
        scene.live(LIVE_S)
        yield scene
    finally:
        scene.end()


@pytest.mark.parametrize("name", ["run", "network", "node", "coordinator"])
def test_every_panel_is_drawn_with_data(scene: WatchedRun, name: str, tmp_path: Path) -> None:
    picture = tmp_path / f"{name}.png"
    words = ["node", "shot.mjs", str(ROOT / "monitoring" / "dashboards" / f"{name}.json"), str(picture)]
    words += ["--prom", scene.prometheus.url, "--scrape", "1", "--range", str(int(LIVE_S))]
    done = subprocess.run(words, cwd=DASHVIEW, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.stat().st_size > 50_000
