"""Deltas become blobs in a thread of their own, while training goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from farloop.algo.spec import Contribution
from farloop.node import events as ev
from farloop.node.errors import NonFiniteDelta
from farloop.node.replica import Replica
from farloop.quant.blob import HEADER_BYTES, BlobHeader, as_tensor, blob_bytes, pack_blob_into
from farloop.quant.errors import NonFiniteError
from farloop.quant.norm import payload_norm_sq
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import Offer

Done = Callable[[Offer, bytearray], None]
Failed = Callable[[Exception], None]


class Encoder:
    """One worker thread; deltas leave in the order they were taken."""

    def __init__(self, replica: Replica, done: Done, failed: Failed) -> None:
        """`done` and `failed` are called in the worker's thread."""
        self._replica, self._done, self._failed = replica, done, failed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="codec")

    def submit(self, command: ev.Encode, delta: Tensor, epoch: int, inner_step: int) -> None:
        """Encode `delta`, fp32 [numel], which now belongs to the encoder."""
        future = self._pool.submit(encode_delta, self._replica, command, delta, epoch, inner_step)
        future.add_done_callback(self._report)

    def close(self) -> None:
        """Finish what was submitted."""
        self._pool.shutdown()

    def _report(self, future: "Future[tuple[Offer, bytearray]]") -> None:
        error = future.exception()
        if isinstance(error, Exception):
            self._failed(error)
        elif error is None:
            self._done(*future.result())


def encode_delta(
    replica: Replica, command: ev.Encode, delta: Tensor, epoch: int, inner_step: int
) -> tuple[Offer, bytearray]:
    """The delta's blob and its offer; its buffer goes back to the replica. Raises NonFiniteDelta."""
    codec, numel = codec_named(command.codec), delta.numel()
    data = bytearray(blob_bytes(codec, numel))
    payload = as_tensor(data)[HEADER_BYTES:]
    try:
        codec.encode_into(delta, payload)
    except NonFiniteError as error:
        name = replica.tensor_at(command.blob.fragment, error.index)
        raise NonFiniteDelta(name, inner_step) from error
    finally:
        replica.give_back(delta)
    header = BlobHeader(
        codec=codec,
        fragment=command.blob.fragment,
        numel=numel,
        version=command.window,
        base=command.blob.version,
        epoch=epoch,
    )
    pack_blob_into(header, data)
    contribution = Contribution(
        node=command.blob.node,
        incarnation=command.blob.incarnation,
        base=command.blob.version,
        steps=command.steps,
        tokens=command.tokens,
        norm_sq=payload_norm_sq(codec, payload, numel),
    )
    offer = Offer(
        blob=command.blob,
        size=len(data),
        digest=blob_digest(data),
        window=command.window,
        contributors=(contribution,),
    )
    return offer, data
