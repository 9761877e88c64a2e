"""Layout files: what `farloop plan --json` writes, and where its nodes are.

    {"epoch": 1,
     "stages": [{"layers": [0, 2], "nodes": ["oslo", "bonn"]}, {"layers": [2, 4], "nodes": ["rome", "lyon"]}],
     "paths": [{"nodes": ["oslo", "rome"]}, {"nodes": ["bonn", "lyon"]}],
     "addresses": {"oslo": "tcp://10.0.0.1:7800", "bonn": "tcp://10.0.0.2:7800", …}}

Every node of a pipeline reads the same one. Whatever else a plan says is passed over.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farloop.algo.layout import Hop, Layout, Stage
from farloop.algo.layout import Path as Way
from farloop.node.errors import BadAddress
from farloop.node.link_config import split_address
from farloop.node.pipeline.errors import LayoutError
from farloop.wire.errors import RemoteProtocolError
from farloop.wire.messages import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageEntry:
    layers: tuple[int, int]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathEntry:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    stages: tuple[_StageEntry, ...]
    paths: tuple[_PathEntry, ...]
    epoch: int = 1
    addresses: dict[str, str] = field(default_factory=dict)


def read_layout(path: Path) -> tuple[Layout, dict[str, str]]:
    """The layout, and the address of every node of it.

    Raises:
        LayoutError: one line with the file and what is wrong.
    """
    try:
        file = validate(_File, json.loads(path.read_bytes()))
    except OSError as error:
        raise LayoutError(f"cannot read the layout {path}: {error.strerror}") from error
    except ValueError as error:
        raise LayoutError(f"{path} is not JSON: {error}") from error
    except RemoteProtocolError as error:
        raise LayoutError(f"{path}: {str(error).removeprefix('_File.')}") from error
    layout = _layout(file)
    if fault := next(layout.faults(), ""):
        raise LayoutError(f"{path}: {fault}")
    _check_addresses(path, layout, file.addresses)
    return layout, dict(file.addresses)


def layout_json(layout: Layout, addresses: Mapping[str, str]) -> str:
    """The text of the file. The way back from `read_layout`."""
    plain = {
        "epoch": layout.epoch,
        "stages": [{"layers": [stage.first, stage.stop], "nodes": list(stage.replicas)} for stage in layout.stages],
        "paths": [{"nodes": [hop.node for hop in path.hops]} for path in layout.paths],
        "addresses": dict(addresses),
    }
    return json.dumps(plain, indent=1)


def _layout(file: _File) -> Layout:
    stages = tuple(Stage(first=one.layers[0], stop=one.layers[1], replicas=one.nodes) for one in file.stages)
    stage_of = {node: number for number, stage in enumerate(stages) for node in stage.replicas}
    # A node that no stage has is put where `faults` finds it.
    ways = tuple(
        Way(hops=tuple(Hop(stage=stage_of.get(node, len(stages)), node=node) for node in path.nodes))
        for path in file.paths
    )
    return Layout(epoch=file.epoch, stages=stages, paths=ways)


def _check_addresses(path: Path, layout: Layout, addresses: Mapping[str, str]) -> None:
    for stage in layout.stages:
        for node in stage.replicas:
            if node not in addresses:
                raise LayoutError(f"{path}: addresses has none of {node}; every stage must be reachable by the others")
            try:
                split_address(addresses[node])
            except BadAddress as error:
                raise LayoutError(f"{path}: addresses of {node}: {error}") from error
