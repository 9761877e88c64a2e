"""Mutations drawn by a seed: one operator, constant, condition, call or value within a function is changed at a time.

The tests are collected once and run once, which tells the lines that each reaches. Each mutation is made in a fork of
that process, by new code for the functions of its module, and meets the tests that reach its line, quick ones first.
A process that a test starts has the module as it is.
"""

import ast
import gc
import importlib
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

TESTS_S = 20.0
"""Of the tests that reach a line the quick ones are tried, up to so many seconds together."""

LIMIT_S = 600.0
"""Of one mutation: one that makes its tests hang is noticed, too."""

PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
PAIRS += [(ast.And, ast.Or), (ast.Add, ast.Sub)]
OTHER: dict[type, Any] = dict(PAIRS) | {after: before for before, after in PAIRS}


def changes(node: ast.AST, inside: bool = False, typed: bool = False) -> Iterator[tuple[Any, str, Any]]:
    """All that can be made in the functions below a node: a node, one of its fields, and what that becomes."""
    match node if inside else None:
        case ast.Assert():
            return
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield node, "ops", [OTHER[type(op)]()]
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OTHER:
            yield node, "op", OTHER[type(op)]()
        case ast.Constant(value=int(value)):
            yield node, "value", not value if isinstance(value, bool) else value + 1
        case ast.Return(value=ast.expr() as value) if typed and not isinstance(value, ast.Constant):
            yield node, "value", ast.Constant(None)
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield node, "value", ast.Constant(None)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield node, "test", ast.UnaryOp(ast.Not(), test)
    below: Sequence[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):  # its defaults are evaluated on import
        below, inside = node.body, True
        typed = node.returns is not None and "None" not in ast.unparse(node.returns)
    for child in below:
        yield from changes(child, inside, typed)


def _mutated(file: str, number: int) -> tuple[int, str, dict[object, CodeType]]:
    """The line of a module's change, the change in words, and the module's code objects with it."""
    tree = ast.parse((ROOT / file).read_text())
    node, field, value = list(changes(tree))[number]
    before = ast.unparse(node).splitlines()[0]
    setattr(node, field, value)
    words = f"{before} → {ast.unparse(node).splitlines()[0]}"
    codes = [compile(ast.fix_missing_locations(tree), str(ROOT / file), "exec")]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return node.lineno, words, {_place(code): code for code in codes}


def _place(code: CodeType) -> object:
    return code.co_filename, code.co_qualname, code.co_firstlineno, len(code.co_freevars)


def _forked(work: Callable[[], object], limit_s: float) -> Any:
    """What `work` returns or raises in a fork of this process; None where it takes longer or ends without a word."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            sender.send(work())
        except Exception as error:  # noqa: BLE001 - it is raised where it is received
            sender.send(error)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(limit_s) else None
    except EOFError:
        found = None
    process.kill()
    process.join()
    if isinstance(found, Exception):
        raise found
    return found


class Sampler:
    """Plugin of pytest that tries mutations in place of running the tests: of each its file and its number there."""

    def __init__(self, drawn: Sequence[tuple[str, int]]) -> None:
        self.drawn, self.bad = drawn, 0

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # its plugin of pytest has to come first

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", deadline=None, database=None, derandomize=True, phases=phases)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            pytest.exit("the tests cannot be collected", 1)
        files = {str(ROOT / file): file for file, _ in self.drawn}
        for file in files.values():
            importlib.import_module("farloop." + file.removesuffix(".py").replace("/", "."))

        def fails(item: pytest.Item) -> bool:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            return session.testsfailed > 0

        def reached() -> dict[tuple[str, int], list[tuple[float, int]]]:
            """Of each line, the tests that reach it and how long they take."""
            tests: dict[tuple[str, int], list[tuple[float, int]]] = {}
            for number, item in enumerate(session.items):
                lines, since = set[tuple[str, int]](), time.monotonic()

                def trace(frame: FrameType, event: str, _: object, lines: set[tuple[str, int]] = lines) -> Any:
                    if file := files.get(frame.f_code.co_filename):
                        lines.add((file, frame.f_lineno))
                        return trace
                    return None

                sys.settrace(trace)
                failed = fails(item)
                sys.settrace(None)
                if failed:
                    raise AssertionError(f"{item.nodeid} fails without a mutation")
                for line in lines:
                    tests.setdefault(line, []).append((time.monotonic() - since, number))
            return tests

        tests = _forked(reached, 3600.0)
        for file, number in self.drawn:
            line, words, codes = _mutated(file, number)
            reaching = sorted(tests.get((file, line), []))
            passed = itertools.accumulate(seconds for seconds, _ in reaching[:-1])
            quick = [n for (_, n), until in zip(reaching, [0.0, *passed], strict=False) if until < TESTS_S]

            def killed(codes: dict[object, CodeType] = codes, quick: list[int] = quick) -> str:
                for function in gc.get_objects():
                    if type(function) is FunctionType:
                        function.__code__ = codes.get(_place(function.__code__), function.__code__)
                return next((session.items[n].nodeid for n in quick if fails(session.items[n])), "")

            by = _forked(killed, LIMIT_S) if quick else ""
            self.bad += by == ""
            found = "killed" if by != "" else "SURVIVED" if quick else "UNREACHED"
            sys.stdout.write(f"{found:9s} {file}:{line}: {words}  [{'it hangs or ends' if by is None else by}]\n")
            sys.stdout.flush()
        sys.stdout.write(f"{len(self.drawn) - self.bad} of {len(self.drawn)} killed\n")
        return True


def sample(count: int, seed: int, only: Sequence[str]) -> int:
    """Try so many mutations of the modules with one of these texts in their path, with the unit tests of their folders;
    how many no test noticed."""
    modules = [
        path.relative_to(ROOT) for top in ROOT.glob("*/__init__.py") for path in sorted(top.parent.rglob("*.py"))
    ]
    files = sorted(str(path) for path in modules if any(text in str(path) for text in only or [""]))
    every = [(file, n) for file in files for n, _ in enumerate(changes(ast.parse((ROOT / file).read_text())))]
    sampler = Sampler(sorted(random.Random(seed).sample(every, min(count, len(every)))))
    units = ROOT / "tests/unit"
    folders = {
        units / top if (units / top).is_dir() else units for top in (file.split("/")[0] for file, _ in sampler.drawn)
    }
    words = ["-q", "-s", "-p", "no:cacheprovider", "-m", "not slow", f"--rootdir={ROOT}", *map(str, sorted(folders))]
    code = pytest.main(words, plugins=[sampler])
    if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(code)
    return sampler.bad
