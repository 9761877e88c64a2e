"""Inventories that several tests plan with."""

from farloop.planner.inventory import COORDINATOR, Hub, Inventory, Link, Model, Node, PlanRequest

INSIDE = Link(latency_s=1e-3, bytes_per_s=1.25e9)
ACROSS = Link(latency_s=0.05, bytes_per_s=0.0625e9)


def two_islands(*, h: int) -> Inventory:
    """DT-FM's worked example: nodes 0, 1 in X and 2, 3 in Y."""
    return Inventory(
        nodes=tuple(Node(name=name, site=name[0].upper(), layer_s=0.1) for name in ("x0", "x1", "y0", "y1")),
        model=Model(layers=2, activation_bytes=0.05e9, parameters=0.2e9),
        links={("X", "X"): INSIDE, ("Y", "Y"): INSIDE, ("X", "Y"): ACROSS, ("Y", "X"): ACROSS},
        wish=PlanRequest(h=h, stages=2),
    )


def four_sites() -> Inventory:
    """16 nodes at 4 sites, 100 MB a sync at 4 bits, 25 MB/s and 40 ms each to a coordinator of 125 MB/s."""
    lan, wan = Link(latency_s=1e-4, bytes_per_s=1.25e9), Link(latency_s=0.04, bytes_per_s=25e6)
    links = {(site, site): lan for site in "ABCD"}
    links |= {ends: wan for site in "ABCD" for ends in ((site, COORDINATOR), (COORDINATOR, site))}
    return Inventory(
        nodes=tuple(Node(name=f"{site}{number}", site=site, layer_s=0.05) for site in "ABCD" for number in range(4)),
        model=Model(layers=12, parameters=200e6),
        links=links,
        hub=Hub(in_bytes_per_s=125e6, out_bytes_per_s=125e6),
        wish=PlanRequest(bits=(4,)),
    )


TINY_FROM_SOURCES = {0: (1, 5, 2, 6, 4, 3), 1: (4, 1, 5, 2, 2, 6)}
TINY_BETWEEN = {
    (2, 4): 1, (2, 5): 3, (2, 6): 2, (2, 7): 5, (3, 4): 4, (3, 5): 1, (3, 6): 6, (3, 7): 2,
    (4, 6): 3, (4, 7): 1, (5, 6): 1, (5, 7): 4,
}  # fmt: skip


def tiny_delays() -> list[list[float]]:
    """The tiny exact instance: two sources, two nodes for each of three stages, symmetric seconds."""
    delays = [[1e3] * 8 for _ in range(8)]
    pairs = {(source, 2 + index): value for source, row in TINY_FROM_SOURCES.items() for index, value in enumerate(row)}
    for (u, v), value in {**pairs, **TINY_BETWEEN}.items():
        delays[u][v] = delays[v][u] = float(value)
    for node in range(8):
        delays[node][node] = 0.0
    return delays


TINY_STAGES = (0, 0, 1, 1, 2, 2, 3, 3)


def world(count: int, *, stages: int, skip: float, seed: int = 0, sites: int = 12) -> Inventory:
    """Nodes at sites around a circle: the farther apart, the slower. All numbers made up."""
    links = {}
    for a in range(min(count, sites)):
        for b in range(min(count, sites)):
            away = min(abs(a - b), sites - abs(a - b))
            link = Link(latency_s=1e-3 + 0.02 * away, bytes_per_s=2e9 if away == 0 else 3e8 / (1 + 3 * away))
            links[f"s{a}", f"s{b}"] = link
    return Inventory(
        nodes=tuple(Node(name=f"n{k}", site=f"s{k % sites}", layer_s=0.1, slots=3) for k in range(count)),
        model=Model(layers=24, activation_bytes=33e6, microbatches=6, gap_s=0.1, overhead_s=0.3),
        links=links,
        wish=PlanRequest(stages=stages, skip=skip, seed=seed),
    )
