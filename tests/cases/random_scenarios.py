"""Random scenarios: a seed becomes a run with its terms, its nodes, its weather and a handful of things that go wrong.

Every one can end: a node that dies comes back unless another one stays, a cut link is mended, a full disk is emptied.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import get_args

import simulated_faults as ft
import simulated_faults as sc
import toy_problem as problems
from forged_deltas import Deceit

from farloop.algo.methods import max_tau, method_named
from farloop.algo.schedule import POWERS, steps_by_share
from farloop.algo.spec import NodeId
from farloop.algo.terms import LearningRate, Rewarm, Terms
from farloop.algo.validation import at_most
from farloop.coordinator.decide.roster import EXPIRE_S
from farloop.sim.network import HOSTILE_LINK, LinkConditions

_OWN_CODECS = ("q8", "q4r", "fp32", "topk", "q4:beta=0.9", "q4r:policy=l-greco")

HORIZON_S = 6.0  # faults begin within this: a run without any takes about as long


def random_scenario(seed: int, *, faults: int = 3) -> sc.Scenario:
    """The scenario of a seed, with up to `faults` faults."""
    rng = random.Random(seed)
    method = rng.choice(("diloco", "streaming", "streaming", "co2", "data-parallel", "decoupled", "async"))
    nodes = tuple(_node(rng, name) for name in "abcd"[: rng.choice((1, 2, 2, 3, 3, 4))])
    blocks = rng.choice((1, 2, 3))
    terms = _with_rounds(random.Random(~seed), _terms(rng, method, blocks, len(nodes)))
    terms = _with_lag(random.Random(seed + 1), terms)
    scenario = sc.Scenario(
        terms=terms,
        nodes=_joining(rng, nodes, terms),
        blocks=blocks,
        seed=seed,
        weather=rng.choice(
            (LinkConditions(), LinkConditions(), LinkConditions(latency_s=0.15, jitter_s=0.05), HOSTILE_LINK)
        ),
        num_samples=rng.choice((0, 0, 50)),
        expire_s=random.Random(seed + 2).choice((0.5, 3.0, EXPIRE_S)),
        patience_s=120.0,
    )
    happened = tuple(_fault(rng, scenario) for _ in range(rng.randint(0, faults)))
    more = random.Random(seed + 2)
    nastier = _nastier(more, scenario, faults)
    if nastier:  # and long enough for them to happen in it
        longer = scenario.terms.replace(steps=more.choice((1, 2, 4)) * scenario.terms.schedule.steps)
        scenario = dataclasses.replace(scenario, terms=longer)
    scenario = dataclasses.replace(scenario, faults=(*happened, *nastier))
    scenario = _with_own(random.Random(seed + 5), _with_a_liar(random.Random(seed + 3), scenario))
    return _with_changes(random.Random(seed + 4), scenario)


def _with_own(rng: random.Random, scenario: sc.Scenario) -> sc.Scenario:
    """In some runs a node sends by a codec of its own, or does a share of every round's steps."""
    terms, row = scenario.terms, method_named(scenario.terms.method)
    if not row.inner or rng.random() < 0.6:
        return scenario
    node = rng.choice(scenario.nodes).name
    slots = 1 if row.pattern == "whole" else scenario.blocks + 1
    codecs = ((node, rng.choice(_OWN_CODECS)),) if rng.random() < 0.7 else ()
    share = rng.choice((0.25, 0.5, 0.8))
    shares = ((node, share),) if steps_by_share(terms.schedule.h, share) >= slots and rng.random() < 0.7 else ()
    return dataclasses.replace(scenario, terms=terms.replace(codec_up_of=codecs, h_share_of=shares))


def _with_a_liar(rng: random.Random, scenario: sc.Scenario) -> sc.Scenario:
    """One of the nodes may send something else than it has."""
    terms = scenario.terms.replace(screen=rng.choice(("off", "norm", "norm", "full")))
    if not method_named(terms.method).alone and len(scenario.nodes) >= 3 and terms.admission.min_nodes >= 3:
        terms = terms.replace(merge=rng.choice((None, None, "clipped", "median", "trimmed")))
        terms = terms if terms.admission.quorum is None else terms.replace(merge=None)
    liar = rng.randrange(len(scenario.nodes)) if rng.random() < 0.4 and len(scenario.nodes) > 1 else None
    leave = {f.node for f in scenario.faults if isinstance(f, sc.DrainNode)}
    leave |= {f.node for f in scenario.faults if isinstance(f, sc.CrashNode) and f.down_s is None}
    if all(number == liar or node.name in leave for number, node in enumerate(scenario.nodes)):
        liar = None  # alone it would be held for good, as it should be: no node's work would be part of the run
    method = method_named(terms.method)
    deceits = get_args(Deceit) if method.inner else ("flipped", "claims", "nan")
    if terms.admission.screen == "off" or method.alone:  # what is merged may end it for good
        deceits = tuple(deceit for deceit in deceits if deceit not in ("thousandfold", "overflow"))
    if terms.schedule.eager:  # an eager node decodes what it sent itself
        deceits = tuple(deceit for deceit in deceits if deceit != "nan")
    nodes = tuple(
        dataclasses.replace(node, deceit=rng.choice(deceits)) if number == liar else node
        for number, node in enumerate(scenario.nodes)
    )
    return dataclasses.replace(scenario, terms=terms, nodes=nodes)


def restored_scenario(seed: int, *, faults: int = 1) -> sc.Scenario:
    """The scenario of a seed in which, on top of that, an old copy takes the place of the coordinator's state."""
    rng, scenario = random.Random(seed + 2), random_scenario(seed, faults=faults)
    restored = sc.RestoreCopy(
        after_commits=rng.randint(1, 6),
        commits_ago=rng.randint(1, 6),
        later_s=rng.choice((0.0, 0.05, 0.3, 1.0)),
        down_s=rng.choice((0.3, 1.0, 5.0)),
        decides_s=rng.choice((1.0, 3.0)),
        adopts=random.Random(seed + 5).random() < 0.5,
    )
    terms = scenario.terms.replace(steps=2 * scenario.terms.schedule.steps)
    return dataclasses.replace(scenario, terms=terms, faults=(*scenario.faults, restored))


def parted_scenario(seed: int, *, faults: int = 3) -> sc.Scenario:
    """The run of a seed, with another fate, whose model is cut in stages: nodes hold one each, and some hold more."""
    rng = random.Random(~seed)
    while (base := random_scenario(seed, faults=0)).terms.method == "data-parallel":  # it has the model in one fragment
        seed += 1 << 20
    least, lengths = rng.choice((1, 2, 2)), [rng.randint(1, base.blocks) for _ in range(rng.choice((2, 2, 3)))]
    nodes: list[sc.NodeSetup] = []
    for stage in range(len(lengths)):
        for replica in "abc"[: least + rng.choice((0, 0, 1))]:
            node = dataclasses.replace(_node(rng, replica), name=NodeId(f"{replica}{stage}"), holds=(stage,))
            nodes.append(_late_or_lying(rng, node) if replica == "abc"[least] else node)
    if rng.random() < 0.3:
        some = rng.choice((None, tuple(range(1, len(lengths))), tuple(range(len(lengths)))))
        nodes.append(dataclasses.replace(_late_or_lying(rng, _node(rng, "z")), holds=some))
    quorum = None if base.terms.admission.quorum is None else min(base.terms.admission.quorum, least)
    terms = base.terms.replace(min_nodes=least, quorum=quorum, merge=None, h_share_of=())
    stages = tuple(itertools.accumulate(lengths))[:-1]
    scenario = dataclasses.replace(base, terms=terms, nodes=tuple(nodes), blocks=sum(lengths), stages=stages)
    slots = scenario.trains().begin(terms)[0].identity.layout.slots
    terms = terms.replace(tau=min(terms.schedule.tau, at_most(terms, slots)))
    scenario = dataclasses.replace(scenario, terms=terms)
    happened = tuple(_fault(rng, scenario) for _ in range(rng.randint(0, faults)))
    return dataclasses.replace(scenario, faults=(*happened, *_nastier(rng, scenario, faults), *base.faults))


def _late_or_lying(rng: random.Random, node: sc.NodeSetup) -> sc.NodeSetup:
    """A node that no stage needs may come late, or send something else than it has."""
    if rng.random() < 0.5:
        return dataclasses.replace(node, joins_at=rng.uniform(0.0, HORIZON_S))
    return dataclasses.replace(node, deceit=rng.choice((None, None, "flipped", "claims")))


def _is_dispensable(node: sc.NodeSetup, scenario: sc.Scenario) -> bool:
    """Whether enough others hold each of the stages that it holds."""
    parts = [other.holds for other in scenario.nodes]
    stages = range(len(scenario.stages) + 1) if node.holds is None else node.holds
    return all(sum(p is None or s in p for p in parts) > scenario.terms.admission.min_nodes for s in stages)


def _with_changes(rng: random.Random, scenario: sc.Scenario) -> sc.Scenario:
    """Half of the runs are longer, and given other terms while they go on; what they cannot have is refused."""
    if rng.random() < 0.5:
        return scenario
    terms = scenario.terms.replace(steps=3 * scenario.terms.schedule.steps)
    lied_to = any(node.deceit for node in scenario.nodes)  # and what is merged unseen may end the run for good
    moments = [rng.uniform(0.5, HORIZON_S) for _ in range(rng.randint(1, 5))]
    names = [node.name for node in scenario.nodes]
    changes = (sc.ChangeTerms(at=at, given=tuple(_given(rng, terms, names, lied_to=lied_to).items())) for at in moments)
    return dataclasses.replace(scenario, terms=terms, faults=(*scenario.faults, *changes))


def _given(rng: random.Random, terms: Terms, names: Sequence[NodeId], *, lied_to: bool) -> dict[str, str]:
    values: dict[str, object] = {
        "h": terms.schedule.h + rng.randint(-1, 3),
        "steps": terms.schedule.steps + rng.randint(-4, 6),
        "tau": rng.randint(0, terms.schedule.h - 1),
        "mix": rng.choice((0.0, 0.25, 0.5, 1.0)),
        "codec_up": rng.choice(("q4", "q8", "fp32", "e3m0", "topk", "q4r:policy=l-greco")),
        "codec_down": rng.choice(("q4", "bf16", "fp32")),
        "codec": rng.choice(("q4", "q8")),
        "outer_lr": rng.choice((0.4, 1.0)),
        "outer_momentum": rng.choice((0.0, 0.5, 0.9)),
        "outer_restart": rng.choice((0, 3)),
        "lr": rng.choice((0.025, 0.03)),
        "quorum": rng.choice((1, 2, "none")),
        "floor": rng.choice((1, 2)),
        "max_staleness": rng.choice((0, 1, 4)),
        "max_stale_rounds": rng.choice((0, 1, 8)),
        "screen": rng.choice(("norm", "full") if lied_to else ("off", "norm", "full")),
        "norm_band": rng.choice((4.0, 8.0, 16.0)),
        "merge": rng.choice(("none", "clipped", "median")),
        "evaluate_every_rounds": rng.choice((1, 2)),
        f"codec_up_of.{rng.choice(names)}": rng.choice((*_OWN_CODECS, "none")),
        f"h_share_of.{rng.choice(names)}": rng.choice((0.25, 0.5, 0.8, "none")),
    }
    return {key: str(values[key]) for key in rng.sample(sorted(values), rng.choice((1, 1, 2, 3)))}


def _node(rng: random.Random, name: str) -> sc.NodeSetup:
    return sc.NodeSetup(name=NodeId(name), seed=ord(name), step_s=rng.choice((0.05, 0.1, 0.1, 0.3)))


def _terms(rng: random.Random, method: str, blocks: int, num_nodes: int) -> Terms:
    row, min_nodes = method_named(method), rng.randint(1, num_nodes)
    if not row.inner:
        return problems.terms_of(method, steps=rng.randint(1, 8), min_nodes=min_nodes)
    slots = 1 if row.pattern == "whole" else blocks + 1
    h = rng.randint(slots, slots + 4)
    return problems.terms_of(
        method,
        steps=rng.randint(1, 4 * h),
        h=h,
        tau=rng.randint(0, max_tau(row, h, slots)),
        mix=rng.choice((0.0, 0.5, 1.0)),
        codec_up=rng.choice(("q4", "fp32", "e3m0", "q4r", "q4:beta=0.9")),
        codec_down=rng.choice(("q4", "fp32", "q4r:rounding=nearest")),
        quorum=row.quorum or rng.choice((None, None, rng.randint(1, min_nodes))),
        min_nodes=min_nodes,
        outer_momentum=rng.choice((0.0, 0.9)),
    )


def _with_rounds(rng: random.Random, terms: Terms) -> Terms:
    """Half of the runs have rounds that grow as the learning rate falls, and some a re-warm."""
    if terms.schedule.h == 1 or rng.random() < 0.5:
        return terms
    rule = rng.choice(tuple(POWERS))
    rewarms = (
        (Rewarm(start=terms.schedule.steps // 2, peak=0.02),) if rng.random() < 0.3 and terms.schedule.steps > 4 else ()
    )
    return terms.replace(
        lr=LearningRate(peak=0.02, minimum=0.002, warmup_steps=min(1, terms.schedule.steps), rewarms=rewarms),
        h_rule=rule,
        h_alpha=0.02 * terms.schedule.h ** (1 / POWERS[rule]),
        h_init=rng.choice((None, terms.schedule.h + 1)),
        h_max=rng.choice((None, terms.schedule.h + 3)),
    )


def _with_lag(rng: random.Random, terms: Terms) -> Terms:
    """Some runs merge every delta a round late, where their method can, and half of these eagerly."""
    row = method_named(terms.method)
    lag = rng.randint(row.lag, row.max_lag) if row.lag or rng.random() < 0.3 else 0
    if not lag:
        return terms
    return terms.replace(lag=lag, tau=0, mix=0.0, eager=rng.random() < 0.5)


def _joining(rng: random.Random, nodes: tuple[sc.NodeSetup, ...], terms: Terms) -> tuple[sc.NodeSetup, ...]:
    """Those that the run does not need to begin may come late."""
    return tuple(
        dataclasses.replace(node, joins_at=rng.uniform(0.0, HORIZON_S))
        if number >= terms.admission.min_nodes and rng.random() < 0.5
        else node
        for number, node in enumerate(nodes)
    )


def _fault(rng: random.Random, scenario: sc.Scenario) -> sc.Fault:
    node = rng.choice(scenario.nodes).name
    at, for_s = rng.uniform(0.0, HORIZON_S), rng.choice((0.3, 1.5, 5.0, 15.0))
    last = scenario.nodes[-1].name
    dispensable = _is_dispensable(scenario.nodes[-1], scenario)
    match rng.randrange(9):
        case 0:
            keeps_away = dispensable and node == last and rng.random() < 0.3
            return sc.CrashNode(node=node, at=at, down_s=None if keeps_away else for_s)
        case 1:
            return sc.CrashCoordinator(at=at, down_s=for_s)
        case 2:
            return sc.CrashCoordinator(at_event=rng.randint(1, 40), down_s=0.5)
        case 3:
            return sc.CutLink(node=node, at=at, for_s=for_s, reset=rng.random() < 0.5)
        case 4:
            return sc.PauseNode(node=node, at=at, for_s=for_s)
        case 5:
            return sc.PauseCoordinator(at=at, for_s=for_s)
        case 6:
            return sc.FillDisk(at=at, for_s=for_s)
        case 7 if dispensable:
            return sc.DrainNode(node=last, at=at)
        case _:
            return sc.SpoilAnchor(node=node, at=at, fragment=0)


def _nastier(rng: random.Random, scenario: sc.Scenario, faults: int) -> tuple[sc.Fault, ...]:
    """Up to as many faults of the finer kinds, half of the time two of them at once."""
    made: list[sc.Fault] = []
    for _ in range(rng.randint(0, faults)):
        at = rng.uniform(0.0, HORIZON_S)
        made.append(_nasty(rng, scenario, at))
        if rng.random() < 0.5:
            made.append(_nasty(rng, scenario, at))
    return tuple(made)


def _nasty(rng: random.Random, scenario: sc.Scenario, at: float) -> sc.Fault:
    node, for_s = rng.choice(scenario.nodes).name, rng.choice((0.3, 1.5, 5.0, 15.0))
    match rng.randrange(10):
        case 0 | 1:
            return ft.CrashAtWrite(write=rng.randint(1, 40), durable=rng.random() < 0.5, down_s=rng.choice((0.2, 3.0)))
        case 2:
            return ft.ReadOnlyDisk(at=at, for_s=for_s)
        case 3:
            return ft.LowDisk(at=at, for_s=for_s, room=rng.choice((0, 100, 1000)))
        case 4:
            whose = rng.choice((None, node))
            return ft.ClockJump(node=whose, at=at, by_s=rng.choice((0.5, 3.0, 60.0, 86400.0)))
        case 5:
            return ft.OneWayCut(node=node, at=at, for_s=for_s, to=rng.choice(("node", "coordinator")))
        case 6 | 7:
            return ft.BadLinkPeriod(node=node, at=at, for_s=for_s, resets=rng.choice((1, 4, 12)))
        case 8:
            stays_s, gently = rng.choice((0.1, 1.0, 4.0)), rng.random() < 0.5
            return ft.Rejoin(node=node, at=at, times=rng.choice((2, 5, 12)), stays_s=stays_s, gently=gently)
        case _:
            return ft.SecondCoordinator(at=at)
