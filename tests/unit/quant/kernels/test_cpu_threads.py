"""Blocks are dealt to threads: each once, and never to more threads than allowed."""

import threading

import pytest
import torch

from farloop.quant.kernels.cpu.primitives import kernel_threads, on_parts

MANY = 1 << 14  # blocks of 256: enough for 32 threads


def parts_of(num_blocks: int, threads: int | None = None) -> list[tuple[int, int]]:
    parts: list[tuple[int, int]] = []

    def kernel(first: int, last: int) -> int:
        parts.append((first, last))
        return -1

    assert on_parts(kernel, num_blocks=num_blocks, block=256, threads=threads) == -1
    return sorted(parts)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("num_blocks", [0, 1, MANY, MANY + 5])
def test_every_block_is_in_one_part(threads: int, num_blocks: int) -> None:
    parts = parts_of(num_blocks, threads)
    assert [block for first, last in parts for block in range(first, last)] == list(range(num_blocks))
    assert len(parts) <= threads


def test_as_many_parts_as_threads_are_allowed() -> None:
    assert len(parts_of(MANY, 3)) == 3
    with kernel_threads(2):
        assert len(parts_of(MANY)) == 2
        with kernel_threads(1):
            assert len(parts_of(MANY)) == 1
        assert len(parts_of(MANY)) == 2
        assert len(parts_of(MANY, 3)) == 3
    assert len(parts_of(MANY)) == torch.get_num_threads()


def test_another_thread_has_its_own_limit() -> None:
    found: list[int] = []
    with kernel_threads(torch.get_num_threads() + 1):
        other = threading.Thread(target=lambda: found.append(len(parts_of(MANY))))
        other.start()
        other.join()
    assert found == [torch.get_num_threads()]


def test_small_work_stays_on_the_calling_thread() -> None:
    on: list[threading.Thread] = []

    def kernel(first: int, last: int) -> int:
        on.append(threading.current_thread())
        return -1

    on_parts(kernel, num_blocks=100, block=256, threads=4)
    assert on == [threading.current_thread()]


def test_the_first_fault_of_all_parts_is_told() -> None:
    def kernel(first: int, last: int) -> int:
        return -1 if first == 0 else first + 7

    assert on_parts(kernel, num_blocks=MANY, block=256, threads=4) == MANY // 4 + 7


def test_an_error_on_a_thread_is_raised() -> None:
    def kernel(first: int, last: int) -> int:
        if first > 0:
            raise RuntimeError("broken")
        return -1

    with pytest.raises(RuntimeError, match="broken"):
        on_parts(kernel, num_blocks=MANY, block=256, threads=2)


def test_no_threads_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"), kernel_threads(0):
        pass
