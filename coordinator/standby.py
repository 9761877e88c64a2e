"""The start of one of several coordinators of a run: it leads, or stands by until it does."""

import logging
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from farloop.coordinator.errors import StartRefused
from farloop.coordinator.leadership import (
    TIMEOUT_S,
    Leadership,
    Term,
    TermStore,
    Unreachable,
    Version,
    mark,
    marked,
    patiently,
)
from farloop.coordinator.net.zmq_mirror import SILENCE_S, MirrorClient, leading_peer
from farloop.coordinator.settings import CoordinatorConfig
from farloop.coordinator.storage.bucket import Bucket, CopyFailed
from farloop.coordinator.storage.copies import read_manifest
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.follower import Follower, Following
from farloop.coordinator.storage.mirror import finish_incoming
from farloop.coordinator.storage.recovery import Place, as_they_are
from farloop.coordinator.storage.segment import segment_numbers
from farloop.monitoring.addresses import Address, parse_each_tcp

_log = logging.getLogger(__name__)

ASK_S: Final = 0.5  # between two tries to take over
AWAIT_S: Final = 60.0  # for a leader that is silent, before an empty folder goes on from a copy in its place


class Contender:
    """One process that may lead a run."""

    def __init__(self, config: CoordinatorConfig, run: str, store: TermStore, place: Place = as_they_are) -> None:
        """`run`: fingerprint of the run. `place`: where the buffers of its fragments are kept."""
        self._config, self._store, self._place = config, store, place
        self._root = config.state_dir
        self.files: Files = DISK
        self.copies = config.copy_to
        """Whose newest copy an empty folder is restored from."""
        self.name = config.name or socket.gethostname()
        self._own = Term(run=run, leader=self.name, process=secrets.token_hex(8), term=0, address=config.bind)
        self.leader: Term | None = None
        """The record, as last read."""
        self.client: MirrorClient | None = None
        """While this process stands by."""
        self.following: Following | None = None
        """Likewise, where it keeps the state in memory."""
        self.follower: Follower | None = None
        """The state in memory, once it leads and could follow."""
        self._asked_at = float("-inf")
        self._awaited = ("", "", 0.0)  # leader and mark of the last record of one that is recovering, and since when
        self.told = ""
        """Why it did not take over the last time."""

    def lead(self, *, force: bool, stand_by: Callable[[], None], stopped: Callable[[], bool]) -> Leadership | None:
        """Return once this process leads; None once `stopped`.

        Args:
            force: lead whatever the record says: what others have beyond this folder is replaced once they stand by.
            stand_by: called when this process begins to stand by.

        Raises:
            Unusable: the store holds something else.
            StartRefused: the record is another run's; there is none, and a leader at `peers`; or this folder is not
                the one that led, and nothing can bring it here.
            KeyFileError, StorageError
        """
        self.files.make_directory(self._root)
        with closing(self.files.lock(self._root / "lock")):  # another process may lead with it, or be given the state
            finish_incoming(self._root, self.files)
            return self._lead(stand_by, stopped, force=force)

    def _lead(self, stand_by: Callable[[], None], stopped: Callable[[], bool], *, force: bool) -> Leadership | None:
        leads_at = None
        while (found := patiently(self._store.read, stopped)) is not None:
            self.leader, version = found
            if self.leader is None and not force:
                if leads_at is not None:
                    raise StartRefused(
                        self._root,
                        f"a coordinator leads at {leads_at}, and {self._config.leads_by} has no record of it: give "
                        "both one [coordinator] leads_by",
                    )
                if leads_at := self._leading_peer():
                    continue  # it may have made its record meanwhile
            if self.leader is not None and self.leader.run != self._own.run:
                raise StartRefused(
                    self._root,
                    f"the record holds the leader of another run (fingerprint {self.leader.run}, the file's is "
                    f"{self._own.run}); give both one RUN.toml, or this run a [coordinator] leads_by of its own",
                )
            if self.leader is None and not force and self._has_run() and marked(self._root) is not None:
                raise StartRefused(
                    self._root,
                    f"a record said who leads its run, and {self._config.leads_by} has none: put it back, or start the "
                    "coordinator that led last with --force-lead",
                )
            if force and self.leader is not None and not self._has_run() and (why := self._no_copy(self.leader)):
                raise StartRefused(self._root, why)
            if force or self._may_begin(self.leader, stopped):
                claim = partial(self._claim, version, force=force)
                leadership = patiently(claim, stopped, "changed")
                if leadership is not None:
                    _log.info("leads name=%s term=%d", self.name, leadership.term.term)
                    if force:
                        note = "what others have beyond this folder is replaced once they stand by: keep it before"
                        _log.warning("leads by force folder=%s note=%r", self._root, note)
                    return leadership
            elif self._config.peers and self._has_run() and marked(self._root) is None:
                assert self.leader is not None
                raise StartRefused(
                    self._root,
                    f"holds a run, and {self.leader.leader}, which leads by {self._config.leads_by} since term "
                    f"{self.leader.term}, did not have it from here: standing by would replace it. To go on with this "
                    "run, stop the other, delete the record and start this one first; else give an empty --state DIR",
                )
            elif self._config.peers:
                return self._stand_by(stand_by, stopped)
            else:
                assert self.leader is not None
                raise StartRefused(
                    self._root,
                    f"{self.leader.leader} leads this run since term {self.leader.term}; to stand by for it give "
                    "[coordinator] peers and mirror. If it is gone for good: --force-lead leads with what this folder "
                    'holds; recover = "auto" with an empty folder restores the newest copy',
                )
        return None

    def _may_begin(self, found: Term | None, stopped: Callable[[], bool]) -> bool:
        """Whether this process may lead without having stood by: there was no leader, it is the last one and has its
        folder, or the last one's state is to be recovered from copies. Raises StartRefused: there is no copy."""
        if found is None:
            return True
        if self._has_run():
            return found.leader == self.name and self._has_all_of(found)
        if found.in_sync:
            return False  # one of those has all
        if self._config.recover == "auto" and self._is_silent(found, stopped):
            if why := self._no_copy(found):
                raise StartRefused(self._root, why)
            return True
        return found.leader == self.name and not found.mark

    def _is_silent(self, found: Term, stopped: Callable[[], bool]) -> bool:
        """Whether no leader answers at `peers`, for `AWAIT_S` if another has led: its host may be starting."""
        until = time.monotonic()
        if self._config.peers and found.mark and found.leader != self.name:
            until += AWAIT_S
            _log.info("waits for the leader name=%s at_most_s=%d", found.leader, AWAIT_S)
        while (peer := self._leading_peer()) is None and time.monotonic() < until and not stopped():
            time.sleep(ASK_S)
        return peer is None

    def _no_copy(self, found: Term) -> str:
        """Why no copy can take the place of what was told, and what to do; empty: one can, or the run has not begun."""
        if not found.mark:
            return ""
        why = f"{self.copies} holds no copy of this run" if self.copies else "--restore URL names one"
        try:
            patience_s = TIMEOUT_S if self.client else 0.0  # a standby has to hear the leader meanwhile
            manifest = read_manifest(Bucket(self.copies, patience_s=patience_s)) if self.copies else None
            if manifest is not None and manifest["fingerprint"] == self._own.run:
                return ""
        except CopyFailed as error:
            why = str(error)
        return (
            f"holds no run, and no copy can take the place of what {found.leader} told ({why}): start the coordinator "
            "that has its folder, with --force-lead if the record does not let it lead; if all are lost, remove the "
            "record to begin a new run"
        )

    def _leading_peer(self) -> Address | None:
        return leading_peer(parse_each_tcp(self._config.peers), self._config.key) if self._config.peers else None

    def _has_run(self) -> bool:
        return has_run(self._root, self.files)

    def _has_all_of(self, term: Term) -> bool:
        return self._has_run() and term.counts(marked(self._root, self.files))

    def _claim(self, version: Version, *, force: bool = False) -> Leadership | None:
        """As `Leadership.claim`. `force`: whatever the folder has, it alone counts from now on."""
        has_all, marks = self._has_run() and not force, marked(self._root, self.files)
        if not has_all and marks is not None:  # before the record, so that a crash in between leaves it this leader's
            mark(self._root, " ".join([*marks, self._own.process]), self.files)
        return Leadership.claim(self._store, self._root, self._own.claimed(self.leader, has_all=has_all), version)

    def _stand_by(self, begins: Callable[[], None], stopped: Callable[[], bool]) -> Leadership | None:
        assert self.leader is not None
        self._gives_time(self.leader)  # from now on, not from the first try
        taken: list[Leadership] = []

        def over() -> bool:
            if stopped():
                return True
            assert self.client is not None
            if self.client.is_without_leader and time.monotonic() - self._asked_at > ASK_S:
                if (leadership := self._take_over()) is not None:
                    taken.append(leadership)
                self._asked_at = time.monotonic()
            return bool(taken)

        try:
            begins()
            _log.info("standing by name=%s leader=%s term=%d", self.name, self.leader.leader, self.leader.term)
            client = MirrorClient(self._root, parse_each_tcp(self._config.peers), self._config.key, self._own)
            self.client = client
            if self._config.follow:
                self.following = Following(self._root, self._place, lambda: client.whole)
            try:
                client.run(over)
            finally:
                self.follower = self.following.stop() if self.following else None
        finally:
            self.client = None
        return taken[0] if taken else None

    def _take_over(self) -> Leadership | None:
        """Take the lead from a leader that is silent, if this folder has all that it told."""
        try:
            self.leader, version = self._store.read()
            if self.leader is not None and self.leader.process == self._own.process:  # an answer was lost
                if self.leader.mark in ("", self._own.process) or self._has_all_of(self.leader):
                    return Leadership(self._store, self._root, self.leader, version)
                self._say("its claim came late, and its folder was replaced meanwhile: another that has all goes on")
                return None
            if self.leader is None:
                self._say("the record is gone: put it back, or start the coordinator that led last with --force-lead")
                return None
            if self.name not in self.leader.in_sync:
                only = f"only {self.leader.leader} can go on"
                if self.leader.leader == self.name:
                    others = " or ".join(self.leader.in_sync) or "the coordinator that has the folder that led"
                    only = (
                        f"it led with another folder, or before this one was salvaged: start {others}, or --force-lead"
                    )
                self._say(f"the record does not have {self.name} in sync: {only}")
                return None
            if self._gives_time(self.leader):
                return None
            if self.following is not None and self.following.unreadable:  # as of a newer farloop
                self._say(f"this standby cannot read the state: {self.following.unreadable}")
                return None
            is_alone = not self.leader.recovering and self.leader.in_sync == (self.name,)  # else another may have all
            is_lost = self._config.recover == "auto" and is_alone and not self._has_run()
            if not is_lost and not self._has_all_of(self.leader):
                others = " or ".join([self.leader.leader, *(name for name in self.leader.in_sync if name != self.name)])
                last = "--force-lead here goes on with what this folder holds"
                if not self._has_run():
                    is_auto = self._config.recover == "auto"
                    last = f"--force-lead{'' if is_auto else ' --restore URL'} here goes on from the newest copy"
                self._say(
                    f"the record has {self.name} in sync, and this folder has not what it says: start {others}, or put "
                    f"back the folder that {self.name} had; if all are lost, {last}"
                )
                return None
            if is_lost and (why := self._no_copy(self.leader)):
                self._say(why)
                return None
            leadership = self._claim(version)
        except Unreachable as error:
            self._say(f"who leads is not known: {error}")
            return None
        if leadership is not None:
            _log.warning("takes over name=%s from=%s term=%d", self.name, self.leader.leader, leadership.term.term)
        return leadership

    def _gives_time(self, found: Term) -> bool:
        """Whether a leader that has just taken the lead, and is recovering the state, is to be heard first."""
        if not found.recovering:
            return False
        now = time.monotonic()
        if self._awaited[:2] != (found.leader, found.mark):
            self._awaited = found.leader, found.mark, now
        since = self._awaited[2]
        return now - since < SILENCE_S and (self.client is None or self.client.heard_at <= since)

    def _say(self, why: str) -> None:
        if why != self.told:
            self.told = why
            _log.warning("does not take over why=%r", why)


def has_run(root: Path, files: Files = DISK) -> bool:
    """Whether a state folder has a journal."""
    return files.is_directory(root) and bool(segment_numbers(root, files))
