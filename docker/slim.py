"""Deletes from the packages of an image what no daemon reads.

python3 docker/slim.py SITE_PACKAGES
"""

import re
import sys
from pathlib import Path

UNREAD = re.compile(
    r"(^|.*/)tests?/"  # what packages test themselves with
    r"|.*\.(c|h|pxd|pyi|pyx)$"  # what they are compiled and type-checked from
    r"|torch/(include|share)/|torch/bin/(?!torch_shm_manager)"  # what extensions of torch are built with
    r"|transformers/models/.*(\.pyc|/(convert|modular)_\w+\.py)$"  # several hundred models, of which a run imports one
    r"|fontTools/"  # matplotlib's, for PDF and PostScript
    r"|zstandard/_cffi\."  # for interpreters other than CPython
    r"|hf_xet[/-]"  # faster downloads from a hub
    r"|(torch/(_inductor|testing)|scipy/(stats|signal)|sympy/(physics|stats)|networkx|pygments)/.*\.pyc$"  # rarely used
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
