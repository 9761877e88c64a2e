"""From settings to the run's specification and first anchors."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from farloop.algo.fragments import is_muon_matrix, partition, plain_name, trainable_tensors
from farloop.algo.methods import Method, method_named
from farloop.algo.sample_order import arrivals
from farloop.algo.spec import Fragment, Identity, Layout, RunSpec, is_statistic
from farloop.algo.terms import Terms
from farloop.algo.validation import check, given_as
from farloop.config.run_config import RunConfig, loops_bring_data, terms_of
from farloop.config.settings import RunFile, Settings, about_run
from farloop.coordinator.aggregator import first_anchor
from farloop.monitoring.units import is_digits
from farloop.node.data.corpus import (
    Corpus,
    EvaluationSet,
    check_tokenizers,
    data_name,
    load_corpus,
    load_mixture,
    num_samples,
)
from farloop.node.errors import CorpusError, ModelError
from farloop.node.model.built_in import build, config_json
from farloop.node.model.named import (
    config_text,
    factory_weights,
    has_weights,
    hf_model,
    hf_weights,
    model_folder,
    taken,
)
from farloop.node.settings import HF, OWN, PRESETS, VOCABULARY, DataConfig, check_model_name, is_factory
from farloop.node.trainer import evaluation_name
from farloop.quant.blob import typical_bytes
from farloop.quant.codec_checks import check_codecs
from farloop.quant.digest import finite_digest
from farloop.quant.errors import NonFiniteError
from farloop.quant.registry import codec_named
from farloop.quant.spelling import downlink_spelling
from farloop.wire.bounds import MOST_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    config: RunConfig
    vocabulary: int  # different tokens of the data
    spec: RunSpec
    notes: list[str]  # derived settings worth telling the user
    evaluation: EvaluationSet | None

    @property
    def anchors(self) -> list[Tensor]:
        """Of version 0, fp32 [numel] each. Read or drawn anew every time: a plan outlives them, and a restart needs
        their digests alone."""
        tensors, _ = _first_weights(self.config, self.vocabulary)
        return [first_anchor(fragment, tensors) for fragment in self.spec.identity.layout.fragments]


def plan_run(config: RunConfig, data: DataConfig, corpus: Corpus | None = None, *, weights: bool = True) -> Plan:
    """Everything the nodes must agree on. `corpus`: that of `data`, if already loaded.
    `weights`: False takes names and shapes alone of a model hf:…, however large; the digests of its anchors are 0 then.
    Raises ValueError: a setting is out of range, one sentence. Raises CorpusError: there is no text to train on."""
    method = method_named(config.method)
    given = not loops_bring_data(config) or data.path is not None or data.mixture is not None
    corpora = _corpora(config, data, corpus) if given else []
    vocabulary = corpora[0].vocabulary if corpora else VOCABULARY
    tensors, model = _first_weights(config, vocabulary, weights=weights)
    statistic = next(filter(is_statistic, tensors), None)
    if statistic is not None and config.buffers == "own":
        raise ValueError(f"buffers is own, but the first weights have {statistic!r}: take average, or leave it out")
    if statistic is None and config.buffers == "average":
        raise ValueError("buffers is average, but the first weights have no running_mean or running_var: take own")
    layout = partition(
        [(name, tuple(tensor.shape)) for name, tensor in tensors.items()],
        pattern=method.pattern,
        blocks_per_fragment=config.blocks_per_fragment,
        stages=_stages(config.stages),
    )
    if config.bytes_goal is not None:
        config = dataclasses.replace(config, h=_h_for(config.bytes_goal, config, method, layout))
    has_matrices = any(is_muon_matrix(name, tensor.shape) for name, tensor in tensors.items())
    terms, notes = terms_of(config, method, slots=layout.slots, has_matrices=has_matrices)
    check(terms, layout)
    check_codecs(terms)
    held = not any(tensor.is_meta for tensor in tensors.values())
    digests = tuple(_first_digest(fragment, tensors) if held else 0 for fragment in layout.fragments)
    del tensors
    evaluation, corpus_digest, samples = None, OWN, 0
    own_evaluation = "none" if config.evaluate_every_rounds is None else OWN  # by `join(evaluate=...)` of nodes' loops
    _check_phases(terms, data, brings_data=given)
    if not loops_bring_data(config):
        evaluation = EvaluationSet(
            corpora[0], sequences=config.evaluation_sequences, sequence_tokens=config.sequence_tokens
        )
        if len(evaluation) < config.evaluation_sequences:
            room = f"the validation text has room for {len(evaluation)} sequences, not {config.evaluation_sequences}"
            notes.append(f"{room}: evaluations use these")
    if corpora:
        corpus_digest, samples = data_name(corpora), num_samples(corpora[0], config.sequence_tokens)
    elif data.digest is not None and data.samples is not None:
        corpus_digest, samples = data.digest, data.samples
    identity = Identity(
        name=config.name,
        model=model,
        layout=layout,
        anchor_digests=digests,
        data=corpus_digest,
        num_samples=samples,
        evaluation_set=evaluation_name(evaluation) if evaluation else own_evaluation,
        seed=config.seed,
    )
    return Plan(
        config=config,
        vocabulary=vocabulary,
        spec=RunSpec(identity=identity, terms=terms),
        notes=notes,
        evaluation=evaluation,
    )


_BESIDE_BLOBS = 1.05  # control messages, and numbers that are less even than Gaussian ones in long rounds


def _h_for(goal: float, config: RunConfig, method: Method, layout: Layout) -> int:
    """Rounds that move so many times fewer bytes than 8 a parameter and step, the flush counted. Raises ValueError:
    there are none, or h is given or fixed."""
    if config.h is not None or "h" in method.fixed:
        raise ValueError(f"bytes_goal chooses h, which is {config.h or method.h} already: leave one of them out")
    if config.h_rule != "constant":
        raise ValueError(f"bytes_goal needs rounds of one length, but h_rule is {config.h_rule}: leave one out")

    def typical(spelling: str) -> float:
        return sum(typical_bytes(codec_named(spelling), fragment) for fragment in layout.fragments)

    own = [typical(codec) for _, codec in given_as("codec_up_of", config.codec_up_of or "", ())][: config.nodes]
    up = (sum(own) + (config.nodes - len(own)) * typical(config.codec_up or method.codec_up)) / config.nodes
    sent = _BESIDE_BLOBS * (up + typical(downlink_spelling(config.codec_down or method.codec_down)))
    usual = 8.0 * layout.num_parameters * config.steps
    most = usual / (2 * sent)  # a round, and the flush
    if not 0.0 < goal <= most:
        raise ValueError(
            f"bytes_goal is {goal:g}; a run of {config.steps} steps takes numbers above 0, to {math.floor(most)}"
        )
    return max(layout.slots, math.ceil(config.steps / (usual / (goal * sent) - 1)))


def _first_digest(fragment: Fragment, tensors: Mapping[str, Tensor]) -> int:
    """Of the anchor of version 0. Raises ValueError: a weight is no finite number."""
    try:
        return finite_digest(first_anchor(fragment, tensors))
    except NonFiniteError as error:
        name = fragment.tensor_at(error.index)
        raise ValueError(f"the first weights have NaN or Inf in {name!r}: begin from other weights") from None


def _check_phases(terms: Terms, data: DataConfig, *, brings_data: bool) -> None:
    """Each re-warm with a replay needs its text, and vice versa. Raises ValueError, one sentence."""
    brought, texts = len(arrivals(terms.schedule.lr)), len(data.phases or ())
    if not brings_data and brought:
        raise ValueError("rewarms: one has a replay, but with init the nodes' own loops bring the data: leave it out")
    if brings_data and brought != texts:
        named = f"{texts} text{'' if texts == 1 else 's'}"
        raise ValueError(
            f"rewarms: {brought or 'none'} with a replay (as 600:1e-3:0.05, where 5 % of the samples stay those from "
            f"before), but [data] phases names {named}; every such re-warm brings one"
        )


def _corpora(config: RunConfig, data: DataConfig, corpus: Corpus | None) -> list[Corpus]:
    """The run's data, and those of each re-warm that brings some. Raises CorpusError."""
    if corpus is None and data.mixture is not None:
        with _errors_about("mixture"):
            corpus = load_mixture(data.mixture, max_bytes=data.max_bytes)
    corpora = [corpus or load_corpus(data.path, max_bytes=data.max_bytes)]
    with _errors_about("phases"):
        for path in data.phases or ():
            corpora.append(load_corpus(path, max_bytes=data.max_bytes))
            with _errors_about(path):
                num_samples(corpora[-1], config.sequence_tokens)
        check_tokenizers(corpora)
    return corpora


@contextmanager
def _errors_about(what: str | Path) -> Iterator[None]:
    try:
        yield
    except CorpusError as error:
        raise CorpusError(f"{what}: {error}") from error


def _stages(text: str | None) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(map(is_digits, words)):
        raise ValueError(f"[run] stages: expected the first block of every stage but the first, as 4,8, got {text!r}")
    return tuple(map(int, words))


def _first_weights(config: RunConfig, vocabulary: int, *, weights: bool = True) -> tuple[Mapping[str, Tensor], str]:
    """Named tensors of version 0, and how the identity names the model. Raises ValueError, one sentence.

    `vocabulary`: that of the data; a built-in model takes it.
    """
    try:
        check_model_name(config.model)
        if config.model.startswith(HF):
            return _weights_of_hf(config, config_text(config.model), vocabulary, weights=weights)
        if config.init is not None:
            return _weights(config.init, _tensors_in(config.init)), OWN
        if is_factory(config.model):
            return factory_weights(config.model, config.seed, vocabulary, statistics=config.buffers == "average"), OWN
    except ModelError as error:
        raise ValueError(f"[run] model: {error}") from error
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("[run]") else f"[run] model: {error}") from error
    size = dataclasses.replace(PRESETS[config.model], vocabulary=vocabulary)
    if config.sequence_tokens > size.context:
        raise ValueError(
            f"[run] sequence_tokens: {config.model} reads at most {size.context}, not {config.sequence_tokens}"
        )
    with torch.no_grad():
        module = build(size, config.seed)
    return {name: parameter.detach() for name, parameter in trainable_tensors(module)}, config_json(size)


def _weights_of_hf(config: RunConfig, text: str, vocabulary: int, *, weights: bool) -> tuple[Mapping[str, Tensor], str]:
    """As `hf_weights`, of the model in an identity's text. Raises ModelError or ValueError."""
    named = hf_model(text)
    named.check(vocabulary, config.sequence_tokens)
    if not weights:
        return dict(trainable_tensors(named.module)), text  # on the meta device: names and shapes
    if config.init is None:
        folder = model_folder(config.model)
        return hf_weights(text, folder if has_weights(folder) else None, config.seed)
    if config.init.is_dir() and has_weights(config.init):
        return hf_weights(text, config.init, config.seed)
    held, text = taken(text, _tensors_in(config.init), f"[run] init: {config.init}")
    for name, shape in ((name, tuple(parameter.shape)) for name, parameter in trainable_tensors(named.module)):
        if name not in held or tuple(held[name].shape) != shape:
            found = f"has shape {tuple(held[name].shape)}" if name in held else "is missing"
            raise ValueError(f"[run] init: {config.init}: the model's {name!r} of shape {shape} {found}")
    return _weights(config.init, held), text


def _tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of a folder of them, mapped. Raises ValueError, SafetensorError.

    Of a folder, an output layer that is a copy of the embedding is left out: it is the second name of a tied tensor.
    """
    if path.is_file():
        return {plain_name(name): tensor for name, tensor in load_file(path).items()}
    if not path.is_dir():
        raise ValueError(f"[run] init: there is no file {path}")
    index = path / "model.safetensors.index.json"
    files = sorted(path.glob("*.safetensors"))
    if index.is_file():
        try:
            files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"[run] init: {index} is no index of safetensors files: {error}") from error
    if not files:
        raise ValueError(f"[run] init: the folder {path} holds no safetensors files")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"[run] init: {index.name} names {file.name}, which is not in {path}")
        tensors |= {plain_name(name): tensor for name, tensor in load_file(file).items()}
    for name in [name for name in tensors if name in ("lm_head.weight", "output.weight")]:
        first = next((other for other in tensors if "embed" in other or other.endswith("wte.weight")), name)
        if first != name and torch.equal(tensors[first], tensors[name]):
            del tensors[name]
    return tensors


def _weights(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `path`. Raises ValueError for one that is not in floating point."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"[run] init: {path}: {name!r} is {str(tensor.dtype).removeprefix('torch.')}, expected floating "
                "point: save those that are trained, without counters or masks, and not quantised"
            )
    return tensors


def planned(file: RunFile, *, weights: bool = True) -> Plan:
    """The run that the file describes. Takes seconds: it reads the data and builds the model. `weights`: as `plan_run`.
    Raises ConfigError: the run is invalid; the line names the key if possible."""
    settings, run = file.settings, file.run
    if run.batch_sequences > (most := MOST_TOKENS // max(1, run.sequence_tokens)):
        what = f"{run.batch_sequences} of {run.sequence_tokens} tokens are too many for one step; the most is {most}"
        raise settings.error("run", "batch_sequences", what)
    try:
        plan = plan_run(run, file.data, weights=weights)
    except CorpusError as error:
        key, _, sentence = str(error).partition(": ")
        if key not in ("phases", "mixture"):
            key, sentence = "path", str(error)
        raise settings.error("data", key, sentence) from error
    except SafetensorError as error:
        raise settings.error("run", "init", f"{run.init} is not a safetensors file: {error}") from error
    except ValueError as error:
        raise about_run(settings, str(error)) from error
    _check_counts(settings, plan)
    return plan


def _check_counts(settings: Settings, plan: Plan) -> None:
    """The data have as many sequences as the run asks for at a time. Raises ConfigError."""
    samples, batch = plan.spec.identity.num_samples, plan.spec.terms.inner.batch_sequences
    if plan.evaluation is None:
        return
    if batch > samples:
        what = f"the training text has {samples} sequences, and a step would repeat some; the most is {samples}"
        raise settings.error("run", "batch_sequences", what)
    wanted, found = settings.by_name["run", "evaluation_sequences"], len(plan.evaluation)
    if wanted.given is not None and wanted.value > found:
        what = f"the validation text has room for {found} sequences, not {wanted.value}; the most is {found}"
        raise settings.error("run", "evaluation_sequences", what)
