"""The version stands in one place, and what a user notices of it in the changelog."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION: str = PROJECT["version"]


def test_the_changelog_begins_with_what_is_unreleased_or_with_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] in ("Unreleased", VERSION)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert not released or released[0] == VERSION
    assert released == sorted(released, key=lambda one: [int(part) for part in one.split(".")], reverse=True)


@pytest.mark.parametrize("image", ["coordinator", "node"])
def test_an_image_says_no_other_version(image: str) -> None:
    text = (ROOT / f"docker/{image}.Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^ARG VERSION=(.*)$", text, flags=re.MULTILINE) in ([VERSION], ["unknown"])


def test_every_dependency_is_pinned_for_the_images() -> None:
    pins = {
        re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    extras = PROJECT["optional-dependencies"]
    for needed in [*PROJECT["dependencies"], *extras["dev"], *extras["docs"], *extras["release"]]:
        name = re.match(r"[\w.-]+", needed)
        assert name is not None and re.sub(r"[-_.]+", "-", name[0]).lower() in pins, f"{needed} has no pin"


def test_the_licence_is_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")
