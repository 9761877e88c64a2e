"""What commands share: groups with one error edge, options, and the look of tables. Imports nothing heavy."""

import importlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import typer
import typer.main

from farloop.config.exit_codes import CommandError, ExitCode, cannot_write, ended_in_one_line, say_error
from farloop.config.logs import LogLevel
from farloop.monitoring.units import nearest, range_text

if TYPE_CHECKING:
    from rich.table import Table

Function = TypeVar("Function", bound=Callable[..., Any])

TRAIN, INSPECT, CONFIGURE = "Train", "Inspect", "Configure"  # sections of `--help`
PREDICT, MEASURE, BREAK = "Compare and predict", "Measure", "Break"  # of `farloop lab --help`
FIGURES = (".svg", ".png", ".pdf")
STATE = Path("state")

AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Draw it: .svg, .png or .pdf.")]
StateFolder = Annotated[Path, typer.Option("--state", metavar="DIR", help="The coordinator's state_dir.")]
PagesUrl = Annotated[str, typer.Option(help="Address of the coordinator's HTTP pages.")]
SetFlags = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        show_default=False,
        help="Override a setting, like FARLOOP_SECTION__KEY=VALUE; repeatable.",
    ),
]
Level = Annotated[
    LogLevel,
    typer.Option(help="Lowest level of log lines to write.", envvar="FARLOOP_LOG_LEVEL", case_sensitive=False),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="One JSON object per line.", envvar="FARLOOP_LOG_JSON")]
TextData = Annotated[
    Path | None,
    typer.Option(help="Token file, text file, JSONL file or folder.", show_default="Python's standard library"),
]


_UsageError: type[Any] = typer.BadParameter.__bases__[0]  # typer exports only this kind of it


@contextmanager
def usage_in_one_line() -> Iterator[None]:
    """Wrong usage is one line and exit code 2, as every error is; a group without words shows its help."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        say_error(_usage_line(error))
        raise typer.Exit(ExitCode.USAGE) from None


def _usage_line(error: Any) -> str:
    """What is wrong, and the nearest valid words."""
    from farloop.config.sources import WANTED

    ctx, found = error.ctx, next(iter(getattr(error.__cause__, "errors", list)()), None)
    place = "".join(f"{words}: " for words in ctx.command_path.split(" ", 1)[1:]) if ctx else ""
    if hasattr(error, "possibilities"):
        options = [word for one in ctx.command.get_params(ctx) for word in one.opts if word.startswith("--")]
        return f"{place}there is no option {error.option_name!r}; {nearest(error.option_name, options)}"
    if found is None:  # no value has a wrong type
        message = str(error.format_message())
        if unknown := re.match("No such command '(.*?)'", message):
            return f"{place}no such command {unknown[1]!r}; {nearest(unknown[1], ctx.command.list_commands(ctx))}"
        return f"{place}{message[:1].lower()}{message[1:].rstrip('.')}"
    parameter, given = error.param, found["input"]
    from_environment = ctx.get_parameter_source(parameter.name).name == "ENVIRONMENT"
    name = parameter.envvar if from_environment else parameter.opts[0]
    if choices := parameter.type_descriptor.choices:
        return f"{name}: there is no {given!r}; {nearest(given, choices)}"
    if found["type"] in ("greater_than_equal", "less_than_equal"):
        bounds = parameter.type_descriptor.parameter_info
        return f"{name}: expected {range_text(bounds.min, bounds.max)}, got {given}"
    wanted = WANTED.get(found["type"].partition("_")[0])
    return f"{name}: {f'expected {wanted}' if wanted else found['msg'].lower()}, got {given!r}"


class Commands(typer.Typer):
    """A group of commands. Every error of a command ends as one line and an exit code (`config.exit_codes`)."""

    def __init__(self, help: str, **more: Any) -> None:  # typer's own name for it
        super().__init__(
            help=help,
            no_args_is_help=True,
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode="markdown",  # as "rich", `[run]` in a help text would be taken for a style and vanish
            **more,
        )

    def command(self, name: str | None = None, **more: Any) -> Callable[[Function], Function]:
        """As typer's, with the error edge around the function."""
        register = super().command(name, **more)
        return lambda function: register(ended_in_one_line()(function))


class Elsewhere(NamedTuple):
    """A command, or a group of them, whose module is imported when it is called."""

    section: str
    place: str  # module:attribute
    summary: str  # the first paragraph of its help

    def load(self, name: str) -> Any:
        module, _, attribute = self.place.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, Commands):
            alone = Commands(self.summary)
            alone.command(name)(found)
            found = alone
        command: Any = typer.main.get_command(found)
        command.name, command.rich_help_panel = name, self.section
        return command


def check_figure(plot: Path | None) -> None:
    """Raises CommandError for a kind of file that cannot be drawn."""
    if plot is not None and plot.suffix not in FIGURES:
        raise CommandError(f"--plot is a file named {', '.join(FIGURES[:-1])} or {FIGURES[-1]}, not {str(plot)!r}")


def table(*columns: str, left: tuple[str, ...] = (), fold: tuple[str, ...] = ()) -> "Table":
    """A table without lines between rows. Columns are numbers, at the right, but for `left` and `fold` (may wrap)."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", padding=(0, 1))
    for column in columns:
        text = column in left or column in fold
        flow: Literal["fold", "ellipsis"] = "fold" if column in fold else "ellipsis"
        made.add_column(column, justify="left" if text else "right", no_wrap=flow != "fold", overflow=flow)
    return made


def facts() -> "Table":
    """A grid of labels and values."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column()
    return made


def make_output_folder(folder: Path) -> None:
    """Create the folder of `--out` if it is missing. Raises CommandError, also if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise cannot_write(folder, error) from error


def check_codecs(spellings: Iterable[str]) -> None:
    """Raises UnknownCodec or BadParameter, before torch is loaded."""
    from farloop.quant.spelling import read_spelling

    for spelling in spellings:
        read_spelling(spelling)


def check_model(name: str) -> None:
    """Raises CommandError unless it is a built-in one."""
    from farloop.node.settings import PRESETS

    if name not in PRESETS:
        raise CommandError(f"--model: there is no {name!r}; {nearest(name, PRESETS)}")


def check_links(*names: str) -> None:
    """Raises CommandError unless each is a link, or empty."""
    from farloop.local.relay import Link, LinkError

    try:
        for name in filter(None, names):
            Link.parse(name)
    except LinkError as error:
        raise CommandError(f"--link: {error}") from error
