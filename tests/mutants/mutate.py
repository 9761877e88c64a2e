"""`make mutants`: apply each mutation to a copy of the tree, and see that a test fails. Never touches the tree itself.

    python tests/mutants/mutate.py [--only TEXT ...] [--jobs N]
    python tests/mutants/mutate.py --sample N [--seed S] [--only TEXT ...]

Ends with 1 where a mutation survives, or where its text is not found exactly once. With --sample it draws mutations.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parent))

from mutations import MUTATIONS, Mutation
from sample_mutations import sample

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = shutil.ignore_patterns(".*", "out", "build", "dist", "__pycache__", "*.egg-info", "docs", "figures")

WHOLE_S = 3600.0
"""Limit of all tests without a mutation."""

HANG = 2.0
"""Limit of one mutation's tests, in times of what all tests take without a mutation: one that makes them hang is
noticed, too, and a busy machine does not look like one."""


def is_stale(mutation: Mutation, root: Path = ROOT) -> str:
    """Why it cannot be applied, in a sentence; empty where it can."""
    found = (root / mutation.file).read_text().count(mutation.before)
    missing = [test for test in mutation.tests if not (root / test).is_file()]
    if found != 1:
        return f"{mutation.file} has its text {found} times, not once: update tests/mutants/mutations.py"
    return f"there is no {missing[0]}" if missing else ""


def copy_tree(folder: Path) -> Path:
    """A copy that imports as `farloop` where its parent is on the path."""
    tree = folder / "farloop"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT, symlinks=True)
    return tree


def run_tests(tree: Path, tests: tuple[str, ...], limit_s: float = WHOLE_S) -> tuple[int, str]:
    """Exit code of pytest in a copy, and its last lines. Raises TimeoutExpired."""
    environment = {**os.environ, "PYTHONPATH": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    check = "import sys, farloop.algo.spec as s; sys.exit(not s.__file__.startswith(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", check, str(tree)], env=environment, cwd=tree, check=True, timeout=limit_s)
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    done = subprocess.run(
        words, env=environment, cwd=tree, capture_output=True, text=True, timeout=limit_s, check=False
    )
    return done.returncode, done.stdout[-600:] + done.stderr[-300:]


def verdict(mutation: Mutation, tree: Path, limit_s: float = WHOLE_S) -> str:
    """killed, survived, or what else became of it."""
    if why := is_stale(mutation, tree):
        return f"STALE: {why}"
    path = tree / mutation.file
    whole = path.read_text()
    path.write_text(whole.replace(mutation.before, mutation.after))
    try:
        code, words = run_tests(tree, mutation.tests, limit_s)
    except subprocess.TimeoutExpired:
        return "killed"  # its tests hang: that is noticed
    finally:
        path.write_text(whole)
    if code == 1:
        return "killed"
    return "SURVIVED" if code == 0 else f"BROKEN: pytest ended with {code}: {words}"


def main(only: list[str], jobs: int) -> int:
    """Try all mutations whose name or file has one of these texts in it; how many did not come out well."""
    wanted = [m for m in MUTATIONS if not only or any(text in m.name or text in m.file for text in only)]
    if not wanted:
        sys.exit(f"no mutation has one of {', '.join(only)} in its name or file")
    begun, bad = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            trees.put(copy_tree(Path(folder) / str(number)))
        tests = tuple(sorted({test for mutation in wanted for test in mutation.tests}))

        def attempt(mutation: Mutation) -> tuple[Mutation, str, float]:
            tree, since = trees.get(), time.monotonic()
            try:
                return mutation, verdict(mutation, tree, limit_s), time.monotonic() - since
            finally:
                trees.put(tree)

        tree = trees.get()
        code, words = run_tests(tree, tests)
        trees.put(tree)
        if code != 0:
            sys.stdout.write(f"the tests fail without any mutation:\n{words}\n")
            return 1
        limit_s = HANG * (time.monotonic() - begun)
        sys.stdout.write(f"{len(tests)} test files pass without a mutation ({time.monotonic() - begun:.0f} s)\n")
        with ThreadPoolExecutor(jobs) as pool:
            for mutation, found, seconds in pool.map(attempt, wanted):
                bad += found != "killed"
                sys.stdout.write(f"{found:9s} {seconds:6.1f} s  {mutation.file}: {mutation.name}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(wanted) - bad} of {len(wanted)} killed in {time.monotonic() - begun:.0f} s\n")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="mutations with one of these texts in their name or file")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time")
    parser.add_argument(
        "--sample", type=int, help="draw so many mutations of operators, constants, conditions and calls"
    )
    parser.add_argument("--seed", type=int, default=1, help="with another, other mutations are drawn")
    arguments = parser.parse_args()
    if arguments.sample:
        sys.exit(bool(sample(arguments.sample, arguments.seed, arguments.only or [])))
    sys.exit(bool(main(arguments.only, arguments.jobs)))
