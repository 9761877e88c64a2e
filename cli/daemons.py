"""`farloop coordinator` and `farloop node`: settings in, an exit code out. The daemons are elsewhere."""

import dataclasses
import gc
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from farloop.algo.spec import RunSpec
from farloop.algo.terms import Terms
from farloop.cli.interrupts import end_at_once, on_signals
from farloop.cli.pages import LoopWatch, Viewers, pages, standby_pages
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.config.memory import memory_of
from farloop.config.run_spec import Plan, planned
from farloop.config.settings import NodeFile, RunFile
from farloop.coordinator.admin import over
from farloop.coordinator.change_terms import untrue
from farloop.coordinator.daemon import Coordinator
from farloop.coordinator.decide.adoption import PATIENCE_S, AdoptionSettings
from farloop.coordinator.leadership import Leadership, Unusable, marked, term_store, unmark
from farloop.coordinator.net.zmq_mirror import MirrorServer
from farloop.coordinator.net.zmq_router import check_bind
from farloop.coordinator.settings import CoordinatorConfig
from farloop.coordinator.standby import Contender, has_run
from farloop.coordinator.storage.bucket import Bucket, CopyFailed
from farloop.coordinator.storage.copies import read_manifest, require_no_run, restore
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.follower import Follower
from farloop.coordinator.storage.mapped_buffers import MappedBuffers
from farloop.coordinator.storage.mirror import Mirror, MirroredFiles
from farloop.coordinator.storage.objects import Sign, note_objects, signer, try_store
from farloop.coordinator.storage.recovery import Place, as_they_are
from farloop.coordinator.storage.store import Store, read_when_possible
from farloop.monitoring import descriptors
from farloop.monitoring.addresses import parse_host_port
from farloop.monitoring.endpoint import check_listen
from farloop.monitoring.status import saved_status
from farloop.monitoring.status_summary import idle_steps
from farloop.node.library import Node
from farloop.node.trainer import train
from farloop.pipeline.trainer import train_stage
from farloop.quant.registry import warm_for
from farloop.runtime.log_queue import say
from farloop.runtime.system import keep_freed_blocks, trim_heap

_log = logging.getLogger(__name__)

_DIFFERS = {
    "name": "the name differs",
    "model": "the model differs",
    "layout": "the division of the model into fragments differs",
    "anchor_digests": "the first weights differ",
    "data": "the data differ",
    "evaluation_set": "the evaluation set differs",
}


def run_coordinator(
    file: RunFile,
    *,
    rewind: bool = False,
    adopt_patience_s: float | None = None,
    adopt_newest: bool = False,
    restore_from: str = "",
    force_lead: bool = False,
) -> ExitCode:
    """Start the run, or continue that of the state directory, until its end or the first signal. One of several
    coordinators stands by until it leads.

    Args:
        rewind: continue even if nodes have seen newer versions.
        adopt_patience_s: adopt versions from nodes, and wait this long for absent ones.
        adopt_newest: also adopt a version that only one node knows.
        restore_from: object store whose newest copy becomes the state directory first.
        force_lead: lead, whatever the record of the leader says.

    Raises:
        ConfigError: the run is invalid.
        CommandError: the directory holds another run.
        BindError, CopyFailed, StorageError, KeyFileError, EndpointError: one line each.
    """
    on_signals(end_at_once)  # until it serves: nothing is held that a crash would lose
    descriptors.raise_limit(spare=descriptors.SPARE)
    plan = planned(file)
    trim_heap()
    keep_freed_blocks()
    if file.coordinator.copy_to:
        Bucket(file.coordinator.copy_to)  # where it cannot be opened the state folder is not touched
    config = file.coordinator
    check_bind(config.bind)  # before the record and the state folder are touched
    if config.mirror:
        check_bind(config.mirror, "mirror")
    if config.http:
        http = parse_host_port(config.http, listens=True)
        check_listen(http.host, http.port)
    with ExitStack() as ending:
        mirror = follower = None
        place: Place = MappedBuffers(config.state_dir) if config.map_buffers else as_they_are
        if restore_from:
            require_no_run(config.state_dir)  # before the record says that this one leads
        if config.leads_by:
            flags = {"--rewind": rewind, "--adopt-from-nodes": adopt_patience_s is not None, "--restore": restore_from}
            once = [flag for flag, given in flags.items() if given]
            copies = restore_from or (config.copy_to if config.recover == "auto" else "")
            found = _led(config, plan, place, force=force_lead, once=once, copies=copies)
            if found is None:
                say("stopped while it stood by; the same command stands by again")
                return ExitCode.DONE
            leadership, follower = found
            if config.recover == "auto" and not has_run(config.state_dir) and not restore_from:
                restore_from = _to_recover(config, leadership)
                if restore_from and adopt_patience_s is None:
                    adopt_patience_s = PATIENCE_S
            mirror = Mirror(config.state_dir, leadership)
        else:
            _without_record(config.state_dir, force=force_lead)
        bulk = _noted_objects(file, plan, DISK if mirror is None else MirroredFiles(mirror))
        if restore_from:
            restored(config.state_dir, plan, restore_from)
        if mirror is not None:
            ending.callback(MirrorServer(config.mirror, config.key, mirror).close)
        store = open_run(
            config.state_dir,
            plan,
            rewind=rewind,
            adopt=adopt_patience_s is not None,
            place=place,
            files=DISK if mirror is None else MirroredFiles(mirror),
            follower=None if rewind else follower,
        )
        ending.callback(store.close)
        if mirror is not None:
            leadership.begun()
            mirror.lets_in = True
        elif force_lead:
            unmark(config.state_dir)
        adopt = None
        if adopt_patience_s is not None:
            adopt = AdoptionSettings(
                untrue=untrue, patience_s=adopt_patience_s, fetched=store.fetched, newest=adopt_newest
            )
        tell_of_stores(config, bulk)
        gc.collect()
        gc.freeze()  # modules stay: a collection that goes through all of them stops the loop for 0.2 s
        uvloop.run(_serve(config, store, adopt, mirror, bulk))
    name, folder = plan.spec.identity.name, file.coordinator.state_dir
    stopped = "stopped before the run's end; the same command continues it"
    say(_last_line(name, folder) if store.ledger.finished else stopped)
    return ExitCode.DONE


def _noted_objects(file: RunFile, plan: Plan, files: Files) -> Sign | None:
    """Remember in the state folder where the run's objects are. What signs their URLs, where new blobs go there.
    Raises CopyFailed, StorageError."""
    if not file.coordinator.bulk_url:
        return None
    url = f"{file.coordinator.bulk_url.rstrip('/')}/{plan.spec.identity.fingerprint()}"
    sign = signer(url)
    note_objects(file.coordinator.state_dir, url, files)
    return sign if file.run.bulk == "store" else None


def tell_of_stores(config: CoordinatorConfig, bulk: Sign | None) -> threading.Thread:
    """Try the object stores of a run beside its start, and say in one line what is wrong with one: the run goes on
    without it, so nobody would notice before the first delta or copy."""

    def look(setting: str, attempt: Callable[[], object]) -> None:
        try:
            attempt()
        except CopyFailed as error:
            fix = "farloop doctor RUN.toml tries each step"
            _log.warning("object store fails setting=%s why=%r fix=%r", setting, str(error), fix)

    def look_at_all() -> None:
        if bulk is not None:
            look("bulk_url", lambda: try_store(bulk))
        if config.copy_to:
            look("copy_to", lambda: Bucket(config.copy_to).try_out())

    thread = threading.Thread(target=look_at_all, name="stores", daemon=True)
    thread.start()
    return thread


def _led(
    config: CoordinatorConfig, plan: Plan, place: Place, *, force: bool, once: Sequence[str], copies: str
) -> tuple[Leadership, Follower | None] | None:
    """Wait until this process leads; None once a signal has ended that. With the state in memory, if it has followed
    another's. `once`: flags for a start that leads: one that came true when the leader is lost, days later, would
    change another state than it was given for. `copies`: as `Contender.copies`. Raises CommandError, CopyFailed,
    StorageError, KeyFileError."""
    signals: list[int] = []
    contender = Contender(config, plan.spec.identity.fingerprint(), term_store(config.leads_by), place)
    contender.copies = copies
    with ExitStack() as standing_by:

        def stand_by() -> None:
            if once and contender.leader is not None:
                raise CommandError(
                    f"{once[0]} is for the coordinator that leads, and the record names {contender.leader.leader}: "
                    f"leave out {once[0]} to stand by; to lead instead, stop that one and add --force-lead"
                )
            warm_for(plan.spec.terms)
            url = standing_by.enter_context(standby_pages(config, contender))
            say(f"{contender.name} stands by for run {plan.spec.identity.name}" + (f", status {url}" if url else ""))
            on_signals(lambda number, _: signals.append(number))

        try:
            leadership = contender.lead(force=force, stand_by=stand_by, stopped=lambda: bool(signals))
        except Unusable as error:
            raise CommandError(f"[coordinator] leads_by: {error}") from error
        finally:
            on_signals(end_at_once)
    return None if leadership is None else (leadership, contender.follower)


def _without_record(folder: Path, *, force: bool) -> None:
    """A start without [coordinator] leads_by. Raises CommandError: a record says who leads the folder's run."""
    is_marked = marked(folder) is not None
    if is_marked and not force:
        raise CommandError(
            f"{folder}: a record says who leads its run, and another coordinator may; give [coordinator] leads_by, or, "
            "if this is to be the only one from now on and has led last, start it once with --force-lead"
        )
    if force and not is_marked:
        raise CommandError("--force-lead needs [coordinator] leads_by, the record of who leads")


def _to_recover(config: CoordinatorConfig, leadership: Leadership) -> str:
    """Where the copy is that an empty folder is restored from; empty for a run that has not begun.
    Raises CopyFailed; CommandError: it has begun, and there is no copy."""
    if read_manifest(Bucket(config.copy_to)) is not None:
        return config.copy_to
    if leadership.term.mark:
        raise CommandError(
            f"{config.state_dir} holds no run, {config.copy_to} no copy of it, and the record says that it has begun; "
            "put the state folder back, or remove the record to begin a new run",
            ExitCode.REFUSED,
        )
    return ""


def _last_line(run: str, folder: Path) -> str:
    """Of a finished run, with what its saved status says against the result."""
    status = saved_status(folder)
    parts = (f"run {run} is finished", idle_steps(status) if status else "", f"model: {folder / 'model.safetensors'}")
    return "; ".join(filter(None, parts))


def restored(directory: Path, plan: Plan, url: str) -> None:
    """Restore the state directory from the newest copy. Raises CommandError, CopyFailed, StorageError."""
    bucket = Bucket(url)
    manifest, wanted = read_manifest(bucket), plan.spec.identity.fingerprint()
    if manifest is not None and manifest["fingerprint"] != wanted:
        held = f"run {manifest['name']} (fingerprint {manifest['fingerprint']}, the file's is {wanted})"
        raise CommandError(
            f"{url} holds copies of another run, {held}; give that run's file, or its own URL", ExitCode.REFUSED
        )
    ledger = restore(bucket, directory)
    say(f"restored {directory} from {url}: versions {', '.join(map(str, ledger.versions))}")


def open_run(
    directory: Path,
    plan: Plan,
    *,
    rewind: bool = False,
    adopt: bool = False,
    place: Place = as_they_are,
    files: Files = DISK,
    follower: Follower | None = None,
) -> Store:
    """The planned run from the directory, or a new one if the directory has none and none is required.

    Raises:
        CommandError: it is another run, and the line says what differs; or there is nothing to rewind or adopt.
        StorageError
    """

    store = read_when_possible(
        lambda: Store.recover(
            directory,
            accept=lambda kept: refuse_another(directory, kept, plan.spec),
            rewind=rewind,
            place=place,
            files=files,
            follower=follower,
            adopt=adopt,
            first=lambda: plan.anchors,
        )
    )
    if store is None and rewind:
        raise CommandError(f"{directory} holds no run to rewind; leave out --rewind, or give its folder: --state DIR")
    if store is None and adopt:
        raise CommandError(
            f"{directory} holds no run, not even an old copy of one; leave out --adopt-from-nodes, or give its folder: "
            "--state DIR"
        )
    if store is not None and rewind:
        versions = ",".join(str(version) for version in store.ledger.versions)
        _log.warning("rewound history=%d versions=%s note='nodes resync from here'", store.ledger.history, versions)
    if store is None:
        for note in plan.notes:
            _log.info("plan note=%r", note)
        return Store.create(directory, plan.spec, plan.anchors, place=place, files=files)
    kept, wanted = (spec.terms.schedule.steps for spec in (store.ledger.spec, plan.spec))
    if store.ledger.finished and wanted > kept:
        store.close()
        raise CommandError(
            f"the file asks for {wanted} steps: {over(plan.spec.identity.name, kept, directory)}. A run that has not "
            f"ended takes more steps by farloop run set steps={wanted}",
            ExitCode.REFUSED,
        )
    for term in different_terms(store.ledger.spec.terms, plan.spec.terms):
        _log.warning("kept %s cause='the run keeps its terms; farloop run set changes them'", term)
    return store


def refuse_another(directory: Path, kept: RunSpec, wanted: RunSpec) -> None:
    """Raises CommandError: the folder's run is not the wanted one, and the line says what differs."""
    if kept.identity != wanted.identity:
        raise CommandError(
            f"{directory} holds another run (fingerprint {kept.identity.fingerprint()}, the file's is "
            f"{wanted.identity.fingerprint()}): {different_run(kept, wanted)}; "
            "give the new run a folder of its own with --state DIR, or undo the change",
            ExitCode.REFUSED,
        )


def different_run(kept: RunSpec, wanted: RunSpec) -> str:
    """The differences between the identities of two runs, and the method where it divides the model otherwise."""
    cuts = kept.identity.layout != wanted.identity.layout
    methods = kept.terms.method, wanted.terms.method
    told = [f"method was {methods[0]}, is {methods[1]}"] if cuts and methods[0] != methods[1] else []
    for field in dataclasses.fields(kept.identity):
        if cuts and field.name == "anchor_digests":  # of other fragments, so they differ whatever the weights are
            continue
        old, new = getattr(kept.identity, field.name), getattr(wanted.identity, field.name)
        if old != new:
            short = isinstance(old, str | int) and len(f"{old}{new}") < 60
            told.append(f"{field.name} was {old}, is {new}" if short else _DIFFERS[field.name])
    return ", ".join(told)


def different_terms(kept: Terms, wanted: Terms) -> list[str]:
    """`h=30 file=20`, for each term of the file that differs from those of the run."""
    old, new = _flat(kept), _flat(wanted)
    return [f"{name}={old[name]} file={new[name]}" for name in old if old[name] != new[name]]


def _flat(terms: Terms) -> dict[str, object]:
    values = terms.flat()
    rate = values.pop("lr")
    return values | {"lr": rate.peak, "min_lr": rate.minimum, "warmup_steps": rate.warmup_steps}


async def _serve(
    config: CoordinatorConfig,
    store: Store,
    adopt: AdoptionSettings | None,
    mirror: Mirror | None,
    bulk: Sign | None,
) -> None:
    ledger, identity = store.ledger, store.ledger.spec.identity
    warm_for(ledger.spec.terms)
    coordinator = Coordinator(config, store, adopt, mirror, bulk)
    coordinator.observer.node_disk_bytes = sum(memory_of(ledger.spec).node_disk.values())
    viewers = Viewers()
    with LoopWatch() as watch, pages(config, coordinator, watch, viewers) as url:
        again = f", start {ledger.epoch}" if ledger.epoch > 1 else ""
        status = f", status {url}" if url else ""
        where = f"run {identity.name} at {coordinator.link.endpoint}"
        say(f"{where}, fingerprint {identity.fingerprint()}{again}{status}")
        _log.info("serving encrypted=%s", str(config.key is not None).lower())
        await coordinator.run(watch.stop)
        if ledger.finished:
            await viewers.see_the_end()


def run_node(file: NodeFile) -> ExitCode:
    """Train in this process until the run ends or a signal comes. Raises NodeError, CorpusError, KeyFileError,
    EndpointError: one line each."""
    descriptors.raise_limit()
    keep_freed_blocks()
    config, pipeline = file.node, file.pipeline
    on_signals(end_at_once)
    encrypted = str(config.key is not None).lower()
    where = config.coordinator.replace(" ", "")
    _log.info("joining coordinator=%s name=%s encrypted=%s", where, config.name, encrypted)
    joined = list[Node]()
    if pipeline.layout is None:
        train(config, on_join=joined.append, environ=os.environ)
    else:
        train_stage(config, pipeline, on_join=joined.append, environ=os.environ)
    if any(node.asked_to_leave for node in joined):
        _log.info("left note='the same command rejoins the run'")
        return ExitCode(config.leave_code)
    _log.info("finished note='the run is over; its model is in the state folder of the coordinator'")
    return ExitCode.DONE
