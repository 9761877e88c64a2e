"""The fragments' buffers in files of the state folder that are mapped: memory that the kernel may take back.

A commit makes new buffers, as always; they are copied into files, and read from there until the next one. The files
have no names and are never read after a restart: what is durable is in snapshots and the journal.
"""

import ctypes
import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from farloop.coordinator.aggregator import Buffers

_log = logging.getLogger(__name__)

_PREFIX: Final = "mapped-"
_MADV_DONTNEED: Final = 4


class MappedBuffers:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for left in directory.glob(f"{_PREFIX}*"):  # by a process that was killed before it took the name away
            left.unlink(missing_ok=True)

    def __call__(self, buffers: Buffers) -> Buffers:
        """The same numbers; what was given, with a warning, where the disk has no room."""
        try:
            outer = {name: self._mapped(tensor) for name, tensor in buffers.outer.items()}
            return replace(
                buffers, anchor=self._mapped(buffers.anchor), target=self._mapped(buffers.target), outer=outer
            )
        except OSError as error:
            _log.warning("a fragment's buffers stay in memory cause=%r: free space in %s", str(error), self._directory)
            return buffers

    def _mapped(self, tensor: Tensor) -> Tensor:
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=_PREFIX) as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a write into a hole of a full disk would be a SIGBUS
            out = torch.from_file(file.name, shared=True, size=tensor.numel())
            out.copy_(tensor)
            os.fsync(file.fileno())
        # On the disk now, so these pages can go; the next read brings them back.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(out.data_ptr()), ctypes.c_size_t(out.nbytes), _MADV_DONTNEED)
        return out
