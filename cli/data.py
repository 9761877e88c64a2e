"""`farloop data`: token files from texts and datasets."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from farloop.cli.options import AsJson, Commands
from farloop.cli.progress import LINE_EVERY_S, progress_console
from farloop.config.exit_codes import CommandError, writing
from farloop.monitoring.status import dumps
from farloop.monitoring.units import count_text, percent_text, plural, size_text

if TYPE_CHECKING:
    from farloop.node.data.builder import Progress
    from farloop.node.data.token_file import Header

data_app = Commands("Build token files from texts, JSONL, Parquet and Hugging Face datasets, and check them.")


@data_app.command("build")
def build_data(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            show_default=False,
            help="Text, .jsonl or .parquet file, a folder of those, or hf:NAME[:CONFIG][@REVISION] or hf:FOLDER.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", show_default=False, help="The token file, e.g. tokens.bin.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A tokenizer.json, or a folder with one.", show_default="tokens are bytes"),
    ] = None,
    train: Annotated[
        int | None,
        typer.Option(
            "--train-tokenizer",
            metavar="VOCAB",
            show_default=False,
            help="Train a byte-level BPE of this many tokens on the sources; written beside FILE as .tokenizer.json.",
        ),
    ] = None,
    end_token: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", show_default="the tokenizer's", help="The token that closes a document."),
    ] = None,
    field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    split: Annotated[str, typer.Option(help="Split of hf: datasets.")] = "train",
    validation: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of the text to hold out, to evaluate the model on.")
    ] = 0.05,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out records and files that cannot be used, and count them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE, and its tokenizer if one is trained.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenise documents into one memory-mapped file for [data] path.

    Every document is closed by the tokenizer's end token. All nodes of a run need the
    same file.

    Example: farloop data build corpus.jsonl docs/ --train-tokenizer 4096 --out tokens.bin
    """
    from farloop.node.data import builder

    if tokenizer is not None and train is not None:
        raise CommandError("--tokenizer and --train-tokenizer: give one of them")
    if end_token is not None and tokenizer is None:
        raise CommandError("--end-token is a token of --tokenizer, which is missing")
    made = out.parent / f"{out.stem}.tokenizer.json"
    for path, instead in ((out, ""), *([(made, f"; use it with --tokenizer {made}")] if train is not None else [])):
        if path.is_dir() or (path.exists() and not force):
            replace = "it is a folder" if path.is_dir() else f"or --force to replace it{instead}"
            raise CommandError(f"{path} exists: give another --out, {replace}")
    reading: dict[str, Any] = {"field": field, "split": split, "skip_bad": skip_bad}
    used: builder.Tokenizer = builder.ByteTokenizer()
    with _Display(progress_console(json=as_json)) as display, writing(out):
        if train is not None:
            builder.train_tokenizer(sources, made, train, on_progress=display.update, **reading)
            tokenizer = made
        if tokenizer is not None:
            used = builder.FileTokenizer(tokenizer, end_token)
        header, progress = builder.build(
            sources, out, used, validation_share=validation, on_progress=display.update, **reading
        )
    told = {"characters": progress.characters, "skipped": progress.skipped, "tokenizer_file": tokenizer}
    _print_facts(out, header, told, as_json=as_json)


@data_app.command("show")
def show_data(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="A token file.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it and compare its digest.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a token file holds, and with --verify whether every byte is as it was built.

    Example: farloop data show tokens.bin --verify
    """
    from farloop.node.data import token_file

    header = token_file.verify(file) if verify else token_file.open_tokens(file).header
    _print_facts(file, header, {}, as_json=as_json)


def _print_facts(file: Path, header: "Header", more: dict[str, Any], *, as_json: bool) -> None:
    facts = {"file": str(file), "bytes": header.file_bytes, **dataclasses.asdict(header)}
    facts |= {key: value if isinstance(value, int) else value and str(value) for key, value in more.items()}
    if as_json:
        typer.echo(dumps(facts))
        return
    held_out = percent_text(header.validation_tokens / header.tokens)
    lines = [
        ("file", f"{file}, {size_text(header.file_bytes)}"),
        ("tokens", f"{header.tokens:,} as {header.dtype}, {held_out} of them for validation"),
        ("documents", f"{header.documents:,}"),
        ("vocabulary", f"{header.vocabulary:,}, tokenizer {header.tokenizer}, end token {header.end_token}"),
        ("digest", header.digest),
    ]
    if "characters" in more:
        lines.append(("text", f"{more['characters'] / header.tokens:.2f} characters per token"))
    if more.get("tokenizer_file"):
        lines.append(("tokenizer", str(more["tokenizer_file"])))
    if more.get("skipped"):
        lines.append(("skipped", f"{more['skipped']:,} records and files that cannot be used"))
    for label, value in lines:
        typer.echo(f"  {label:<12} {value}")


class _Display:
    """How far a build is: one line that changes on a terminal, else a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console, self._live = console, console.status("reading") if console.is_terminal else None
        self._said = time.monotonic()

    def update(self, progress: "Progress") -> None:
        now = time.monotonic()
        if now - self._said < (0.2 if self._live else LINE_EVERY_S):
            return
        self._said = now
        line = f"{progress.doing}: {plural(progress.documents, 'document')}, {size_text(progress.characters)} of text"
        line += f", {count_text(progress.tokens)} tokens" if progress.tokens else ""
        line += f", in {progress.source}"
        if self._live is None:
            self._console.print(line, markup=False, soft_wrap=True)
        else:
            self._live.update(line)

    def __enter__(self) -> "_Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
