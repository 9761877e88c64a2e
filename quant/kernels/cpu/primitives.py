"""What CPU kernels are built from: compilation, threads, memory, bits, scales, 4-bit codes, random words."""

import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import platformdirs
import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import caching
from numba.extending import intrinsic, register_jitable

from farloop.quant import errors, packing
from farloop.quant.kernels import interface

# --- Compilation
#
# A kernel is compiled for one signature at its first call, and kept on disk from run to run. Fast-math is off and
# nothing is contracted, so every operation rounds as IEEE says; divisions do not branch; the interpreter lock is
# released; there are no parallel loops.


Function = TypeVar("Function", bound=Callable[..., Any])

Number = Any  # a scalar inside a kernel, of the type that numba infers
Numbers = Any  # a pointer inside a kernel, of the type that numba infers

_compiling = threading.Lock()


def inlined(function: Function) -> Function:
    """For functions that kernels call: they are compiled as part of their callers."""
    return register_jitable(forceinline=True)(function)


class Kernel:
    """A function that is compiled for one signature when it is first called."""

    def __init__(self, name: str, signature: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._signature = signature
        self._function = function
        self._compiled: Callable[..., Any] | None = None

    def compiled(self) -> Callable[..., Any]:
        if self._compiled is None:
            with _compiling:
                if self._compiled is None:
                    self._compiled = self._compile()
        return self._compiled

    def _compile(self) -> Callable[..., Any]:
        # Numba names its cache files after the function; kernels made of one function differ by this name.
        self._function.__qualname__ = self.name
        made: Any = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(self._function)
        with suppress(RuntimeError):  # no folder can be written: they are compiled in every process
            made._cache = _KernelCache(self._function)  # type: ignore[no-untyped-call]
        made.compile(self._signature)
        made.disable_compile()
        return cast(Callable[..., Any], made)


def warm_up(kernels: Iterable[Kernel]) -> float:
    """Compile, or load from disk; returns the seconds it took."""
    started = time.monotonic()
    for kernel in kernels:
        kernel.compiled()
    return time.monotonic() - started


def sources() -> list[Path]:
    """The files that kernels are compiled from: this folder, and the modules that it imports."""
    shared = (packing, errors, interface)
    return [*sorted(Path(__file__).parent.glob("*.py")), *(Path(str(module.__file__)) for module in shared)]


@cache
def _fingerprint() -> str:
    """Of the sources, numba's version and the CPU."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sources():
        digest.update(path.read_bytes())
    digest.update(f"{numba.__version__} {binding.get_host_cpu_name()}".encode())
    digest.update(binding.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()


# --- Compiled kernels on disk
#
# numba would keep them beside the sources, where an uninstalled package leaves them behind, and would use them until a
# function's own file changes. They lie in the user's cache, in one folder for each fingerprint.

_MOST_FOLDERS = 8  # fingerprints that are kept: versions and machines that share a home folder


@cache
def cache_folder() -> Path | None:
    """The folder of this version's kernels on this machine; None where it cannot be written."""
    settings: Any = numba.config
    root = Path(settings.CACHE_DIR or platformdirs.user_cache_dir("farloop", appauthor=False)) / "farloop-kernels"
    folder = root / _fingerprint()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            os.utime(folder)
        by_use = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    except OSError:
        return None
    for unused in by_use[:-_MOST_FOLDERS]:
        shutil.rmtree(unused, ignore_errors=True)
    return folder


class _Place:
    """What numba asks of a place for the files of a kernel."""

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> "_Place | None":
        return None if cache_folder() is None else cls()

    def ensure_cache_path(self) -> None:
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return _fingerprint()

    def get_disambiguator(self) -> str:
        return "kernel"


class _Files(caching.CompileResultCacheImpl):
    _locator_classes = [_Place]  # type: ignore[list-item]  # noqa: RUF012 - as numba has it


class _KernelCache(caching.FunctionCache):
    """Of kernels alone: numba's settings, and so the caches of its other users, stay as they are."""

    _impl_class = _Files


# --- Threads
#
# A range of blocks is cut into contiguous parts. Every block is computed alone, so the number of threads never shows in
# the bytes. The threads are our own: numba's would compete with torch's for cores.


_SMALLEST_PART = 1 << 17
"""Elements. Handing a part to a thread takes some 20 µs, the time in which a kernel writes as many elements."""

_limit: ContextVar[int | None] = ContextVar("kernel_threads", default=None)


@contextmanager
def kernel_threads(num_threads: int) -> Iterator[None]:
    """Limit the threads of the kernels that this thread or task calls inside; outside they use as many as torch."""
    if num_threads < 1:
        raise ValueError(f"kernels run on at least 1 thread, not {num_threads}")
    token = _limit.set(num_threads)
    try:
        yield
    finally:
        _limit.reset(token)


def on_parts(kernel: Callable[[int, int], int], num_blocks: int, block: int) -> int:
    """Call kernel(first, last) on parts of [0, num_blocks); return the smallest result that is not negative, or −1.

    The calling thread computes one of the parts.
    """
    wanted = _limit.get() or torch.get_num_threads()
    num_parts = max(1, min(wanted, num_blocks * block // _SMALLEST_PART))
    cuts = [num_blocks * part // num_parts for part in range(num_parts + 1)]
    others = [_pool(os.getpid()).submit(kernel, cuts[part], cuts[part + 1]) for part in range(1, num_parts)]
    results = [kernel(cuts[0], cuts[1]), *(other.result() for other in others)]
    return min((result for result in results if result >= 0), default=-1)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """One per process: a fork does not copy threads."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="farloop-kernel")


# --- Numbers as bits, and memory
#
# Memory is the caller's or on the stack, where LLVM knows that it overlaps with nothing. Both are plain pointers:
# numba's arrays count references at every call, and LLVM would test for overlaps before every loop.
#
# Integers have 32 bits. Numba computes in 64; each `np.int32(…)` cuts back, and LLVM makes plain 32-bit lanes of it.
# Indices are uint64: numba lets signed ones count from the end, and tests each. A uint64 and a Python integer make a
# float, so constants of index arithmetic are np.uint64.


pointer_to: Any = types.CPointer


def _bitcast(from_type: Any, to_type: Any, to_ir: Any) -> Any:
    def typed(context: Any, x: Any) -> Any:
        return to_type(from_type), lambda context, builder, signature, args: builder.bitcast(args[0], to_ir)

    return intrinsic(typed)


bits = _bitcast(types.float32, types.int32, ir.IntType(32))  # fp32 → its bits, int32
from_bits = _bitcast(types.int32, types.float32, ir.FloatType())  # int32 → the fp32 with these bits
double_from_bits = _bitcast(types.int64, types.float64, ir.DoubleType())  # int64 → the fp64 with these bits

as_halves = _bitcast(pointer_to(types.uint32), pointer_to(types.uint16), ir.IntType(16).as_pointer())
"""The low half of each word, then the high one."""
as_words = _bitcast(pointer_to(types.int32), pointer_to(types.uint32), ir.IntType(32).as_pointer())


def _at(number: Any, number_ir: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], number_ir.as_pointer())

    def typed(context: Any, address: Any) -> Any:
        return pointer_to(number)(types.uint64), generate

    return intrinsic(typed)


bytes_at = _at(types.uint8, ir.IntType(8))
halves_at = _at(types.uint16, ir.IntType(16))
floats_at = _at(types.float32, ir.FloatType())
addresses_at = _at(types.uint64, ir.IntType(64))
words_at = _at(types.uint32, ir.IntType(32))
longs_at = _at(types.int64, ir.IntType(64))
doubles_at = _at(types.float64, ir.DoubleType())


def _stack(count: int, number: Any, number_ir: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            array = builder.alloca(ir.ArrayType(number_ir, count))
        array.align = 64
        return builder.bitcast(array, number_ir.as_pointer())

    def typed(context: Any) -> Any:
        return pointer_to(number)(), generate

    return intrinsic(typed)


stack_floats = _stack(256, types.float32, ir.FloatType())
stack_tile = _stack(4096, types.float32, ir.FloatType())
stack_words = _stack(128, types.uint32, ir.IntType(32))
stack_doubles = _stack(256, types.float64, ir.DoubleType())

_STACK_TYPES = {"int32": ir.IntType(32), "uint32": ir.IntType(32), "float64": ir.DoubleType(), "uint8": ir.IntType(8)}


def stack_array(count: int, number: str) -> Any:
    """What makes an array of so many numbers of this type on the stack of a kernel."""
    return _stack(count, getattr(types, number), _STACK_TYPES[number])


def _after() -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    def typed(context: Any, pointer: Any, count: Any) -> Any:
        return pointer(pointer, types.uint64), generate

    return intrinsic(typed)


after = _after()  # (pointer, count) → the pointer that many elements further


def _prefetch() -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        place = builder.bitcast(builder.gep(args[0], [args[1]]), byte)
        asked = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], asked)
        builder.call(function, [place, flag(1), flag(3), flag(1)])  # to write, into all caches, data
        return context.get_dummy_value()

    def typed(context: Any, pointer: Any, count: Any) -> Any:
        return types.void(pointer, types.uint64), generate

    return intrinsic(typed)


prefetch = _prefetch()
"""(pointer, count): begin to fetch the cache line of the element that many further; any place will do."""


def _load(number: Any, number_ir: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(args[0], [args[1]])
        return builder.load(builder.bitcast(pointer, number_ir.as_pointer()), align=1)

    def typed(context: Any, pointer: Any, offset: Any) -> Any:
        return number(pointer_to(types.uint8), types.uint64), generate

    return intrinsic(typed)


def _store(number: Any, number_ir: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(args[0], [args[1]])
        builder.store(args[2], builder.bitcast(pointer, number_ir.as_pointer()), align=1)
        return context.get_dummy_value()

    def typed(context: Any, pointer: Any, offset: Any, value: Any) -> Any:
        return types.void(pointer_to(types.uint8), types.uint64, number), generate

    return intrinsic(typed)


# (pointer to bytes, offset in bytes[, number]): received bytes may start at odd addresses.
load_u16 = _load(types.uint16, ir.IntType(16))
store_u16 = _store(types.uint16, ir.IntType(16))
load_i32 = _load(types.int32, ir.IntType(32))
store_i32 = _store(types.int32, ir.IntType(32))


# --- 64 comparisons at a time


def _compared(number: Any, number_ir: Any, operator: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(number_ir, 64)
        found = builder.load(builder.bitcast(args[0], vector.as_pointer()), align=number_ir.width // 8)
        lane = builder.insert_element(ir.Constant(vector, ir.Undefined), args[1], ir.Constant(ir.IntType(32), 0))
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), 64), None)
        all_lanes = builder.shuffle_vector(lane, ir.Constant(vector, ir.Undefined), everywhere)
        return builder.bitcast(builder.icmp_signed(operator, found, all_lanes), ir.IntType(64))

    def typed(context: Any, values: Any, other: Any) -> Any:
        return types.uint64(pointer_to(number), number), generate

    return intrinsic(typed)


def _of_bits(operation: Callable[[Any, Any], Any]) -> Any:
    def typed(context: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return operation(builder, args[0])

        return types.uint64(types.uint64), generate

    return intrinsic(typed)


reaching = _compared(types.int32, ir.IntType(32), ">=")
"""(pointer to int32, threshold) → uint64 whose bit i says whether element i, of 64, is at least the threshold."""
equal_to = _compared(types.uint8, ir.IntType(8), "==")
"""(pointer to uint8, number) → uint64 whose bit i says whether element i, of 64, is this number."""
count_ones = _of_bits(lambda builder, word: builder.ctpop(word))
lowest_one = _of_bits(lambda builder, word: builder.cttz(word, ir.Constant(ir.IntType(1), 0)))


# --- bf16 scales, and anchors rounded to the number type of the model


MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
_SIGN = np.int32(-0x80000000)
_SMALLEST_SCALE = np.int32(packing.SMALLEST_SCALE)
_TO_FP16_STEP = np.float32(0.5)


@inlined
def to_bf16(x: Number) -> Number:
    """Finite fp32 → the magnitude of its bf16, int32: nearest, ties to even."""
    magnitude = np.int32(bits(x) & MAGNITUDE)
    return np.int32(np.int32(np.int32(magnitude + np.int32(0x7FFF)) + np.int32((magnitude >> 16) & 1)) >> 16)


@inlined
def to_scale(x: Number, largest: Number) -> Number:
    """fp32, not negative → the bits of the scale that is stored for it, int32."""
    scale = to_bf16(x)
    if scale > largest:
        scale = largest
    if scale < _SMALLEST_SCALE:
        scale = np.int32(0)
    return scale


@inlined
def from_scale(scale: Number) -> Number:
    """bf16 bits → fp32."""
    return from_bits(np.int32(scale << 16))


@inlined
def cast_to_bf16(x: Number) -> Number:
    """fp32 → fp32, rounded as torch casts to bf16. NaNs and infinities stay what they are."""
    pattern = bits(x)
    magnitude = np.int32(pattern & MAGNITUDE)
    rounded = from_bits(np.int32(np.int32(to_bf16(x) << 16) | np.int32(pattern & _SIGN)))
    return rounded if magnitude < INFINITY else x


@inlined
def cast_to_fp16(x: Number) -> Number:
    """fp32 → fp32, rounded as torch casts to fp16. NaNs and infinities stay what they are."""
    pattern = bits(x)
    magnitude = np.int32(pattern & MAGNITUDE)
    # Ten bits of fraction are kept; from 2¹⁶ on it is an infinity.
    normal = np.int32(np.int32(magnitude + np.int32(0xFFF)) + np.int32((magnitude >> 13) & 1))
    normal = np.int32(normal & np.int32(-0x2000))
    normal = normal if normal < np.int32(0x47800000) else INFINITY
    # Below 2⁻¹⁴ all steps are 2⁻²⁴, which is the step of fp32 between 1/2 and 1.
    subnormal = bits(np.float32(np.float32(from_bits(magnitude) + _TO_FP16_STEP) - _TO_FP16_STEP))
    rounded = subnormal if magnitude < np.int32(0x38800000) else normal
    return from_bits(np.int32(rounded | np.int32(pattern & _SIGN))) if magnitude < INFINITY else x


@inlined
def from_fp16(half: Number) -> Number:
    """fp16 bits, uint16 → fp32, exact."""
    magnitude = np.int32(np.int32(half & 0x7FFF) << 13)
    scaled = bits(np.float32(from_bits(magnitude) * np.float32(2.0**112)))
    value = np.int32(magnitude | INFINITY) if magnitude >= np.int32(0x0F800000) else scaled
    return from_bits(np.int32(value | np.int32(np.int32(half & 0x8000) << 16)))


# --- 64 codes of 4 bits, packed as `packing.pack` does it


_LOWEST, _HIGHEST = np.float32(-8.0), np.float32(7.0)
_HALF = np.uint64(32)
_ONE_HALF, _BITS = np.float32(0.5), np.float32(2.0**-16)

_SHIFT = np.float32(1.5 * 2**23 + 8)
"""Adding it to k in −8…7 rounds to the nearest whole number, ties to even; the lowest bits are k + 8 then."""


@inlined
def pack_nearest(v: Numbers, s: Number, codes: Numbers) -> None:
    """Codes clamp(rn(v ÷ s), −8, 7) + 8 of v[0 … 63]; s is not 0."""
    for i in range(_HALF):
        low = min(max(v[i] / s, _LOWEST), _HIGHEST)
        high = min(max(v[_HALF + i] / s, _LOWEST), _HIGHEST)
        codes[i] = np.uint8(np.int32(bits(low + _SHIFT) & 15) | np.int32(bits(high + _SHIFT) << 4))


@inlined
def unpack(t: Numbers, s: Number, codes: Numbers) -> None:
    """t[0 … 63] = k·s of codes k + 8."""
    for i in range(_HALF):
        pair = np.int32(codes[i])
        t[i] = np.float32(np.int32(np.int32(pair & 15) - 8)) * s
        t[_HALF + i] = np.float32(np.int32(np.int32(pair >> 4) - 8)) * s


@inlined
def pack_random(v: Numbers, s: Number, noise: Numbers, codes: Numbers) -> None:
    """Codes clamp(⌊fl(v ÷ s) + u⌋, −8, 7) + 8 of v[0 … 63]; u comes from the 16 random bits of each element."""
    for i in range(_HALF):
        low = down(v[i] / s + uniform(noise[i]))
        high = down(v[_HALF + i] / s + uniform(noise[_HALF + i]))
        codes[i] = np.uint8(np.int32(low & 15) | np.int32(high << 4))


@inlined
def uniform(r: Number) -> Number:
    """(r + ½)·2⁻¹⁶ of 16 bits, exact."""
    return (np.float32(np.int32(r)) + _ONE_HALF) * _BITS


@inlined
def down(x: Number) -> Number:
    """clamp(⌊x⌋, −8, 7) + 8, int32."""
    return np.int32(np.int32(np.floor(min(max(x, _LOWEST), _HIGHEST))) + 8)


# --- The random bits of `packing.words`


_ODD = np.uint32(0x9E3779B1)
_FIRST = np.uint32(0x21F0AAAD)
_SECOND = np.uint32(0x735A2D97)
_ONE = np.uint64(1)


@inlined
def mix(x: Number) -> Number:
    """A bijection of uint32 in which every output bit depends on every input bit."""
    x = np.uint32(x ^ np.uint32(x >> 16))
    x = np.uint32(x * _FIRST)
    x = np.uint32(x ^ np.uint32(x >> 15))
    x = np.uint32(x * _SECOND)
    return np.uint32(x ^ np.uint32(x >> 15))


@inlined
def random_words(out: Numbers, count: Number, element: Number, seed: Number) -> None:
    """out uint32 [count] = the bits of the elements from `element`, an even number, on: 16 each, low half first."""
    shift = mix(np.uint32(seed))
    first = np.uint32(element >> _ONE)
    for i in range(count):
        out[i] = mixed(np.uint32(first + np.uint32(i)), shift)


@inlined
def mixed(counter: Number, shift: Number) -> Number:
    """The word of a counter; `shift` is `mix(seed)`."""
    return mix(np.uint32(np.uint32(counter * _ODD) + shift))
