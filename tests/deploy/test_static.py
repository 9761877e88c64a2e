"""What linters, schemas and policies say of docker/ and k8s/: nothing that is not answered in policy.toml."""

import json
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import K8S, OVERLAYS, RENDERED, known_to_kubernetes, objects_of, text_of
from toolbox import ROOT, run, tool

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SCRIPTS = [
    path
    for path in (K8S / "keys.sh", ROOT / "examples" / "slurm.sh", *sorted((ROOT / "tests" / "deploy").rglob("*.sh")))
    if "node_modules" not in path.parts
]
VERSIONS = [f"1.{minor}" for minor in range(29, 37)]
"""Of Kubernetes: those that a cluster of today runs, and the next ones."""

SKIPPED: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "policy.toml").read_text())["checkov"]
"""Check → why it is not followed, and where."""


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_has_nothing_that_hadolint_minds(path: Path) -> None:
    assert run(tool("hadolint"), "--failure-threshold", "style", path) == ""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_has_nothing_that_shellcheck_minds(path: Path) -> None:
    assert run(tool("shellcheck"), path) == ""


def test_the_workflow_has_nothing_that_zizmor_minds() -> None:
    """Permissions, pins, texts of others in commands."""
    assert "No findings to report" in run(tool("zizmor"), "--offline", "--no-progress", ROOT / ".github")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_of_overlay_and_component_is_of_that_kubernetes_version(version: str, tmp_path: Path) -> None:
    """Of a custom resource the Job or the pods in it: tests/unit/deploy checks the rest."""
    names = [name for name in RENDERED if "image" not in name or int(version[2:]) >= 31]
    found = {json.dumps(known_to_kubernetes(one)): name for name in names for one in objects_of(name)}
    found.pop("null")
    file = tmp_path / "all.yaml"
    file.write_text("---\n".join(f"# {name}\n{text}\n" for text, name in found.items()))
    told = run(tool("kubernetes-validate"), "--kubernetes-version", version, "--strict", file)
    assert told.count("passed for resource") == len(found) > 50, told


def test_a_misspelt_key_of_a_manifest_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text_of("local").replace("terminationGracePeriodSeconds", "terminationGraceSeconds"))
    told = run(tool("kubernetes-validate"), "--kubernetes-version", VERSIONS[-1], "--strict", file, code=1)
    assert "terminationGraceSeconds" in told


@pytest.fixture(scope="module")
def failed() -> dict[str, set[str]]:
    """Check → overlays that do not pass it."""
    found: dict[str, set[str]] = {}
    words = ["--framework", "kubernetes", "--skip-download", "--quiet", "--output", "json"]
    for overlay in OVERLAYS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{overlay}.yaml"
            file.write_text(text_of(overlay))
            told = json.loads(run(tool("checkov"), *words, "--file", file, code=None, timeout_s=300))
        assert told["summary"]["passed"] > 50 and told["summary"]["parsing_errors"] == 0
        for one in told["results"]["failed_checks"]:
            found.setdefault(one["check_id"], set()).add(overlay)
    return found


def test_the_manifests_follow_every_policy_but_those_with_a_reason(failed: dict[str, set[str]]) -> None:
    for check, overlays in failed.items():
        assert check in SKIPPED, f"{check}: {overlays}"
        assert overlays <= set(SKIPPED[check].get("only", OVERLAYS)), f"{check}: {overlays}"


def test_no_policy_is_left_out_without_need(failed: dict[str, set[str]]) -> None:
    for check, skipped in SKIPPED.items():
        assert failed.get(check), f"{check} is followed now: its reason can go"
        assert set(skipped.get("only", [])) <= failed[check]
        assert len(skipped["why"].split()) > 10


def test_the_scrape_configuration_of_the_compose_file_is_good() -> None:
    told = run(tool("promtool"), "check", "config", ROOT / "docker" / "prometheus" / "prometheus.yml")
    assert "SUCCESS" in told


def test_every_pinned_package_has_a_wheel_for_arm64(tmp_path: Path) -> None:
    """For the images' glibc 2.36. pip takes markers for those of this machine, so dependencies are left out."""
    platforms = [word for minor in range(17, 37) for word in ("--platform", f"manylinux_2_{minor}_aarch64")]
    words = ["--dry-run", "--no-deps", "--only-binary=:all:", "--python-version", "3.11.14", "--target", tmp_path]
    told = run(
        sys.executable, "-m", "pip", "install", *words, *platforms, "-r", ROOT / "constraints.txt", timeout_s=600
    )
    pins = re.findall(r"^[\w.-]+==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (installs,) = re.findall("^Would install (.*)$", told, re.MULTILINE)
    assert len(installs.split()) == len(pins) > 100


# Grafana cannot be run here: its provisioning files are held against the keys that its documentation lists
# (Administration, Provision Grafana).
DATASOURCE = {
    "name": str, "type": str, "access": str, "orgId": int, "uid": str, "url": str, "user": str, "database": str,
    "basicAuth": bool, "basicAuthUser": str, "withCredentials": bool, "isDefault": bool, "jsonData": dict,
    "secureJsonData": dict, "version": int, "editable": bool,
}  # fmt: skip
PROVIDER = {
    "name": str, "orgId": int, "type": str, "folder": str, "folderUid": str, "disableDeletion": bool,
    "updateIntervalSeconds": int, "allowUiUpdates": bool, "options": dict,
}  # fmt: skip
PROVISIONED = {
    "datasources": ("datasources", DATASOURCE, {"name", "type"}),
    "dashboards": ("providers", PROVIDER, {"name", "type", "options"}),
}


@pytest.mark.parametrize("kind", PROVISIONED)
def test_what_grafana_is_provisioned_with_has_the_keys_that_it_documents(kind: str) -> None:
    top, keys, needed = PROVISIONED[kind]
    files = sorted((ROOT / "docker" / "grafana" / "provisioning" / kind).glob("*.y*ml"))
    assert files
    for file in files:
        content = yaml.safe_load(file.read_text())
        assert set(content) == {"apiVersion", top} and content["apiVersion"] == 1
        for one in content[top]:
            assert needed <= set(one) <= set(keys), file.name
            for name, value in one.items():
                assert isinstance(value, keys[name]), f"{file.name}: {name}"


def test_the_folder_that_grafana_reads_dashboards_from_is_the_one_that_is_mounted() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    mounts = dict(mount.split(":")[:2] for mount in compose["grafana"]["volumes"] if mount.startswith("."))
    provisioning = ROOT / "docker" / "grafana" / "provisioning"
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "farloop.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["../monitoring/dashboards"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert compose[host]["ports"][0].endswith(f":{port}")
