"""Models by name: an architecture of Hugging Face by its config.json, or a user's own code by `package.module:factory`.

Either side of a run builds the module itself. A run that names `hf:FOLDER` carries the text of the folder's config.json
(without what would load code, or other weights) and the values of saved tensors that are not trained, as the biases of
routers: nodes need neither the folder nor the hub. A factory is Python code, so each machine names it in its own
settings, and the run says no more than that the model is its nodes' own. Weights come from the run in both cases: the
coordinator reads or draws those of version 0.
"""

import base64
import difflib
import importlib
import inspect
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from farloop.algo.fragments import kept_ties, plain_name, statistics_of, trainable_tensors
from farloop.algo.spec import Identity
from farloop.node.errors import ModelError
from farloop.node.model.built_in import build, from_json
from farloop.node.settings import HF, OWN, PRESETS, is_factory

_log = logging.getLogger(__name__)


LossOf = Callable[[nn.Module, Tensor], Tensor]
"""(module, tokens int64 [B, S]) → a scalar. The module may be wrapped: it is called, not looked into."""

_EXTRA = "pip install farloop[hf]"
_FLOAT: Final = "__float__"  # under which transformers writes Infinity, which JSON has not
_DROPPED: Final = frozenset(
    {"auto_map", "quantization_config", "attn_implementation", "experts_implementation", "use_kernels"}
    | {"torch_dtype", "dtype", "transformers_version"}
)
"""Keys of a config.json that name code, kernels or number formats, or change with the version that wrote it."""

_FIXED: Final = "tensors_not_trained"
"""Key of an identity's text: frozen parameters and saved buffers that a new model has otherwise, as the base64 of a
safetensors file."""
_MOST_FIXED: Final = 256 << 10  # bytes: a spec is one message


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A module and how it is trained."""

    module: nn.Module
    loss: LossOf
    vocabulary: int | None  # different tokens that it reads; None if unknown
    context: int | None  # longest sequence, in tokens; None if unknown
    config: Any = None  # of a model hf:…, that of transformers

    def check(self, tokens: int, sequence_tokens: int) -> None:
        """Raises ModelError: the data have `tokens` different tokens, or longer sequences than the model reads."""
        if self.vocabulary is not None and self.vocabulary < tokens:
            raise ModelError(
                f"the model reads {self.vocabulary} different tokens and the data have {tokens}: take a model with a "
                f"vocabulary of at least {tokens}"
            )
        if self.context is not None and self.context < sequence_tokens:
            raise ModelError(
                f"the model reads at most {self.context} tokens, the run's sequences have {sequence_tokens}"
            )


def causal_lm_loss(module: nn.Module, tokens_BS: Tensor, balance: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats per token, in fp32, of predicting all of [B, S] but the first column.

    The module returns logits [B, T, V], or has them as `.logits` of what it returns. Where gradients are taken,
    `balance` times its `.aux_loss` is added.
    """
    out = module(tokens_BS[:, :-1])
    logits_BTV = out if isinstance(out, Tensor) else out.logits
    loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BS[:, 1:].flatten())
    if not balance or not torch.is_grad_enabled():
        return loss
    aux = getattr(out, "aux_loss", None)  # None: not every model has it
    return loss if aux is None else loss + balance * aux


def _loss_for(module: nn.Module) -> LossOf:
    """With the loss that balances experts, where a config of transformers asks for it."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    balance = getattr(text, "router_aux_loss_coef", 0.0) if getattr(text, "output_router_logits", False) else 0.0
    return partial(causal_lm_loss, balance=balance) if balance else causal_lm_loss


# --- Names


def model_folder(name: str) -> Path:
    """The folder of `hf:…`: itself, or that of a model that was downloaded before. Raises ModelError."""
    path = Path(name.removeprefix(HF)).expanduser()
    if not path.is_dir() and not path.is_absolute() and str(path).count("/") <= 1:
        hub: Any = _imported("huggingface_hub")
        try:
            path = Path(hub.snapshot_download(str(path), local_files_only=True))
        except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError):
            raise ModelError(
                f"{name}: there is no such folder here, and no model of this name was downloaded: take the path of a "
                f"folder with a config.json, or once download the model with: hf download {path}"
            ) from None
    if not path.is_dir():
        raise ModelError(f"{name}: there is no folder {path}")
    if not (path / "config.json").is_file():
        raise ModelError(f"{name}: the folder {path} holds no config.json, which says what the model is")
    return path


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights that can be read: safetensors files. Raises ModelError for others."""
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return True
    if others := sorted(
        path.name for pattern in ("pytorch_model*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    ):
        raise ModelError(f"{folder} holds weights as {others[0]}, which is pickled: convert them to safetensors")
    return False


# --- Hugging Face


def config_text(name: str) -> str:
    """How an identity names the model `hf:…`: the text of its config.json, made canonical. Raises ModelError."""
    file = model_folder(name) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError(f"{file} names no architecture: it has no model_type")
    if values.get("quantization_config"):
        raise ModelError(f"{file}: the weights are quantised, and training needs plain ones: take the model in bf16")
    return HF + json.dumps(_portable(values), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _portable(values: Any) -> Any:
    if isinstance(values, list):
        return [_portable(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return {_FLOAT: "NaN" if math.isnan(values) else "Infinity" if values > 0.0 else "-Infinity"}
    if not isinstance(values, dict):
        return values
    kept = [k for k in values if (k == _FLOAT or not k.startswith("_")) and k not in _DROPPED]
    return {k: _portable(values[k]) for k in kept}


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ModelError(f"a model hf:… needs the package {package}, which cannot be imported: {_EXTRA}") from error


def _config(text: str) -> Any:
    """The configuration in an identity's text. Code of others is never loaded. Raises ModelError."""
    transformers, hub = _imported("transformers"), _imported("huggingface_hub")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    values = _portable(json.loads(text.removeprefix(HF)))
    values.pop(_FIXED, None)
    kind, known = values["model_type"], transformers.CONFIG_MAPPING
    if kind not in known:
        close = difflib.get_close_matches(kind, list(known.keys()), n=1)
        raise ModelError(
            f"transformers {transformers.__version__} knows no architecture {kind!r}"
            f"{f'; did you mean {close[0]}?' if close else '; a newer version may'}"
        )
    try:
        config = known[kind].from_dict(
            json.loads(
                json.dumps(values, allow_nan=False),
                object_hook=lambda held: float(held[_FLOAT]) if _FLOAT in held else held,
            )
        )
    except (ValueError, TypeError, LookupError, AttributeError, hub.errors.StrictDataclassError) as error:
        raise ModelError(f"the config.json of a {kind} model cannot be used: {_one_line(error)}") from error
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{kind} is no causal language model, as transformers {transformers.__version__} has it")
    config.use_cache = False  # training has none
    return config


def _made(config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A new module, in this number type where the architecture names no other. Raises ModelError."""
    transformers = _imported("transformers")
    try:
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"the {config.model_type} model of this config.json cannot be built: {_one_line(error)}"
        ) from error
    return module.train()


def hf_model(text: str) -> NamedModel:
    """The model of an identity's text, with what is not trained, and parameters without memory (`materialise_`).

    Raises ModelError.
    """
    config = _config(text)
    with _parameters_on_meta():
        module = _made(config)
    materialise_(module, torch.device("cpu"), frozen=True)
    if kept := json.loads(text.removeprefix(HF)).get(_FIXED):
        here = _not_trained(module)
        for name, value in load(base64.b64decode(kept)).items():
            if name not in here or here[name].shape != value.shape:
                raise ModelError(f"the run has a {name!r} that is not trained, and this version of transformers not")
            here[name].data.copy_(value)
    read: Any = module
    return NamedModel(
        module=module,
        loss=_loss_for(module),
        vocabulary=int(read.get_input_embeddings().weight.shape[0]),
        context=getattr(config.get_text_config(), "max_position_embeddings", None),
        config=config,
    )


def _not_trained(module: nn.Module) -> dict[str, Tensor]:
    """Its frozen parameters and saved buffers, by name."""
    return {name: t for name, t in module.state_dict(keep_vars=True).items() if not t.requires_grad}


def hf_weights(text: str, folder: Path | None, seed: int) -> tuple[dict[str, Tensor], str]:
    """Weights of version 0 by name, fp32, tied ones once, and the text with the values of what is not trained. From a
    folder's safetensors files, or drawn from the seed.

    Raises ModelError: the folder's weights are not those of the model.
    """
    config = _config(text)
    if folder is None:
        with _drawn(seed):
            return taken(text, _made(config).state_dict(), "")
    transformers = _imported("transformers")
    try:
        module, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # told below, by name
            output_loading_info=True,
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the weights in {folder} cannot be read: {_one_line(error)}") from error
    for problem, names in (("lack", report["missing_keys"]), ("have another shape of", report["mismatched_keys"])):
        if names:
            first = min(str(name[0] if isinstance(name, tuple) else name) for name in names)
            raise ModelError(f"the weights in {folder} {problem} {first!r}, and {len(names) - 1} more")
    held, fixed = module.state_dict(), _not_trained(module)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as kept:
            for name in held.keys() & set(kept.keys()):
                if name in fixed:
                    held[name] = kept.get_tensor(name)  # the library may have written over it since (ZAYA)
                elif "F" not in (dtype := kept.get_slice(name).get_dtype()):
                    raise ModelError(f"{file} has {name!r} as {dtype}: expected weights in floating point")
    return taken(text, held | dict.fromkeys(report["unexpected_keys"]), f"{folder}")


def taken(text: str, held: Mapping[str, Any], where: str) -> tuple[dict[str, Tensor], str]:
    """Of tensors by their names in the model: those that are trained, and the text with the values of the others.

    Raises ModelError: the model has not all of them, or those that are not trained are too large for a run's text.
    """
    module = hf_model(text).module
    if more := sorted(held.keys() - module.state_dict().keys()):
        names = ", ".join(map(repr, more[:8])) + (f" and {len(more) - 8} others" if len(more) > 8 else "")
        raise ModelError(f"{where} has {len(more)} tensors that the model has not: {names}: take them out")
    fixed = dict[str, Tensor]()
    for name in (new := _not_trained(module)).keys() & held.keys():
        fixed[name] = held[name].detach().to(new[name].dtype, copy=True).contiguous()
        if fixed[name].shape != new[name].shape:
            raise ModelError(f"{where} has {name!r} of another shape than the model's {tuple(new[name].shape)}")
        if torch.equal(fixed[name], new[name]):
            del fixed[name]
    if len(data := save(fixed)) > _MOST_FIXED:
        raise ModelError(
            f"{where} has {len(data)} bytes in tensors that are not trained, as {min(fixed)!r}: a run carries at most "
            f"{_MOST_FIXED}. Build the model in a function of your own, as package.module:factory"
        )
    if fixed:
        values = json.loads(text.removeprefix(HF)) | {_FIXED: base64.b64encode(data).decode()}
        text = HF + json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {name: held[name].detach() for name, _ in trainable_tensors(module) if name in held}, text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) + (" is missing" if isinstance(error, LookupError) else "")


# --- Factories


def factory_model(name: str) -> NamedModel:
    """What `package.module:factory` returns, on the CPU. Raises ModelError.

    Its loss is the factory's attribute `loss`, or a function `loss` of the same Python module: (module, tokens) →
    scalar. Without one it is `causal_lm_loss`.
    """
    where, _, attribute = name.partition(":")
    try:
        code = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise ModelError(f"{name}: {where} imports {error.name}, which is not installed here") from error
        raise ModelError(
            f"{name}: there is no Python module {error.name} here: install it, or put its folder on PYTHONPATH"
        ) from None
    factory = getattr(code, attribute, None)
    if not callable(factory):
        raise ModelError(f"{name}: {where} has no function {attribute}")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ModelError(f"{name}: {attribute} cannot be called without arguments: {error}") from None
    module = factory()
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name}: {attribute}() returned a {type(module).__name__}, not a torch.nn.Module")
    loss = getattr(factory, "loss", None) or getattr(code, "loss", None) or _loss_for(module)
    if not callable(loss):
        raise ModelError(f"{name}: its loss is a {type(loss).__name__}, not a function (module, tokens)")
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    return NamedModel(module=module.train(), loss=loss, vocabulary=max(rows, default=None), context=None)


def factory_weights(name: str, seed: int, tokens: int, *, statistics: bool = False) -> dict[str, Tensor]:
    """Weights of version 0 by name: those of a new module, drawn from the seed; with its running `statistics`.

    Raises ModelError, also if the module reads fewer than `tokens` different tokens.
    """
    with _drawn(seed):
        named = factory_model(name)
    named.check(tokens, 0)
    weights = {name: parameter.detach() for name, parameter in trainable_tensors(named.module)}
    return weights | (statistics_of(named.module) if statistics else {})


# --- Both


def model_of_run(identity_model: str, seed: int, own: str = "") -> NamedModel:
    """The model that a node trains. `own`: the node's own name for it, which goes before what the run says.

    Raises ModelError: it cannot be built, or the run says only that it is the nodes' own.
    """
    if own in PRESETS:
        return _built_in(PRESETS[own], seed)
    if own and is_factory(own):
        return factory_model(own)
    if own and not own.startswith(HF):
        raise ModelError(f"{own!r} is neither hf:FOLDER nor package.module:factory, nor a built-in model")
    if own:
        named, folder = hf_model(text := config_text(own)), model_folder(own)
        held = has_weights(folder) and _not_trained(named.module)
        return hf_model(hf_weights(text, folder, seed)[1]) if held else named
    if identity_model.startswith(HF):
        return hf_model(identity_model)
    if identity_model == OWN:
        raise ModelError(
            "the run's model is its nodes' own: name it in this node's file, as [node] model = "
            '"package.module:factory" or "hf:FOLDER"'
        )
    return _built_in(from_json(identity_model), seed)


# --- A trained model as files that other tools load

_TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
)


def save_weights(
    identity: Identity,
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype,
    shard_size: str,
    own: str = "",
) -> list[str]:
    """Write a run's weights by name, and with the config.json of a model hf:…, into an empty folder. Returns the names
    of an own model's buffers that its state dict has and the run has not.

    A model with a method `save_pretrained` writes itself, so tensors have the names that are published for it. Files of
    any other have those of the run.

    Args:
        dtype: of the written weights.
        shard_size: largest file that `save_pretrained` writes, as "5GB".
        own: the model of a run with an own one, as on its nodes; none writes the weights alone.

    Raises:
        ModelError: the model cannot be built, or has other parameters than the run.
        OSError: a file cannot be written.
    """
    if re.fullmatch(r"[1-9][0-9]*(KB|MB|GB)", shard_size) is None:
        raise ModelError(f"a size of files is a number with KB, MB or GB, as 5GB, not {shard_size!r}")
    named = model_of_run(identity.model, 0, own) if own or identity.model.startswith(HF) else None
    writer: Any = named.module if named is not None else None
    if writer is not None:
        fill_(writer, weights)
    if named is None or not hasattr(writer, "save_pretrained"):
        tensors = {name: tensor.to(dtype) for name, tensor in weights.items()}
        try:
            save_file(tensors, folder / "model.safetensors", {"format": "pt", "model": identity.model})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        return _buffers(named, weights)
    _cast_(writer, dtype, named.config)
    config: Any = getattr(writer, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = True
    if hasattr(type(writer), "can_generate") and writer.can_generate():
        _save_generation(writer.generation_config, folder)
    writer.save_pretrained(folder, max_shard_size=shard_size)
    return _buffers(named, weights)


def _buffers(named: NamedModel | None, weights: Container[str]) -> list[str]:
    fixed = {} if named is None or named.config is not None else _not_trained(named.module)
    buffers = [name for name, t in fixed.items() if t.is_floating_point() and not isinstance(t, nn.Parameter)]
    return [name for name in buffers if name not in weights]


def _cast_(module: Any, dtype: torch.dtype, config: Any) -> None:
    """To a number type, but for what the architecture keeps in fp32, as `from_pretrained(dtype=…)` has it.
    `config`: of a model hf:…."""
    kept, made = "", dict[str, Tensor]()
    if hasattr(module, "_get_dtype_plan"):
        kept = "|".join(name.replace("*", ".*") for name in module._get_dtype_plan(dtype))
    if config is not None:
        with _parameters_on_meta():
            made = _made(config, dtype).state_dict()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point():
            stays = kept and re.search(kept, name)
            tensor.data = tensor.data.to(torch.float32 if stays else made[name].dtype if name in made else dtype)


def _save_generation(config: Any, folder: Path) -> None:
    """One that has settings of sampling and does not say whether to sample is made to: transformers refuses to save it.

    Raises ModelError: it contradicts itself otherwise.
    """
    try:
        config.save_pretrained(folder)
    except ValueError as error:
        if config.do_sample is not None:
            why = " ".join(line.strip(" -") for line in str(error).splitlines()[1:2]) or error
            raise ModelError(f"the generation_config cannot be saved: {why} Set it where the model is built") from error
        config.do_sample = True
        _save_generation(config, folder)


def fill_(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Make a run's weights, by name, those of a module on the CPU, whose parameters may have no memory yet. They may
    stay in that of `weights`.

    Raises ModelError: the module has other parameters.
    """
    here = _exchanged(module, weights)
    if odd := sorted(here.keys() ^ weights.keys()):
        whose = "the run" if odd[0] in weights else "this model"
        raise ModelError(
            f"{whose} alone has {odd[0]!r}, one of {len(odd)} such parameters: name the model of its nodes"
        )
    materialise_(module, torch.device("cpu"))
    with kept_ties(module):
        for name, parameter in _exchanged(module, weights).items():
            if parameter.shape != weights[name].shape:
                shapes = f"{tuple(parameter.shape)} here, {tuple(weights[name].shape)} in the run"
                raise ModelError(f"parameter {name!r} has shape {shapes}")
            held = weights[name]
            alike = parameter.stride() == held.stride()
            parameter.data = held if alike else held.new_empty_strided(held.shape, parameter.stride()).copy_(held)


def _exchanged(module: nn.Module, weights: Container[str]) -> dict[str, Tensor]:
    """What of a module is exchanged, with running statistics if the run has them."""
    return {**dict(trainable_tensors(module)), **statistics_of(module, weights)}


def save_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer.json, or the files of a folder's tokenizer. Raises ModelError: there is none; OSError."""
    if source.is_dir():
        found = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
        if not found:
            raise ModelError(f"the folder {source} holds no tokenizer, as a tokenizer.json")
        for file in found:
            shutil.copyfile(file, folder / file.name)
        return
    if not source.is_file():
        raise ModelError(f"there is no tokenizer {source}")
    shutil.copyfile(source, folder / "tokenizer.json")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, allow_nan=False), encoding="utf-8")


def _built_in(config: Any, seed: int) -> NamedModel:
    module = build(config, seed)
    return NamedModel(module=module, loss=causal_lm_loss, vocabulary=config.vocabulary, context=config.context)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters of modules that are made inside have no memory, but those that are frozen; buffers are computed."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and parameter.requires_grad:
            parameter = nn.Parameter(parameter.to("meta"))
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialise_(module: nn.Module, device: torch.device, *, frozen: bool = False) -> None:
    """Give memory to the parameters that have none, zeros, and move the others there; tied parameters stay tied.
    `frozen`: to the frozen ones alone."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta and not (frozen and parameter.requires_grad):
                zeros = made.get(id(parameter))
                if zeros is None:
                    data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
                    zeros = made[id(parameter)] = parameter, nn.Parameter(data, parameter.requires_grad)
                part._parameters[name] = zeros[1]
    if not frozen:
        with kept_ties(module):
            module.to(device)


class _PortableNormal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`normal_` draws uniform numbers of the same mean and deviation: torch's normal ones differ from CPU to CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.normal_.default:
            return func(*args, **(kwargs or {}))
        tensor, mean, std = (*args, 0.0, 1.0)[:3] if len(args) == 1 else (*args, 1.0)[:3]
        generator = (kwargs or {}).get("generator")
        return tensor.uniform_(generator=generator).sub_(0.5).mul_(2 * 3**0.5 * std).add_(mean)


@contextmanager
def _drawn(seed: int) -> Iterator[None]:
    """Random numbers on the CPU are a function of the seed alone; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]), _PortableNormal():  # type: ignore[no-untyped-call]
        torch.default_generator.manual_seed(seed)
        yield


# --- Blocks: the parts of a model that are repeated


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The numbered parts of the model, as `fragments.partition` finds them: the first number in a parameter's name."""
    paths: dict[str, None] = {}
    for name, _ in module.named_parameters():
        parts = plain_name(name).split(".")
        place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if place is not None:
            paths[".".join(parts[: place + 1])] = None
    return [module.get_submodule(path) for path in paths]


def checkpoint_blocks_(module: nn.Module) -> None:
    """Each block keeps its inputs alone for the backward pass, and computes the rest again. No name changes."""
    for block in blocks_of(module):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def shard_blocks_(module: nn.Module, device: torch.device, ranks: int, computes: torch.dtype | None = None) -> None:
    """Shard every block, then the rest, over all ranks (`fully_shard`). No rank holds more than one whole block.

    Shards stay fp32. `computes`: the number type of the whole blocks that they are gathered to; fp32 unless given.
    Gradients are averaged in fp32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=None if computes is None else torch.float32)
    mesh = init_device_mesh(device.type, (ranks,))
    for block in blocks_of(module):
        materialise_(block, device)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    materialise_(module, device)
    fully_shard(module, mesh=mesh, mp_policy=policy)
