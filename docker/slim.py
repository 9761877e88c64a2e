"""Deletes from the packages of an image what no daemon reads.

python3 docker/slim.py SITE_PACKAGES
"""

import re
import sys
from pathlib import Path

UNREAD = re.compile(
    r"(^|.*/)tests?/"  # what packages test themselves with
    r"|torch/(include|share)/|torch/bin/(?!torch_shm_manager)"  # what extensions of torch are built with
    r"|transformers/models/.*\.pyc$"  # several hundred models, of which a run imports one
    r"|pip(-[\d.]+\.dist-info)?/"
)


def is_unread(name: str) -> bool:
    """Of a file of site-packages, named from there."""
    return UNREAD.match(name) is not None


def main(packages: Path) -> None:
    for path in packages.rglob("*"):
        if path.is_file() and is_unread(path.relative_to(packages).as_posix()):
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
