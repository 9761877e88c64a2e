"""Error feedback on the uplink: what the codec lost of a node's deltas, and whether the next delta may add it.

A node that encodes a delta v keeps what the codec lost, e = v − decoded, and adds β·e to the fragment's next delta.

    empty ──encoded──▶ tentative(blob) ──merged──▶ settled(version) ──encoded──▶ tentative(blob) …
    tentative ──dropped──▶ empty      any ──reset──▶ empty      empty ──restore, at a start──▶ settled(version)

A dropped delta takes its residual along, and its payload is never added back: the node goes on from weights that hold
the others' progress, so the work would count twice. A residual is added to one blob only: the next residual holds what
that blob lost. So one buffer is enough, and the encoder overwrites the old residual with the new one.

The training thread decides, the worker writes into a buffer; a buffer is read again only once its encoding has been
reported.
"""

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from farloop.algo.spec import BlobId, BlobKind, RunSpec
from farloop.quant.registry import codec_named

_log = logging.getLogger(__name__)

R_STALE = 4  # versions after which a residual on disk is of no more use: the weights that it was about have moved on

Later = Callable[[Callable[[], None]], None]  # runs a job before the next encoding, in the encoder's thread


class Residual:
    """Of one fragment under one codec. For another codec or another run `reset` this one, and make a new one."""

    def __init__(
        self,
        run: str,
        fragment: int,
        codec: str,
        zeros: Callable[[int], Tensor],
        folder: Path | None,
        later: Later,
        *,
        durable: bool,
    ) -> None:
        """`durable`: it has a copy in `folder`. Worth its writes for sparse codecs alone, where |e| ≫ |delta|."""
        self.codec, self._fragment, self._zeros, self._later = codec, fragment, zeros, later
        self._tag = {"run": run, "fragment": str(fragment), "codec": codec}  # of the copy, with its version
        self._path = None if folder is None else folder / f"residual-{fragment}.safetensors"
        self._durable = durable and folder is not None
        self._buffer: Tensor | None = None
        self._tentative: BlobId | None = None  # the delta of which the buffer holds what was lost, without an outcome
        self._version: int | None = None  # ... or the version that this delta is part of

    def for_delta(self) -> Tensor:
        """What is to be added to the next delta, fp32 [numel], zeros unless a residual is settled."""
        if self._buffer is None or self._version is None:
            self._buffer = self._zeros(self._fragment)  # not zeroed: an encoding under way may still write into it
        return self._buffer

    def encoded(self, blob: BlobId) -> None:
        """The buffer holds what the codec lost of this delta. Call before the blob is sent; gives up an open delta."""
        assert blob.kind is BlobKind.DELTA and blob.fragment == self._fragment, blob
        self._tentative, self._version = blob, None
        if self._durable:
            self._forget_copy()  # it is part of this blob now: a restart must not send it again

    def merged(self, blob: BlobId, version: int) -> None:
        """The delta is part of `version`. Late and repeated outcomes change nothing."""
        if blob != self._tentative:
            return
        assert version > blob.version, f"a delta of base {blob.version} cannot be part of version {version}"
        self._tentative, self._version = None, version
        if self._durable:
            self._persist(self._path, self._buffer, {**self._tag, "version": str(version)})

    def dropped(self, blob: BlobId) -> None:
        """The delta will never be merged. Late and repeated outcomes change nothing."""
        if blob == self._tentative:
            self._tentative = self._buffer = None

    def reset(self) -> None:
        """What the residual was about is gone: a snapshot came, an anchor was lost, the codec or the run is another."""
        self._tentative = self._version = self._buffer = None
        if self._durable:
            self._forget_copy()

    def restore(self, version: int) -> None:
        """After a start, with the first anchor at `version`: take the copy on disk if it fits, else remove it."""
        if self._path is None or not self._path.exists():
            return
        try:
            with safe_open(self._path, framework="pt") as file:
                tag = file.metadata() or {}
                kept, of = file.get_tensor("residual"), int(tag.pop("version"))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            return _log.warning("residual not restored fragment=%d: %s", self._fragment, error)
        fresh = 0 <= of <= version <= of + R_STALE
        if not (self._durable and tag == self._tag and fresh):
            return self._forget_copy()
        buffer = self._zeros(self._fragment)
        if kept.shape != buffer.shape or kept.dtype != buffer.dtype or not math.isfinite(float(kept.abs().sum())):
            _log.warning("residual not restored fragment=%d: it is not one of this fragment", self._fragment)
            return self._forget_copy()
        self._buffer, self._version = buffer.copy_(kept), of

    def _persist(self, path: Path | None, buffer: Tensor | None, tag: dict[str, str]) -> None:
        assert path is not None and buffer is not None

        def write() -> None:
            temporary = path.with_suffix(".tmp")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file({"residual": buffer.cpu()}, temporary, metadata=tag)
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
            except (OSError, SafetensorError) as error:  # a crash would cost what it holds, and the run goes on
                temporary.unlink(missing_ok=True)
                _log.warning("residual not saved fragment=%s: %s", tag["fragment"], error)

        self._later(write)

    def _forget_copy(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Residuals:
    """Error feedback of one node, for all of its fragments. Without it in the codec nothing is kept, or allocated."""

    def __init__(self, run: str, zeros: Callable[[int], Tensor], folder: Path | None, later: Later) -> None:
        """`run`: fingerprint of its identity, and its history. `zeros`: fp32, of what this process keeps of a fragment.
        `folder` holds the copies; None: there are none."""
        self._run, self._zeros, self._folder, self._later = run, zeros, folder, later
        self._residuals: dict[int, Residual] = {}
        self._payloads: dict[int, tuple[str, Tensor]] = {}  # codec and last payload, where the codec starts from it

    def for_delta(self, blob: BlobId, codec: str) -> Tensor | None:
        """The residual to add to this delta, fp32 [numel], zero at first; None: the codec keeps none."""
        if codec_named(codec).beta == 0.0:
            self._drop(blob.fragment)
            return None
        return self._residual(blob.fragment, codec).for_delta()

    def previous(self, blob: BlobId, codec: str) -> Tensor | None:
        """The payload that `codec` last wrote of this fragment, uint8."""
        kept = self._payloads.get(blob.fragment)
        return kept[1] if kept is not None and kept[0] == codec else None

    def encoded(self, blob: BlobId, codec: str, payload: Tensor | None) -> None:
        """A delta lies encoded; `payload` is given where the codec wants to see it again."""
        if payload is not None:
            self._payloads[blob.fragment] = codec, payload
        if (residual := self._residuals.get(blob.fragment)) is not None:
            residual.encoded(blob)

    def on_outcome(self, blob: BlobId, merged_in: int | None) -> None:
        """A delta became part of that version, or (None) never will."""
        if (residual := self._residuals.get(blob.fragment)) is not None:
            residual.dropped(blob) if merged_in is None else residual.merged(blob, merged_in)

    def installed(self, fragment: int, version: int, codec: str) -> None:
        """A snapshot replaced the anchor; at the first one a fitting copy on disk is used."""
        if codec_named(codec).beta == 0.0:
            return
        if (known := self._residuals.get(fragment)) is not None:
            return known.reset()
        self._residual(fragment, codec).restore(version)

    def begin_again(self, run: str) -> None:
        """Drop all residuals: they belong to a history that is over. Copies on disk have another `run`."""
        for fragment in list(self._residuals):
            self._drop(fragment)
        self._payloads.clear()
        self._run = run

    def _residual(self, fragment: int, codec: str) -> Residual:
        format = codec_named(codec)  # its parameters may change from window to window, and the loss stays a loss
        known = self._residuals.get(fragment)
        if known is None or known.codec != format.name:
            self._drop(fragment)
            durable = format.traits.sparse
            known = self._residuals[fragment] = Residual(
                self._run, fragment, format.name, self._zeros, self._folder, self._later, durable=durable
            )
        return known

    def _drop(self, fragment: int) -> None:
        """The codec is another one now."""
        if (old := self._residuals.pop(fragment, None)) is not None:
            old.reset()


def run_of(spec: RunSpec, history: int) -> str:
    """Identifies the run and its history: a copy on disk is used only if it matches."""
    fingerprint = spec.identity.fingerprint()
    return f"{fingerprint}.{history}" if history else fingerprint
