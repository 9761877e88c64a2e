"""`farloop export`: the global model as a folder that other tools load."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from farloop.cli.options import STATE, AsJson, StateFolder
from farloop.config.exit_codes import CommandError, cannot_write

NumberFormat = Literal["float32", "bfloat16", "float16"]


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="Output folder; made anew.")],
    state: StateFolder = STATE,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            show_default="the run's",
            help="For a run with an own model: hf:FOLDER or package.module:factory, as on its nodes.",
        ),
    ] = "",
    dtype: Annotated[NumberFormat, typer.Option(help="Number format of the weights.")] = "float32",
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file of weights.")] = "5GB",
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", show_default=False, help="tokenizer.json, or a folder with a tokenizer, to copy."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the newest global model as a folder: of Hugging Face where the model is one, else of safetensors files.

    The coordinator may run meanwhile. transformers loads the folder of a model hf:… with from_pretrained(DIR); a model
    of peft is written as its adapter. Weights of own and built-in models have the names that they have in the run.

    Example: farloop export out/model --state state --dtype bfloat16 --tokenizer llama/
    """
    import torch

    from farloop.coordinator.storage.recovery import newest_model
    from farloop.monitoring.units import plural, size_text
    from farloop.node.named_model import ModelError, save_tokenizer, save_weights

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} exists and is not an empty folder: take another name")
    ledger, weights = newest_model(state)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        save_weights(
            ledger.spec.identity, weights, unfinished, dtype=getattr(torch, dtype), shard_size=shard_size, own=model
        )
        if tokenizer is not None:
            save_tokenizer(tokenizer, unfinished)
        unfinished.chmod(0o755)
        unfinished.replace(folder)
    except ModelError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if as_json:
        versions = list(ledger.versions)
        typer.echo(json.dumps({"folder": str(folder), "versions": versions, "dtype": dtype, "files": files}))
        return
    rounds = f"after round {ledger.current_round}" if any(ledger.versions) else "before its first commit"
    typer.echo(f"run {ledger.spec.identity.name} {'at its end' if ledger.finished else rounds}, in {dtype}: {folder}")
    typer.echo(f"{plural(len(files), 'file')}, {size_text(sum(files.values()))}: {', '.join(files)}")
