"""Semantic mutations of the product: each is a plausible mistake, and each must make at least one test fail.

`make mutants` applies one at a time to a copy of the tree. `before` occurs exactly once in its file, which
`test_mutations.py` checks with every run of the tests. Where a line of the product changes, change it here too.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One mistake, and the test files of which at least one test must notice it."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def _of(name: str, file: str, before: str, after: str, *tests: str) -> Mutation:
    return Mutation(name=name, file=file, before=before, after=after, tests=tuple(f"tests/{test}" for test in tests))


MUTATIONS: tuple[Mutation, ...] = (
    # --- algo
    _of(
        "every node weighs the same",
        "algo/weights.py",
        "    return [count / total for count in tokens]",
        "    return [1 / len(tokens) for count in tokens]",
        "unit/algo/test_merge.py",
    ),
    _of(
        "tokens without a step weigh too",
        "algo/weights.py",
        "for c in cs if c.steps > 0 and c.tokens > 0]",
        "for c in cs if c.tokens > 0]",
        "unit/algo/test_merge.py",
    ),
    _of(
        "quality counts steps the wrong way",
        "algo/weights.py",
        "Fraction(tokens**2, steps)",
        "Fraction(tokens * steps)",
        "unit/algo/test_merge.py",
    ),
    _of(
        "the delta has the wrong sign",
        "algo/local_update.py",
        "torch.sub(anchor_part, local_part, out=out_part)",
        "torch.sub(local_part, anchor_part, out=out_part)",
        "unit/algo/test_local_update.py",
    ),
    _of(
        "a bf16 node measures against the anchor as it is",
        "algo/local_update.py",
        "out_part.copy_(anchor_part.to(local_part.dtype))",
        "out_part.copy_(anchor_part)",
        "unit/algo/test_local_update.py",
    ),
    _of(
        "a merge swaps its shares",
        "algo/local_update.py",
        "mixed = local_part.to(torch.float32) * a",
        "mixed = local_part.to(torch.float32) * (1.0 - a)",
        "unit/algo/test_local_update.py",
    ),
    _of(
        "the outer step walks uphill",
        "algo/outer_optimizers.py",
        "target.sub_(delta * settings.lr)\n",
        "target.add_(delta * settings.lr)\n",
        "unit/algo/test_outer.py",
    ),
    _of(
        "heavy-ball forgets its momentum",
        "algo/outer_optimizers.py",
        """    momentum.mul_(settings.momentum)
    momentum.add_(delta)
    target.sub_(momentum * settings.lr)""",
        """    momentum.zero_()
    momentum.add_(delta)
    target.sub_(momentum * settings.lr)""",
        "unit/algo/test_outer.py",
    ),
    _of(
        "delayed Nesterov keeps what it has used",
        "algo/outer_optimizers.py",
        "        accumulated.zero_()\n",
        "",
        "unit/algo/test_outer.py",
    ),
    _of(
        "AdamW never clips",
        "algo/adamw.py",
        "clip = min(1.0, settings.clip / (grad_norm + 1e-6))",
        "clip = 1.0",
        "unit/algo/test_outer.py",
        "unit/algo/test_validation.py",
    ),
    _of(
        "AdamW corrects for one step too few",
        "algo/adamw.py",
        "step_size = lr / (1.0 - settings.beta1**step)",
        "step_size = lr / (1.0 - settings.beta1 ** (step + 1))",
        "unit/algo/test_outer.py",
    ),
    _of(
        "warm-up ends a step late",
        "algo/schedule.py",
        "min(1.0, (passed + 1) / warmup)",
        "min(1.0, passed / warmup)",
        "unit/algo/test_schedule.py",
    ),
    _of(
        "the digest does not see where a number stands",
        "quant/kernels/cpu/kernels.py",
        "digest_of(part, _TILE, first_index + first)",
        "digest_of(part, _TILE, first_index)",
        "unit/quant/test_digest.py",
    ),
    _of(
        "subnormals stay",
        "quant/digest.py",
        ".bitwise_and(0x7FFFFFFF) < 0x00800000, 0.0)",
        ".bitwise_and(0x7FFFFFFF) < 0x00000001, 0.0)",
        "unit/quant/test_digest.py",
    ),
    _of(
        "a residual outlives its dropped delta",
        "algo/error_feedback.py",
        """        self.state = Empty()
        return [Zero()]
""",
        """        self.state = Settled(version=blob.version)
        return []
""",
        "unit/algo/test_residual.py",
    ),
    _of(
        "a restart adds a residual that is part of a sent delta",
        "algo/error_feedback.py",
        "return [Forget()] if may_be_on_disk else []",
        "return []",
        "unit/algo/test_residual.py",
    ),
    _of(
        "a stale residual is taken up",
        "algo/error_feedback.py",
        "0 <= tag.version <= version <= tag.version + R_STALE",
        "0 <= tag.version <= version",
        "unit/algo/test_residual.py",
    ),
    # --- quant
    _of(
        "a blob's checksum is not looked at",
        "quant/blob.py",
        "if _CHECKSUM.unpack_from(view, _FIELDS.size)[0] != _checksum(view, digest):",
        "if not len(view):",
        "unit/quant/test_blob.py",
    ),
    _of(
        "a blob of another base is taken",
        "quant/blob.py",
        '    _require_equal("base", base, expect.base)\n',
        "",
        "unit/quant/test_blob.py",
    ),
    _of(
        "a blob of a later epoch is taken",
        "quant/blob.py",
        "if epoch > expect.newest_epoch:",
        "if epoch > expect.newest_epoch + 1:",
        "unit/quant/test_blob.py",
    ),
    _of(
        "all deltas draw the same noise",
        "quant/blob.py",
        "_SEEDED_BY.pack(self.fragment.index, self.version, self.base, self.salt)",
        "_SEEDED_BY.pack(self.fragment.index, self.version, self.base, 0)",
        "unit/quant/test_blob.py",
    ),
    _of(
        "the last block's tail is not checked",
        "quant/formats/blocks.py",
        'raise BadPayload("the tail of the last block is not zero")',
        "pass",
        "unit/quant/test_blocks.py",
        "unit/quant/test_formats.py",
        "unit/quant/test_codec.py",
    ),
    _of(
        "weights are ignored where one delta is added",
        "quant/formats/blocks.py",
        "fast.add([payload], [finite_weight(weight)], acc, overwrite=False)",
        "fast.add([payload], [1.0], acc, overwrite=False)",
        "unit/quant/test_blocks.py",
        "unit/quant/test_codec.py",
        "unit/quant/test_formats.py",
    ),
    # --- coordinator
    _of(
        "the sum of deltas ignores their weights",
        "coordinator/aggregator.py",
        "        weights=[weight for _, weight in inputs],\n        seeds=",
        "        weights=[1.0 for _, weight in inputs],\n        seeds=",
        "unit/coordinator/test_aggregator.py",
    ),
    _of(
        "an update is encoded the wrong way round",
        "coordinator/aggregator.py",
        "difference = stepped.target - stepped.anchor",
        "difference = stepped.anchor - stepped.target",
        "unit/coordinator/test_aggregator.py",
    ),
    _of(
        "the delta's scale is lost",
        "coordinator/aggregator.py",
        "delta = delta * step.outer.delta_scale",
        "pass",
        "unit/coordinator/test_aggregator.py",
    ),
    _of(
        "deltas are summed in the order they came",
        "coordinator/decide/windows.py",
        "return sorted(self.inputs.values(), key=lambda offer: sum_key(offer.contributors))",
        "return list(self.inputs.values())",
        "unit/coordinator/test_windows.py",
    ),
    _of(
        "a window takes deltas of the window after it",
        "coordinator/decide/windows.py",
        "return self.terms.window - self.max_staleness <= offer.window <= self.terms.window",
        "return self.terms.window - self.max_staleness <= offer.window <= self.terms.window + 1",
        "unit/coordinator/test_windows.py",
    ),
    _of(
        "a refused delta is merged",
        "coordinator/decide/windows.py",
        "        offer = self.inputs.pop(refusal.blob)\n",
        "        offer = self.inputs[refusal.blob]\n",
        "unit/coordinator/test_windows.py",
    ),
    _of(
        "a quorum is one short",
        "coordinator/decide/windows.py",
        "len(self.contributors) >= quorum and self.toward_quorum >= quorum",
        "len(self.contributors) + 1 >= quorum and self.toward_quorum + 1 >= quorum",
        "unit/coordinator/test_windows.py",
    ),
    _of(
        "more samples are believed used than were granted",
        "coordinator/decide/leases.py",
        "max(account.consumed, min(consumed, account.granted))\n\n    def stores",
        "max(account.consumed, consumed)\n\n    def stores",
        "unit/coordinator/test_leases.py",
    ),
    _of(
        "what came back is never granted again",
        "coordinator/decide/leases.py",
        "        for lease in self.returned:\n            if count > 0:",
        "        for lease in ():\n            if count > 0:",
        "unit/coordinator/test_leases.py",
    ),
    _of(
        "a delta that is being kept is asked for again",
        "coordinator/uploads.py",
        " or offer.blob in self._keeping:",
        ":",
        "unit/coordinator/test_uploads.py",
    ),
    _of(
        "a node's deltas have no bound",
        "coordinator/uploads.py",
        "fits = not own or sum(own.values()) + offer.size <= self.most_bytes_of_a_node",
        "fits = True",
        "unit/coordinator/test_uploads.py",
    ),
    _of(
        "a replayed delta is merged",
        "coordinator/decide/screening.py",
        "        if (node, payload) in merged:\n            return _refusal(offer, Reason.REPLAYED)\n",
        "",
        "unit/coordinator/test_screening.py",
    ),
    _of(
        "no node is in quarantine",
        "coordinator/decide/screening.py",
        "return found if 2 * len(found) < len(nodes) else {}",
        "return {}",
        "unit/coordinator/test_screening.py",
    ),
    _of(
        "a sync does not reach the disk",
        "coordinator/storage/journal.py",
        "                self._tail.sync()\n                if self._claim",
        "                if self._claim",
        "unit/coordinator/test_journal.py",
        "unit/coordinator/test_store.py",
    ),
    _of(
        "a torn record counts as the tail though it was durable",
        "coordinator/storage/segment.py",
        "            if until is None and header.durable > sequence:\n",
        "            if until is None and header.durable > sequence + 1:\n",
        "unit/coordinator/test_segment.py",
        "unit/coordinator/test_journal.py",
    ),
    # --- wire
    _of(
        "control messages are delivered twice",
        "wire/session.py",
        "if seq < self.received or seq in self._ahead:",
        "if seq < self.received - 1 or seq in self._ahead:",
        "unit/wire/test_session.py",
    ),
    _of(
        "frames that were never sent can be acknowledged",
        "wire/session.py",
        "if ack > self._highest:",
        "if ack > self._highest + 1:",
        "unit/wire/test_session.py",
    ),
    _of(
        "a chunk may go beyond its credit",
        "wire/transfer.py",
        "if incoming is not None and frame.end > (size := incoming.reassembly.size):",
        "if incoming is not None and frame.end > (size := 2 * incoming.reassembly.size):",
        "unit/wire/test_transfer.py",
        "unit/wire/test_session_hostile.py",
    ),
    _of(
        "a blob's digest is not looked at",
        "wire/transfer.py",
        "        if reassembly.verify():\n",
        "        if reassembly.complete:\n",
        "unit/wire/test_transfer.py",
        "unit/wire/test_session.py",
    ),
    _of(
        "lost chunks are not sent again",
        "wire/outgoing.py",
        "                self._to_send.add(max(chunk.start, self.acked), chunk.end)\n",
        "                pass\n",
        "unit/wire/test_transfer.py",
    ),
    _of(
        "frames of another run or epoch are taken",
        "wire/session.py",
        "if (run, epoch) != (self.run, self.epoch) or epoch == 0:",
        "if epoch == 0:",
        "unit/wire/test_session.py",
        "unit/wire/test_session_hostile.py",
    ),
    # --- node
    _of(
        "an anchor's digest is not compared",
        "node/model/replica.py",
        "        if self.digests[index] != anchor_digest:\n            return False\n",
        "",
        "unit/node/test_replica.py",
    ),
    _of(
        "an update of another base is applied",
        "node/model/replica.py",
        "                sent = self.parsed(index, version, version - 1, codec, epoch, blob)",
        "                sent = self.parsed(index, version, self.versions[index], codec, epoch, blob)",
        "unit/node/test_replica.py",
    ),
    _of(
        "the residual is left out",
        "node/model/encoder.py",
        "        if residual is None:\n            codec.encode_into(",
        "        if True:\n            codec.encode_into(",
        "unit/node/test_encoder.py",
    ),
    _of(
        "nodes draw the same noise",
        "node/model/encoder.py",
        'zlib.crc32(f"{blob.node}/{blob.incarnation}/{blob.seq}".encode())',
        'zlib.crc32(f"{blob.incarnation}/{blob.seq}".encode())',
        "unit/node/test_encoder.py",
    ),
    _of(
        "a delta is taken before a node has held its fragment for a period",
        "node/send_schedule.py",
        "return window.final or first <= self.round",
        "return True",
        "unit/node/test_send_schedule.py",
        "unit/node/test_machine.py",
    ),
    _of(
        "a merge comes a version early",
        "node/fragment_set.py",
        "wanted = last.terms.window - terms.schedule.lag",
        "wanted = last.terms.window - terms.schedule.lag - 1",
        "unit/node/test_fragment_set.py",
        "unit/node/test_machine.py",
    ),
    _of(
        "the learning rate is never set",
        "node/model/inner_optimizer.py",
        '                group["lr"] = rate * ratio\n',
        '                group["lr"] = group["lr"]\n',
        "unit/node/test_step.py",
    ),
    _of(
        "parameter groups lose their ratios",
        "node/model/inner_optimizer.py",
        '                group["lr"] = rate * ratio\n',
        '                group["lr"] = rate\n',
        "unit/node/test_step.py",
    ),
    _of(
        "a step never clips",
        "node/model/inner_optimizer.py",
        "                self._clip_gradients(norm)\n",
        "                pass\n",
        "unit/node/test_step.py",
    ),
    _of(
        "a step that is not finite is taken",
        "node/model/inner_optimizer.py",
        "finite = self._all_agree(bool(torch.isfinite(norm)))",
        "finite = True",
        "unit/node/test_step.py",
    ),
    _of(
        "a number of any size is believed",
        "wire/bounds.py",
        "            if not LEAST_NUMBER <= value <= most:\n",
        "            if not LEAST_NUMBER <= value:\n",
        "unit/wire/test_messages.py",
    ),
    _of(
        "a number that is not finite is believed",
        "wire/bounds.py",
        "if not math.isfinite(value) and name not in _MAY_BE_NAN:",
        "if math.isnan(value) and name not in _MAY_BE_NAN:",
        "unit/wire/test_messages.py",
    ),
    _of(
        "a commit is told before it is durable",
        "coordinator/storage/store.py",
        "result.update, reserved=reserved))\n        self.sync()\n",
        "result.update, reserved=reserved))\n",
        "unit/coordinator/test_power_loss.py",
    ),
    _of(
        "a rename is not made durable",
        "coordinator/storage/files.py",
        'raise _failed(path, "rename", error) from error\n            directory.sync()\n',
        'raise _failed(path, "rename", error) from error\n',
        "unit/coordinator/test_power_loss.py",
    ),
    _of(
        "a file takes another's place before it is durable",
        "coordinator/storage/files.py",
        "                file.sync()\n            try:\n                self.rename",
        "                pass\n            try:\n                self.rename",
        "unit/coordinator/test_power_loss.py",
    ),
    _of(
        "two deltas of one node count in one window",
        "coordinator/decide/ledger.py",
        " and self._spooled.isdisjoint(_spools(offer)):",
        ":",
        "unit/coordinator/test_ledger.py",
        "unit/coordinator/test_machine_laws.py",
    ),
    _of(
        "a lower epoch takes the place of the highest that was seen",
        "coordinator/decide/ledger.py",
        "self.epoch_seen = max(self.epoch_seen, epoch)",
        "self.epoch_seen = epoch",
        "unit/coordinator/test_ledger.py",
        "unit/coordinator/test_rollback.py",
    ),
    _of(
        "a fragment is due a step early",
        "algo/schedule.py",
        "return -(-(slot + 1) * node_steps // slots)",
        "return (slot + 1) * node_steps // slots",
        "unit/algo/test_schedule.py",
    ),
    _of(
        "the last round is as long as the others",
        "algo/schedule.py",
        "    length = min(length, terms.schedule.steps - start)\n",
        "    length = length if start < terms.schedule.steps else 0\n",
        "unit/algo/test_schedule.py",
    ),
    _of(
        "a dropped delta is told as merged",
        "node/state_dir.py",
        "machine.dropped(blob) if merged_in is None else machine.merged(blob, version=merged_in)",
        "machine.merged(blob, version=blob.version + 1)",
        "unit/node/test_state_dir.py",
    ),
    _of(
        "an anchor that changed while it was written counts",
        "node/model/anchor_files.py",
        "                if changes() == before:\n",
        "                if True:\n",
        "unit/node/test_anchor_files.py",
    ),
    _of(
        "anchors on disk of another history are gone on from",
        "coordinator/decide/membership.py",
        "(saved.run, saved.history) != (ledger.spec.identity.fingerprint(), ledger.history)",
        "saved.run != ledger.spec.identity.fingerprint()",
        "unit/coordinator/test_machine.py",
    ),
    # --- coordinators that stand by
    _of(
        "a sync does not wait for the standby",
        "coordinator/storage/mirror.py",
        "        local()\n        self.wait(number)\n",
        "        local()\n",
        "unit/coordinator/test_mirror.py",
        "unit/coordinator/test_pair_simulated.py",
    ),
    _of(
        "a standby acknowledges what is not on its disk",
        "coordinator/storage/mirror.py",
        "                if name:\n                    self._sync(name)\n",
        "",
        "unit/coordinator/test_mirror.py",
        "unit/coordinator/test_pair_simulated.py",
    ),
    _of(
        "the leader goes on alone and does not say so",
        "coordinator/storage/mirror.py",
        "others = tuple(name for name in self.leadership.term.in_sync if name != standby.name)",
        "others = self.leadership.term.in_sync",
        "unit/coordinator/test_pair_simulated.py",
    ),
    _of(
        "a deleted file stays with the standby",
        "coordinator/storage/mirror.py",
        '                self.mirror.tell("unlink", name)\n                self.mirror.unlinked(name)\n',
        "                self.mirror.unlinked(name)\n",
        "unit/coordinator/test_mirror.py",
    ),
    _of(
        "a standby is in sync while it does not have all",
        "coordinator/storage/mirror.py",
        "            standby.waits = True\n",
        "            standby.waits = False\n",
        "unit/coordinator/test_pair_simulated.py",
    ),
    _of(
        "a standby leads that is not in sync",
        "coordinator/standby.py",
        "self.leader is None or self.name not in self.leader.in_sync",
        "self.leader is None",
        "unit/coordinator/test_pair_simulated.py",
    ),
)
