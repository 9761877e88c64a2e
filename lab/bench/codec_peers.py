"""Other people's compressors, measured beside ours where they are installed. None is needed by anything.

Each does the whole job of an encoder, its own scales included, on one flat fp32 tensor, and writes into buffers that
are reused wherever its interface lets it.
"""

import importlib
import importlib.metadata
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from farloop.lab.bench.codec_quality import QualityRow, Sample, quality_row

_Row = TypeVar("_Row")

MEASURED = "measured"

ROW = 256  # elements of a row, for formats that want matrices
CPU = ("cpu",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One compressor, ready to be called; `encode` returns what `decode` and `num_bytes` take."""

    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    num_bytes: Callable[[Any], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One compressor that may be there."""

    name: str
    package: str  # of the package index
    make: Callable[[int], Kernels]  # Given the number of threads. Raises ImportError where it is not installed.
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """What became of a peer."""

    name: str
    package: str
    version: str | None  # None: it is not installed
    state: str  # `measured`, `not installed`, or what went wrong, in a line


def probe(peer: Peer) -> PeerState:
    """Whether it is installed and gives back what it took, tried on a few numbers."""
    try:
        version = importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        return PeerState(name=peer.name, package=peer.package, version=None, state="not installed")
    x = torch.linspace(-1.0, 1.0, 8 * ROW, dtype=torch.float32, device="cpu")
    try:
        with quiet():
            kernels = peer.make(1)
            y = kernels.decode(kernels.encode(x))
        state = MEASURED if float((x - y.view(-1)).abs().max()) < 0.5 else "gives back other numbers than it took"
    except Exception as error:  # noqa: BLE001 - foreign code, against versions it may not know
        state = _in_a_line(error)
    return PeerState(name=peer.name, package=peer.package, version=version, state=state)


class Peers:
    """Those that are installed and work, until one breaks: a peer that fails is noted and left out, no more."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._states = {peer.name: probe(peer) for peer in peers}
        self._peers = peers

    @property
    def present(self) -> list[Peer]:
        """Those that can still be measured."""
        return [peer for peer in self._peers if self._states[peer.name].state == MEASURED]

    @property
    def states(self) -> tuple[PeerState, ...]:
        return tuple(self._states.values())

    def tried(self, peer: Peer, measure: Callable[[], Iterable[_Row]]) -> list[_Row]:
        """The rows of `measure`; none where the peer breaks."""
        try:
            return list(measure())
        except Exception as error:  # noqa: BLE001 - as in `probe`
            self._states[peer.name] = replace(self._states[peer.name], state=_in_a_line(error))
            return []


def peer_quality(peer: Peer, samples: Iterable[Sample]) -> Iterator[QualityRow]:
    """As `codec_quality`, of each sample."""
    with quiet():
        kernels = peer.make(torch.get_num_threads())
        for sample in samples:
            num_bytes, decoded = 0, []
            for x in sample.vectors:
                encoded = kernels.encode(x)
                num_bytes += kernels.num_bytes(encoded)
                decoded.append(kernels.decode(encoded).view(-1)[: x.numel()].clone())
            yield quality_row(peer.name, sample, decoded, num_bytes)


def _in_a_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}".partition("\n")[0], 90)


def quiet() -> AbstractContextManager[object]:
    """Their deprecations are theirs to mend."""
    return warnings.catch_warnings(action="ignore")


# --- plain torch


def _cast(dtype: torch.dtype, threads: int) -> Kernels:
    """x.to(dtype) and back."""
    narrow, wide = _Buffer(dtype), _Buffer(torch.float32)
    return Kernels(encode=narrow.copy_of, decode=wide.copy_of, num_bytes=lambda t: t.nbytes)


def _float8(threads: int) -> Kernels:
    """One scale for the tensor, absmax to 448: float8_e4m3fn."""
    narrow, wide = _Buffer(torch.float8_e4m3fn), _Buffer(torch.float32)

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.aminmax(x)
        scale = torch.maximum(-low, high) / 448
        return narrow.copy_of(x / scale), scale

    return Kernels(
        encode=encode, decode=lambda e: wide.copy_of(e[0]).mul_(e[1]), num_bytes=lambda e: e[0].nbytes + e[1].nbytes
    )


def _qint8(threads: int) -> Kernels:
    """torch.quantize_per_tensor, absmax to 127."""

    def encode(x: Tensor) -> Tensor:
        low, high = torch.aminmax(x)
        return torch.quantize_per_tensor(x, max(-float(low), float(high)) / 127, 0, torch.qint8)

    return Kernels(encode=encode, decode=lambda q: q.dequantize(), num_bytes=lambda q: q.numel() + 4)


def _eager_q4(threads: int) -> Kernels:
    """What one would write in an afternoon: `q4`'s arithmetic on whole tensors, no tiles, no kernels."""

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.view(-1, 64)
        largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
        scales = (largest / -8).to(torch.bfloat16)
        codes = (blocks / scales.float()).nan_to_num_().round_().clamp_(-8, 7).add_(8).to(torch.uint8)
        return scales, codes[:, :32] | codes[:, 32:] << 4

    def decode(encoded: tuple[Tensor, Tensor]) -> Tensor:
        scales, packed = encoded
        codes = torch.cat((packed & 15, packed >> 4), dim=1)
        return codes.float().sub_(8).mul_(scales.float())

    return Kernels(encode=encode, decode=decode, num_bytes=lambda e: e[0].nbytes + e[1].nbytes)


class _Buffer:
    """A tensor that is made once and filled again and again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._tensor = torch.empty(0, dtype=dtype, device="cpu")

    def of(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Its numbers are whatever was there before."""
        if self._tensor.shape != torch.Size(shape) or self._tensor.device != device:
            self._tensor = torch.empty(shape, dtype=self._tensor.dtype, device=device)
        return self._tensor

    def copy_of(self, source: Tensor) -> Tensor:
        """`source` in the buffer's type."""
        return self.of(source.shape, source.device).copy_(source)


# --- packages


def _bitsandbytes(quant_type: str, threads: int) -> Kernels:
    """Blocks of 64 with fp32 scales for nf4 and fp4; blocks of 256 for its 8-bit codebook."""
    functional: Any = importlib.import_module("bitsandbytes.functional")

    def encode(x: Tensor) -> Any:
        if quant_type == "int8":
            return functional.quantize_blockwise(x, blocksize=256)
        return functional.quantize_4bit(x, blocksize=64, quant_type=quant_type)

    def decode(encoded: Any) -> Tensor:
        restore = functional.dequantize_blockwise if quant_type == "int8" else functional.dequantize_4bit
        out: Tensor = restore(*encoded)
        return out

    return Kernels(encode=encode, decode=decode, num_bytes=lambda e: e[0].nbytes + e[1].absmax.nbytes)


def _hivemind(compression: str, threads: int) -> Kernels:
    """Its serialised tensors. Release 1.1.12 cannot read its 8-bit ones under NumPy 2.4 and newer."""
    module: Any = importlib.import_module("hivemind.compression")
    codec = getattr(module, compression)()
    return Kernels(
        encode=lambda x: codec.compress(x, module.CompressionInfo.from_tensor(x)),
        decode=codec.extract,
        num_bytes=lambda serialised: len(serialised.buffer),
    )


def _piquant(bits: int, threads: int) -> Kernels:
    """One scale and zero point for the tensor, its own thread pool, our buffers."""
    piquant: Any = importlib.import_module("piquant")
    context = piquant.Context(threads)
    fp32, codes_type = piquant.DataType.F32, piquant.DataType[f"UINT{bits}"]
    narrow, wide = _Buffer(torch.uint8), _Buffer(torch.float32)

    def encode(x: Tensor) -> tuple[Tensor, float, int, int]:
        numel, codes = x.numel(), narrow.of((-(-x.numel() * bits // 8),), x.device)
        scale, zero = context.compute_quant_params_ptr_float32(x.data_ptr(), codes_type, numel)
        nearest = piquant.RoundMode.NEAREST
        context.quantize_ptr(x.data_ptr(), fp32, codes.data_ptr(), codes_type, numel, scale, zero, nearest)
        return codes, scale, zero, numel

    def decode(encoded: tuple[Tensor, float, int, int]) -> Tensor:
        codes, scale, zero, numel = encoded
        out = wide.of((numel,), codes.device)
        put = piquant.ReduceOp.SET
        context.dequantize_ptr(codes.data_ptr(), codes_type, out.data_ptr(), fp32, numel, scale, zero, put)
        return out

    return Kernels(encode=encode, decode=decode, num_bytes=lambda e: e[0].nbytes + 12)


def _torchao(element: str, threads: int) -> Kernels:
    """MX formats (blocks of 32, power-of-two scales); NVFP4 (blocks of 16) with its scale for the tensor."""
    formats: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    nvidia: Any = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def encode(x: Tensor) -> Any:
        rows = nn.functional.pad(x, (0, -x.numel() % ROW)).view(-1, ROW)
        if element == "nvfp4":
            scale = nvidia.per_tensor_amax_to_scale(rows.abs().max())
            return nvidia.NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=scale)
        return formats.MXTensor.to_mx(rows, getattr(torch, element), 32)

    def decode(encoded: Any) -> Tensor:
        out: Tensor = encoded.dequantize(torch.float32)
        return out

    return Kernels(encode=encode, decode=decode, num_bytes=lambda e: e.qdata.nbytes + e.scale.nbytes)


PEERS: tuple[Peer, ...] = (
    Peer(name="torch eager q4", package="torch", make=_eager_q4),
    Peer(name="torch bf16", package="torch", make=partial(_cast, torch.bfloat16)),
    Peer(name="torch float8", package="torch", make=_float8),
    Peer(name="torch qint8", package="torch", make=_qint8, devices=CPU),
    Peer(name="bitsandbytes nf4", package="bitsandbytes", make=partial(_bitsandbytes, "nf4")),
    Peer(name="bitsandbytes fp4", package="bitsandbytes", make=partial(_bitsandbytes, "fp4")),
    Peer(name="bitsandbytes int8", package="bitsandbytes", make=partial(_bitsandbytes, "int8")),
    Peer(name="pi-quant uint4", package="pypiquant", make=partial(_piquant, 4), devices=CPU),
    Peer(name="pi-quant uint8", package="pypiquant", make=partial(_piquant, 8), devices=CPU),
    Peer(name="torchao MXFP8", package="torchao", make=partial(_torchao, "float8_e4m3fn")),
    Peer(name="torchao MXFP4", package="torchao", make=partial(_torchao, "float4_e2m1fn_x2")),
    Peer(name="torchao NVFP4", package="torchao", make=partial(_torchao, "nvfp4")),
    Peer(name="hivemind float16", package="hivemind", make=partial(_hivemind, "Float16Compression"), devices=CPU),
    Peer(
        name="hivemind uniform8",
        package="hivemind",
        make=partial(_hivemind, "Uniform8BitQuantization"),
        devices=("cpu",),
    ),
    Peer(
        name="hivemind blockwise8",
        package="hivemind",
        make=partial(_hivemind, "BlockwiseQuantization"),
        devices=("cpu",),
    ),
)
