"""The words of `farloop bench quality`: how a variant, a setting and a knob are spelled. Nothing is run here."""

import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farloop.algo.methods import METHODS
from farloop.cli.exit_codes import CommandError

if TYPE_CHECKING:
    from farloop.bench.tuning import Knob

SINGLE = "single"
"""Spells a node that trains alone; its averaging with itself changes nothing."""

_SINGLE = {
    "method": "diloco",
    "nodes": 1,
    "codec_up": "fp32",
    "codec_down": "fp32",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
}

SAME_FOR_ALL = frozenset({"name", "seed", "init", "model", "sequence_tokens", "evaluation_sequences"})
"""Settings that decide the first weights, the samples and what is evaluated: runs that differ in them are no pairs."""

_OTHER_NAMES = {"peak_lr": ("lr",), "codec": ("codec_up", "codec_down")}


def parse_variant(spelled: str, *, fixed: Collection[str] = SAME_FOR_ALL) -> dict[str, Any]:
    """`streaming nodes=4 codec=q4`, `q4r:step=0.7/q4 h=15`: fields of `RunConfig`.

    A variant is a method or `single`, a pair of codecs as UP/DOWN, settings as KEY=VALUE, or several of these. `fixed`
    are settings that a variant may not have. Raises CommandError.
    """
    origin, words = repr(spelled), spelled.split()
    if not words:
        raise CommandError("an empty variant; name a method as streaming, codecs as q4/q4, settings as h=15, or all")
    settings = [word for word in words if "=" in word and not _is_pair(word)]
    pairs = [word for word in words if _is_pair(word)]
    names = [word for word in words if word not in settings and word not in pairs]
    if len(names) > 1:
        raise CommandError(f"{origin}: one method is wanted, not {' and '.join(names)}")
    if len(pairs) > 1:
        raise CommandError(f"{origin}: one pair of codecs is wanted, as q4/q4: up, then down")
    fields = _method_fields(names[0], origin) if names else {}
    for pair in pairs:
        up, _, down = pair.partition("/")
        if not up or not down or "/" in down:
            raise CommandError(f"{origin}: one pair of codecs is wanted, as q4/q4: up, then down")
        fields |= {"codec_up": up, "codec_down": down}
    fields |= run_settings(settings, origin=origin)
    if wrong := sorted(fixed & fields.keys()):
        raise CommandError(f"{origin}: {wrong[0]} is the same for all variants; {_how_for_all(wrong[0])}")
    return fields


def _is_pair(word: str) -> bool:
    """UP/DOWN, and not the path of a KEY=VALUE: a codec has a colon before its first equals sign."""
    before = word.partition("=")[0]
    return "/" in word and ("/" in before or ":" in before or "=" not in word)


def _method_fields(word: str, origin: str) -> dict[str, Any]:
    from farloop.cli.sources import nearest
    from farloop.quant.registry import CODECS

    if word == SINGLE:
        return dict(_SINGLE)
    if word in METHODS:
        return {"method": word}
    if word.partition(":")[0] in CODECS:
        raise CommandError(f"{origin}: codecs are spelled UP/DOWN, as {word}/{word}, or codec={word} for both ways")
    raise CommandError(
        f"{origin}: {word!r} is neither a method nor UP/DOWN, as q4/q4, nor KEY=VALUE, as h=15; "
        f"{nearest(word, [SINGLE, *METHODS])}"
    )


def _how_for_all(name: str) -> str:
    match name:
        case "steps" | "model":
            return f"set it with --{name}"
        case "batch_sequences":
            return "it is --global-batch shared by the nodes"
        case _:
            return "set it with --set"


def run_settings(words: Iterable[str], *, origin: str) -> dict[str, Any]:
    """`h=15` and the like as typed fields of `RunConfig`. Raises CommandError."""
    from farloop.cli.schema import RUN_SCHEMA
    from farloop.cli.sources import Given, nearest

    keys, fields = RUN_SCHEMA["run"], dict[str, Any]()
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise CommandError(f"{origin}: {word!r} is not KEY=VALUE, as h=15")
        for key in _OTHER_NAMES.get(name, (name,)):
            if key not in keys:
                raise CommandError(f"{origin}: a run has no setting {name!r}; {nearest(name, [*keys, *_OTHER_NAMES])}")
            given = Given(section="run", key=key, value=value, origin=origin, is_text=True, folder=Path.cwd())
            fields[key] = keys[key].parse(given)
    return fields


def parse_knobs(words: Iterable[str]) -> "tuple[Knob, ...]":
    """`outer_lr=0.2,0.4,0.6`: what to try, in rising order. Raises CommandError."""
    from farloop.bench.tuning import Knob
    from farloop.cli.schema import RUN_SCHEMA
    from farloop.cli.sources import nearest

    numbers = [name for name, key in RUN_SCHEMA["run"].items() if key.kind is float]
    knobs: dict[str, Knob] = {}
    for word in words:
        spelled, separator, text = word.partition("=")
        name = _OTHER_NAMES.get(spelled, (spelled,))[0]
        if not separator or not text:
            raise CommandError(f"--tune {word}: KEY=VALUE,VALUE,… is wanted, as outer_lr=0.2,0.4,0.6")
        if name not in numbers:
            raise CommandError(f"--tune {word}: {spelled} cannot be tuned; {nearest(spelled, [*numbers, 'peak_lr'])}")
        if name in knobs:
            raise CommandError(f"--tune {word}: {name} is given twice; put all its values in one list")
        knobs[name] = Knob(name=name, values=tuple(sorted(_numbers(word, text))))
    return tuple(knobs.values())


def _numbers(word: str, text: str) -> list[float]:
    values = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise CommandError(f"--tune {word}: {part.strip()!r} is not a number, as 0.4 is") from None
        if not math.isfinite(value) or value <= 0.0:
            raise CommandError(f"--tune {word}: {part.strip()} cannot be tried; a number above 0 is wanted")
        if value in values:
            raise CommandError(f"--tune {word}: {part.strip()} is given twice; once is enough")
        values.append(value)
    return values


def check_device(name: str) -> None:
    """Raises CommandError unless the device is there."""
    import torch

    if name not in ("cpu", "cuda"):
        raise CommandError(f"--device is cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: torch finds no GPU here; take cpu")
