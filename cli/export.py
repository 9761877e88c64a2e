"""`farloop export` and `farloop lab eval`: the global model as a folder that other tools load, and its loss."""

import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from farloop.cli.options import STATE, AsJson, StateFolder, TextData
from farloop.config.exit_codes import CommandError, cannot_write
from farloop.monitoring.status import dumps

OwnModel = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        show_default="the run's",
        help="For a run with an own model: hf:FOLDER or package.module:factory, as on its nodes.",
    ),
]
NumberFormat = Literal["float32", "bfloat16", "float16"]


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="Output folder; made anew.")],
    state: StateFolder = STATE,
    model: OwnModel = "",
    dtype: Annotated[NumberFormat, typer.Option(help="Number format of the weights.")] = "float32",
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file of weights.")] = "5GB",
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", show_default=False, help="tokenizer.json, or a folder with a tokenizer, to copy."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the newest global model as a folder: of Hugging Face where the model is one, else of safetensors files.

    The coordinator may run meanwhile. transformers loads the folder of a model hf:… with
    from_pretrained(DIR); a model of peft is written as its adapter, other models with the names of the run.

    Example: farloop export out/model --state state --dtype bfloat16 --tokenizer llama/
    """
    from farloop.coordinator.storage.files import state_folder

    state_folder(state)
    import torch

    from farloop.coordinator.storage.recovery import newest_model
    from farloop.monitoring.units import plural, size_text
    from farloop.node.model.named import save_tokenizer, save_weights
    from farloop.runtime.system import hold, remove_abandoned

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} exists and is not an empty folder: take another name")
    ledger, weights = newest_model(state)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder.parent, rf"\.{re.escape(folder.name)}-\w+\.part")
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-", suffix=".part"))
        hold(descriptor := os.open(unfinished, os.O_RDONLY))
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        odd = save_weights(
            ledger.spec.identity, weights, unfinished, dtype=getattr(torch, dtype), shard_size=shard_size, own=model
        )
        if tokenizer is not None:
            save_tokenizer(tokenizer, unfinished)
        unfinished.chmod(0o755)
        unfinished.replace(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.close(descriptor)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if as_json:
        versions = list(ledger.versions)
        typer.echo(
            dumps({"folder": str(folder), "versions": versions, "dtype": dtype, "files": files, "not_of_the_run": odd})
        )
        return
    rounds = f"after round {ledger.current_round}" if any(ledger.versions) else "before its first commit"
    typer.echo(f"run {ledger.spec.identity.name} {'at its end' if ledger.finished else rounds}, in {dtype}: {folder}")
    typer.echo(f"{plural(len(files), 'file')}, {size_text(sum(files.values()))}: {', '.join(files)}")
    if odd:
        typer.echo(f"a run holds no buffers: {len(odd)} of the model, as {odd[0]!r}, are not its nodes'")


def evaluate(
    state: StateFolder = STATE,
    data: TextData = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Sequences to take.", show_default="as many as the run's set has, or 256")
    ] = None,
    model: OwnModel = "",
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda or cuda:1.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Loss of the newest global model on text that no node trains on: the validation part of --data.

    The coordinator may run meanwhile.

    Example: farloop lab eval --state state --data tokens.bin
    """
    from farloop.coordinator.storage.files import state_folder

    state_folder(state)
    import torch

    from farloop.coordinator.storage.recovery import newest_model
    from farloop.node.data.corpus import EvaluationSet, load_corpus
    from farloop.node.errors import CorpusError
    from farloop.node.model.named import fill_, materialise_, model_of_run
    from farloop.node.trainer import EVALUATION_BATCH, evaluation_name, evaluation_sequences

    ledger, weights = newest_model(state)
    identity, terms = ledger.spec.identity, ledger.spec.terms
    named_set = "x" in identity.evaluation_set
    count = sequences or (evaluation_sequences(identity.evaluation_set) if named_set else 256)
    corpus = load_corpus(data)
    try:
        chosen = EvaluationSet(corpus, sequences=count, sequence_tokens=terms.inner.sequence_tokens)
    except CorpusError as error:
        raise CommandError(f"{data}: {error}") from error
    try:
        named = model_of_run(identity.model, 0, model)
        named.check(corpus.vocabulary, terms.inner.sequence_tokens)
        fill_(named.module, weights)
        materialise_(named.module, torch.device(device))
        loss = chosen.loss(named.module, EVALUATION_BATCH, named.loss)
    except (RuntimeError, AssertionError) as error:  # torch's, for a device that is not there or too small
        raise CommandError(f"--device {device}: {str(error).splitlines()[0]}") from error
    same = evaluation_name(chosen) == identity.evaluation_set
    if as_json:
        told = {"loss": loss, "sequences": len(chosen), "digest": chosen.digest, "is_the_run_s": same}
        typer.echo(dumps({**told, "versions": list(ledger.versions)}))
        return
    whose = "the run's evaluation set" if same else "another set than the run's"
    typer.echo(f"loss {loss:.4f} nats per token, perplexity {math.exp(min(loss, 700.0)):.4g}")
    typer.echo(f"{len(chosen)} sequences of {terms.inner.sequence_tokens} tokens, {whose}; digest {chosen.digest}")
