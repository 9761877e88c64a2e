"""A pretend CUDA device on the CPU: tensors that say they are on cuda:0, streams that run late, events, pinned memory.

Every operation on such a tensor is queued on the current stream and runs when it is waited for (`order="lazy"`),
now and then (`"random"`), or at once (`"eager"`). What misses a wait gets other numbers than `"eager"`; vector clocks
name the two operations. It also counts what a real device would charge: waits of the host, bytes over PCIe, memory.

    with Device(order="lazy") as cuda:          # torch.cuda.* and device="cuda" now mean this
        ...
    cuda.races, cuda.waits, cuda.h2d, cuda.d2h, cuda.peak

Block codecs run numba's kernels in place of Triton's, queued as one launch each. Not modelled: NCCL, CUDA graphs, time.
"""

import contextlib
import random
import sys
import threading
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from farloop.quant.kernels import dispatch
from farloop.quant.kernels.interface import BlockKernels

ROOT = str(Path(dispatch.__file__).resolve().parents[2])
CUDA = torch.device("cuda", 0)
HERE: "Device | None" = None
_GET = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_consecutive", "_unique2"}
_MIXES = {"index", "index_put", "index_put_", "_index_put_impl_"}  # take indices on the CPU


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class Block:
    """Memory of the device. Freed when the last tensor dies; the allocator may then give it to its stream at once."""

    def __init__(self, nbytes: int, stream: "Stream") -> None:
        self.nbytes, self.stream, self.key = nbytes, stream, object()
        dev = stream.dev
        dev.live += nbytes
        dev.peak = max(dev.peak, dev.live)
        weakref.finalize(self, dev.freed, nbytes, stream, id(self.key), self.key)


class Fake(torch.Tensor):
    """A tensor on the device; `_real` is its memory. To C++ it is on the CPU: a CPU build has no other guard."""

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, real: torch.Tensor, block: Block) -> "Fake":
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype,
            device="cpu", requires_grad=False,
        )  # fmt: skip
        made._real, made._block = real, block
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Fake({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert HERE is not None
        return HERE.dispatch(func, args, kwargs or {})


class Stream:
    def __init__(self, device: Any = None, dev: "Device | None" = None, **_: Any) -> None:
        self.dev = dev or HERE
        self.name = f"s{len(self.dev.streams)}"
        self.dev.streams.append(self)
        self.queue: list[tuple[str, Any]] = []  # what has not run yet
        self.ran = self.number = 0
        self.clock: dict[str, int] = {}

    def put(self, kind: str, what: Any) -> int:
        self.queue.append((kind, what))
        self.number += 1
        return self.number

    def run(self, upto: int | None = None) -> None:
        with self.dev.lock:
            upto = self.number if upto is None else upto
            while self.ran < upto:
                kind, what = self.queue.pop(0)
                self.ran += 1
                what.stream.run(what.at) if kind == "wait" else what()

    def wait_event(self, event: "Event") -> None:
        with self.dev.lock:
            self.put("wait", event)
            self.clock = joined(self.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.dev.wait(self, "stream.synchronize")


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream, self.at, self.clock = None, 0, {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or HERE.current()
        with HERE.lock:
            self.stream, self.at, self.clock = stream, stream.number, dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or HERE.current()).wait_event(self)

    def query(self) -> bool:
        return self.stream is None or self.stream.ran >= self.at

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.at)
            HERE.known = joined(HERE.known, self.clock)
            HERE.waits[threading.current_thread().name, f"event.synchronize @ {where()}"] += 1

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


def joined(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {k: max(a.get(k, 0), b.get(k, 0)) for k in {*a, *b}}


def where() -> str:
    """The innermost lines of farloop."""
    found, frame = list[str](), sys._getframe(1)
    while frame is not None and len(found) < 3:
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and "site-packages" not in path and path != __file__:
            found.append(f"{path.rsplit('/', 1)[1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "?"


class Device(TorchFunctionMode):
    def __init__(self, order: str = "lazy", seed: int = 0, *, kernels: bool = True, memory: int = 80 << 30) -> None:
        """`kernels`: whether Triton has any; else the reference runs. `memory`: of the device, in bytes."""
        self.order, self.random, self.kernels, self.memory = order, random.Random(seed), kernels, memory
        self.lock, self.host = threading.RLock(), threading.local()
        self.known: dict[str, int] = {}  # what some thread has waited for: it is over, whichever thread goes on
        self.streams: list[Stream] = []
        self.default = Stream(dev=self)
        self.races, self.unmodelled = Counter[str](), Counter[str]()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.h2d, self.d2h = Counter[str](), Counter[str]()  # bytes, by whether pinned
        self.launches = self.live = self.peak = 0
        self.registered: dict[int, int] = {}
        self.uses: dict[int, dict[str, Any]] = {}  # by block: the last write, and reads since then, with their clocks
        self.patched: list[tuple[Any, str, Any]] = []

    # --- streams and the host

    def current(self) -> Stream:
        return getattr(self.host, "stream", None) or self.default

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Any:
        before, self.host.stream = self.current(), stream
        try:
            yield
        finally:
            self.host.stream = before

    def wait(self, stream: Stream, what: str, count: bool = True) -> None:
        if count:
            self.waits[threading.current_thread().name, f"{what} @ {where()}"] += 1
        stream.run()
        self.known = joined(self.known, stream.clock)

    def submit(self, job: Any, reads: list[Block], writes: list[Block], name: str) -> None:
        stream, at = self.current(), where()
        with self.lock:
            self.launches += 1
            number = stream.put("op", job)
            stream.clock = joined(joined(stream.clock, self.known), {stream.name: number})
            for block, is_write in [*((b, False) for b in reads), *((b, True) for b in writes)]:
                self.seen(block, is_write, stream, number, f"{name} @ {at}")
            if self.order == "eager":
                for each in self.streams:
                    each.run()
            elif self.order == "random" and self.random.random() < 0.3:
                some = self.random.choice(self.streams)
                some.run(min(some.number, some.ran + self.random.randint(1, 4)))

    def seen(self, block: Block, is_write: bool, stream: Stream, number: int, what: str) -> None:
        uses = self.uses.setdefault(id(block.key), {"write": None, "reads": []})
        against = [uses["write"], *(uses["reads"] if is_write else [])]
        for other in against:
            if other and other[0] is not stream and stream.clock.get(other[0].name, 0) < other[1]:
                self.races[f"{'write' if is_write else 'read'} {what}  NOT AFTER  {other[2]}"] += 1
        if is_write:
            uses["write"], uses["reads"] = (stream, number, what), []
        else:
            uses["reads"].append((stream, number, what))

    def freed(self, nbytes: int, stream: Stream, key: int, _: Any) -> None:
        self.live -= nbytes
        uses = self.uses.pop(key, None)
        for other in [uses["write"], *uses["reads"]] if uses else []:
            if other and other[0] is not stream and other[0].ran < other[1]:
                self.races[f"freed on {stream.name} while pending on {other[0].name}: {other[2]}"] += 1

    # --- tensors

    def new(self, real: torch.Tensor) -> Fake:
        return Fake(real, Block(real.untyped_storage().nbytes(), self.current()))

    def pinned(self, host: torch.Tensor) -> bool:
        at = host.data_ptr()
        return any(start <= at < start + size for start, size in self.registered.items())

    def upload(self, host: torch.Tensor, into: Fake, non_blocking: bool) -> None:
        kind = "pinned" if self.pinned(host) else "pageable"
        self.h2d[kind] += host.nbytes
        source = host.detach() if kind == "pinned" else host.detach().clone()
        into_real = into._real
        self.submit(lambda: into_real.copy_(source), [], [into._block], "h2d")
        if not non_blocking:
            self.wait(self.current(), "h2d copy_")

    def download(self, fake: Fake, host: torch.Tensor, non_blocking: bool) -> None:
        kind = "pinned" if self.pinned(host) else "pageable"
        self.d2h[kind] += host.nbytes
        real = fake._real
        self.submit(lambda: host.detach().copy_(real), [fake._block], [], "d2h")
        if not (non_blocking and kind == "pinned"):
            self.wait(self.current(), "d2h copy_")

    def to_host(self, fake: Fake, dtype: torch.dtype, non_blocking: bool = False) -> torch.Tensor:
        source = fake.detach() if dtype == fake.dtype else fake.detach().to(dtype)
        out = torch.empty_strided(source.shape, source.stride(), dtype=dtype)
        if non_blocking and out.nbytes:  # torch allocates pinned memory for it
            self.registered[out.data_ptr()] = out.nbytes
            weakref.finalize(out, self.registered.pop, out.data_ptr(), None)
        self.download(source, out, non_blocking)
        return out

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        flat, spec = tree_flatten((args, kwargs))
        fakes = [x for x in flat if isinstance(x, Fake)]
        plain = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, Fake)]
        if name == "copy_" and plain:
            into, source = args[0], args[1]
            non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking", False))
            if isinstance(into, Fake):
                source = source.to(into.dtype).expand(into.shape) if source.ndim or into.ndim else source
                self.upload(source, into, non_blocking)
            else:
                same = into.dtype == source.dtype and into.shape == source.shape
                made = source if same else self.new(torch.empty(source.shape, dtype=into.dtype))
                if not same:
                    made.copy_(source)
                self.download(made, into, non_blocking)
            return into
        if any(x.ndim > 0 for x in plain) and name not in _MIXES:
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, cuda:0 and cpu  [{where()}]")
        kwargs = {k: (torch.device("cpu") if k == "device" and v is not None else v) for k, v in kwargs.items()}
        flat, spec = tree_flatten((args, kwargs))
        real_args, real_kwargs = tree_unflatten([x._real if isinstance(x, Fake) else x for x in flat], spec)
        returns = func._schema.returns
        aliases = [r.alias_info for r in returns]
        blocks = list({id(f._block): f._block for f in fakes}.values())
        if name in _GET:
            self.wait(self.current(), name)
            out = func(*real_args, **real_kwargs)
            return self.new(out) if isinstance(out, torch.Tensor) and name != "_local_scalar_dense" else out
        if (aliases and aliases[0] is not None and not aliases[0].is_write) or name in ("detach", "alias"):
            out = func(*real_args, **real_kwargs)  # a view: nothing moves
            return tree_map(lambda x: Fake(x, fakes[0]._block) if isinstance(x, torch.Tensor) else x, out)
        mutated = [
            value
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in [kwargs.get(argument.name, args[place] if place < len(args) else None)]
            if value is not None
        ]
        mutated = [x for x in tree_flatten(mutated)[0] if isinstance(x, Fake)]
        if mutated and (not returns or aliases[0] is not None):
            writes = list({id(f._block): f._block for f in mutated}.values())
            self.submit(lambda: func(*real_args, **real_kwargs), blocks, writes, name)
            return (mutated[0] if len(returns) == 1 else tuple(mutated)) if returns else None
        meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in tree_flatten((real_args, real_kwargs))[0]]
        meta_args, meta_kwargs = tree_unflatten(meta, spec)
        if "device" in meta_kwargs:
            meta_kwargs["device"] = torch.device("meta")
        try:
            shapes = func(*meta_args, **meta_kwargs)
        except (RuntimeError, NotImplementedError):  # no meta kernel: as if it waited
            self.unmodelled[name] += 1
            self.wait(self.current(), name, count=False)
            out = func(*real_args, **real_kwargs)
            return tree_map(lambda x: self.new(x) if isinstance(x, torch.Tensor) else x, out)
        outs, outspec = tree_flatten(shapes)
        made = [
            self.new(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)) if isinstance(x, torch.Tensor) else x
            for x in outs
        ]
        targets = [x._real if isinstance(x, Fake) else None for x in made]

        def job() -> None:
            for target, value in zip(targets, tree_flatten(func(*real_args, **real_kwargs))[0], strict=True):
                if target is not None:
                    target.copy_(value)

        self.submit(job, blocks, [x._block for x in made if isinstance(x, Fake)], name)
        return tree_unflatten(made, outspec)

    # --- what torch calls before it dispatches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name in ("to", "cuda", "cpu") and isinstance(first, torch.Tensor):
            given = [*args[1:], kwargs.get("device")]
            wanted = next((a for a in given if isinstance(a, (str, torch.device))), None)
            wanted = next((a.device for a in args[1:] if isinstance(a, torch.Tensor)), wanted)
            wanted = {"cuda": CUDA, "cpu": "cpu"}.get(name, wanted)
            dtype = next((a for a in [*args[1:], kwargs.get("dtype")] if isinstance(a, torch.dtype)), first.dtype)
            if is_cuda(wanted) and not isinstance(first, Fake):
                made = self.new(torch.empty_strided(first.shape, first.stride(), dtype=dtype))
                self.upload(first.detach().to(dtype), made, bool(kwargs.get("non_blocking", False)))
                return torch.nn.Parameter(made, first.requires_grad) if isinstance(first, torch.nn.Parameter) else made
            if wanted is not None and not is_cuda(wanted) and isinstance(first, Fake):
                return self.to_host(first, dtype, bool(kwargs.get("non_blocking", False)))
            if is_cuda(wanted):  # it is there
                kwargs.pop("device", None)
                args = tuple(a for a in args if not isinstance(a, (str, torch.device)))
                return first if dtype == first.dtype and not kwargs.get("copy") else func(args[0], dtype)
        if isinstance(first, Fake):
            if name == "data_ptr":
                return first._real.data_ptr()
            if name in ("tolist", "numpy"):
                return getattr(self.to_host(first, first.dtype), name)()
            if name == "is_pinned":
                return False
        elif name == "is_pinned" and isinstance(first, torch.Tensor):
            return self.pinned(first)
        if is_cuda(kwargs.get("device")) and not any(isinstance(a, Fake) for a in args):
            kwargs["device"] = "cpu"
            real = func(*args, **kwargs)
            if name.startswith("empty"):
                real.fill_(float("nan") if real.is_floating_point() else 0x5A)
            self.launches += 1
            return self.new(real)
        return func(*args, **kwargs)

    # --- torch.cuda

    def __enter__(self) -> "Device":
        global HERE
        HERE = self
        self.runtime = SimpleNamespace(
            cudaHostRegister=lambda at, size, flags: self.registered.__setitem__(at, size) or 0,
            cudaHostUnregister=lambda at: self.registered.pop(at, None),
            cudaError=int,
            cudaGetErrorString=lambda error: f"pretend error {error}",
        )
        fakes: dict[str, Any] = {
            "Stream": Stream, "Event": Event, "current_stream": lambda device=None: self.current(),
            "default_stream": lambda device=None: self.default, "stream": self.on, "is_available": lambda: True,
            "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
            "get_device_name": lambda device=None: "pretend CUDA", "cudart": lambda: self.runtime,
            "synchronize": lambda device=None: [self.wait(s, "synchronize") for s in self.streams],
            "get_device_properties": lambda device=None: SimpleNamespace(total_memory=self.memory),
            "mem_get_info": lambda device=None: (self.memory - self.live, self.memory),
            "memory_reserved": lambda device=None: self.live,
            "max_memory_allocated": lambda device=None: self.peak, "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device=None: setattr(self, "peak", self.live),
            "set_sync_debug_mode": lambda mode: None, "is_current_stream_capturing": lambda: False,
            "device": lambda device: contextlib.nullcontext(), "_lazy_init": lambda: None,
            "is_bf16_supported": lambda *_, **__: True,
        }  # fmt: skip
        for name, fake in fakes.items():
            self._patch(torch.cuda, name, fake)
        alike = torch._has_compatible_shallow_copy_type  # module.to: a Fake is no CPU tensor's data
        is_alike = lambda *ab: isinstance(ab[0], Fake) == isinstance(ab[1], Fake) and alike(*ab)  # noqa: E731
        self._patch(torch, "_has_compatible_shallow_copy_type", is_alike)
        by_device = torch._C._group_tensors_by_device_and_dtype  # to C++, a Fake is on the CPU
        self._patch(torch._C, "_group_tensors_by_device_and_dtype", lambda *given: {
            (CUDA if any(isinstance(each, Fake) for each in lists[0]) else device, dtype): (lists, places)
            for (device, dtype), (lists, places) in by_device(*given).items()
        })  # fmt: skip
        self._patch(dispatch, "_gpu", self._kernels)
        self._patch(dispatch, "_left_out", dispatch._left_out | {("norm", "cuda"), ("digest", "cuda")})
        run = threading.Thread.run

        def in_thread(thread: threading.Thread) -> None:
            with TorchFunctionMode.__enter__(self) and contextlib.ExitStack() as stack:
                stack.callback(TorchFunctionMode.__exit__, self, None, None, None)
                run(thread)

        self._patch(threading.Thread, "run", in_thread)
        return TorchFunctionMode.__enter__(self)

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self.patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _kernels(self, key: Any) -> "Kernels | None":
        cpu = dispatch._cpu(key, False) if self.kernels else None
        return None if cpu is None else Kernels(cpu)

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)
        for owner, name, was in reversed(self.patched):
            setattr(owner, name, was)
        self.patched.clear()
        for stream in self.streams:
            stream.run()


# --- Kernels


def real(x: Any) -> Any:
    return x._real if isinstance(x, Fake) else x


class Kernels(BlockKernels):
    """Numba's, each queued as one launch; what returns an index waits."""

    def __init__(self, cpu: BlockKernels) -> None:
        self.cpu = cpu

    def _queue(self, name: str, reads: list[Any], writes: list[Any], job: Any) -> None:
        for x in [*reads, *writes]:
            assert x is None or isinstance(x, Fake), f"{name}: an operand is on the CPU"
        HERE.submit(job, *([x._block for x in xs if x is not None] for xs in (reads, writes)), name)

    def encode(self, call: Any) -> int:
        if call.x.numel() == 0:
            return -1
        steps = call.steps if call.steps is None or isinstance(call.steps, Fake) else call.steps.to("cuda")
        call = replace(call, steps=steps)
        there = replace(call, **{n: real(getattr(call, n)) for n in ("x", "out", "local", "residual", "steps")})
        found: list[int] = []
        reads, writes = [call.x, call.local, call.residual, steps], [call.out, call.residual]
        self._queue("encode", reads, writes, lambda: found.append(self.cpu.encode(there)))
        HERE.wait(HERE.current(), "int(first_bad)")
        return found[0]

    def decode_into(self, payload: torch.Tensor, out: torch.Tensor, *, numel: int, start: int = 0) -> None:
        p, o = real(payload), real(out)
        self._queue("decode", [payload], [out], lambda: self.cpu.decode_into(p, o, numel=numel, start=start))

    def add(self, payloads: Any, weights: Any, acc: torch.Tensor, *, overwrite: bool) -> None:
        ps, a, ws = [real(p) for p in payloads], real(acc), list(weights)
        self._queue("add", [*payloads, acc], [acc], lambda: self.cpu.add(ps, ws, a, overwrite=overwrite))

    def outer(self, step: Any) -> Any:
        raise NotImplementedError
