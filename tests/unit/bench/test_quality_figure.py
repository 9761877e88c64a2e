"""The figure of methods: means along curves, bytes beside them, and every variant in it."""

from pathlib import Path

import pytest

from farloop.bench.quality import RunResult
from farloop.plots.quality import course_of, plot_methods


def result(loss: float, *, nodes: int = 2, seed: int = 0, moved: tuple[int, ...] = (0, 50, 100)) -> RunResult:
    curve = tuple((10.0 * (k + 1), loss + 2.0 - k) for k in range(3))
    return RunResult(
        key="k", seed=seed, nodes=nodes, loss=loss, curve=curve, bytes_up=50, bytes_down=50, moved=moved, syncs=2.0,
        inner_steps=60, tokens=600, cpu_s=1.0,
    )  # fmt: skip


def test_a_course_is_the_mean_of_its_seeds() -> None:
    course = course_of("a", (result(1.0), result(3.0, seed=1, moved=(0, 70, 100))))
    assert course.tokens == (200.0, 400.0, 600.0)
    assert course.loss == (4.0, 3.0, 2.0)
    assert course.spread == pytest.approx((2**0.5,) * 3)
    assert course.moved == (0.0, 60.0, 100.0)
    assert not course.alone


def test_a_single_seed_has_no_spread_and_a_single_node_no_bytes() -> None:
    course = course_of("a", (result(1.0, nodes=1),))
    assert course.spread == (0.0, 0.0, 0.0)
    assert course.alone


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_every_variant_is_in_the_figure(tmp_path: Path, suffix: str) -> None:
    labels = ["data-parallel nodes=2", "single", *(f"streaming nodes={n}" for n in range(2, 12))]
    results = {label: (result(1.0, nodes=1 if label == "single" else 2),) for label in labels}
    path = tmp_path / "new" / f"quality.{suffix}"
    plot_methods(path, results, title="twelve ways", caption="of a test")
    content = path.read_bytes()
    if suffix == "svg":
        assert all(word.encode() in content for word in (*labels, "twelve ways", "of a test", "one node, no link"))
    else:
        assert content.startswith(b"\x89PNG")


def test_a_single_node_alone_has_a_figure_too(tmp_path: Path) -> None:
    plot_methods(tmp_path / "alone.svg", {"single": (result(1.0, nodes=1),)}, title="", caption="")
    assert (tmp_path / "alone.svg").exists()
