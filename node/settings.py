"""What is local to a node, and the names that settings have for models and data. Loads no torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, get_args

from farloop.monitoring.addresses import check_listening, check_tcp_listening, parse_each_tcp, parse_host_port
from farloop.monitoring.tcp_connection import check_congestion
from farloop.monitoring.units import TIME, AtLeast, OneOf, check_duration, nearest
from farloop.node.machine_info import parse_nics
from farloop.quant.spelling import check_codec
from farloop.wire.keys import check_name
from farloop.wire.limits import check_lanes
from farloop.wire.uplink import UplinkLimit, parse_hours, parse_rate

VOCABULARY = 256  # of data without a tokenizer, where tokens are bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a `GPT`; part of a run's identity (`Identity.model`)."""

    layers: int
    dim: int  # model width D
    heads: int
    hidden: int  # inner width F of the SwiGLU MLP; 8/3 of `dim` gives it the parameters of a plain MLP of 4·D
    context: int  # longest sequence, in tokens
    tied: bool = True  # the output layer is the embedding, transposed: one tensor with one name
    vocabulary: int = VOCABULARY  # that of the data

    def __post_init__(self) -> None:
        for field in ("layers", "dim", "heads", "hidden", "context", "vocabulary"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise ValueError(f"a model's {field} is a whole number of at least 1, not {value!r}")
        if type(self.tied) is not bool:
            raise ValueError(f"a model's tied is true or false, not {self.tied!r}")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim {self.dim} does not split into {self.heads} heads of even width, which rotary positions need"
            )


PRESETS: dict[str, ModelConfig] = {
    # 0.22 M parameters: unit and integration tests.
    "nano": ModelConfig(layers=4, dim=64, heads=2, hidden=176, context=1024),
    # 0.48 M: the quality bench, `farloop lab bench quality`; a batch of 16 × 128 tokens takes 0.10 s on one core.
    "micro": ModelConfig(layers=4, dim=96, heads=3, hidden=264, context=1024),
    # 0.84 M: the demo; forward and backward of 8 × 128 tokens take 68 ms on one core (AMD EPYC, torch 2.13).
    "tiny": ModelConfig(layers=4, dim=128, heads=4, hidden=352, context=1024),
    # 10.7 M: one small GPU.
    "small": ModelConfig(layers=6, dim=384, heads=6, hidden=1024, context=2048),
    # 35 M with a vocabulary of 32 000: the smallest model of arXiv 2501.18512 (`examples/paper-35m.toml`).
    "medium": ModelConfig(layers=6, dim=512, heads=8, hidden=1376, context=2048),
    # 122 M, the size of GPT-2 small, all but 0.2 M of it in layers: 18 of them make six fragments of three.
    "base": ModelConfig(layers=18, dim=768, heads=12, hidden=1920, context=2048),
}


HF: Final = "hf:"
"""Before a folder, the name of a downloaded model, or (in a run's identity) the text of a config.json."""


OWN: Final = "own"
"""In a run's identity: the model that nodes bring."""


def check_model_name(name: str) -> None:
    """Raises ValueError unless it is spelled as a built-in model, hf:… or package.module:factory."""
    if name in PRESETS or (name.startswith(HF) and name != HF):
        return
    where, colon, attribute = name.partition(":")
    if colon and attribute.isidentifier() and all(part.isidentifier() for part in where.split(".")):
        return
    raise ValueError(f"there is no {name!r}; {nearest(name, (*PRESETS, 'hf:FOLDER', 'package.module:factory'))}")


def is_factory(name: str) -> bool:
    """Whether it names Python code."""
    return ":" in name and not name.startswith(HF)


def located(name: str, folder: Path) -> str:
    """The name with its path made absolute, if it is one below `folder`; else as it is."""
    if not name.startswith(HF):
        return name
    path = Path(name.removeprefix(HF)).expanduser()
    is_path = path.is_absolute() or name.startswith((f"{HF}./", f"{HF}../")) or (folder / path).is_dir()
    return f"{HF}{os.path.normpath(folder / path)}" if is_path else name


def check_fingerprint(text: str) -> None:
    """Raises ValueError."""
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise ValueError(f"16 hex digits are a fingerprint, not {text!r}; the coordinator prints it at its start")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of a mixture, as settings name it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    path: Path
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The table `[data]` of a RUN.toml or NODE.toml; both must name the same data."""

    path: Path | None = None
    """Token file (`farloop data build`), text file, JSONL file or folder. Default: the source of Python's standard
    library."""
    mixture: tuple[Share, ...] | None = None
    """Several of these in place of path, and their shares of the samples, e.g. [{path = "wiki.bin", weight = 3},
    {path = "code.bin", weight = 1}]."""
    max_bytes: Annotated[int, AtLeast(1)] = 16_000_000
    """Most bytes to read from each text; a token file is used whole."""
    phases: tuple[Path, ...] | None = None
    """Data like path, one for each re-warm with a replay, in order. The evaluation set stays that of path."""
    digest: str | None = None
    """RUN.toml with init: a name for the dataset of your own loops, which each of them compares."""
    samples: Annotated[int | None, AtLeast(1)] = None
    """With digest: its number of samples."""


Buffers = Literal["same", "own"]
Where = Literal["auto", "host", "device"]
"""Where anchors are kept; on CPUs it is one place. "auto": on the device, once its first steps have shown the room."""


SAVE_EVERY_ROUNDS = 8
"""An anchor is 4 bytes a parameter, and its updates until the next copy 8 times half a byte, with a codec of 4 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What is local to a node."""

    name: Annotated[str, check_name]
    """Unique in the run; with a key, the name of its public key on the coordinator's allow-list."""
    coordinator: Annotated[str, parse_each_tcp] = "tcp://127.0.0.1:7700"
    """The coordinator's address; of several coordinators all, as tcp://a:7700, tcp://b:7700: one leads, and answers."""
    key: Path | None = None
    """Secret key file; turns on encryption."""
    server_key: Path | None = None
    """Public key file of the coordinator. It may hold several keys, one in each line: each is tried."""
    state_dir: Path | None = None
    """Folder for starts, epochs, residuals and anchors. Default: `.farloop/NAME`."""
    save_every_rounds: Annotated[int, AtLeast(0)] = SAVE_EVERY_ROUNDS
    """Rounds between two whole copies of an anchor in `state_dir`, beside which each update is kept: a restarted node
    takes the updates that it missed, and no snapshots. 0: nothing is kept."""
    save_optimizer: bool = True
    """Save the inner optimizer's state beside each of these copies. Off: a restarted node begins with empty moments."""
    fingerprint: Annotated[str | None, check_fingerprint] = None
    """Join only the run with this fingerprint."""
    http: Annotated[str, check_listening] = ""
    """Address of /metrics, /healthz and /readyz on every host of the node, as host:port; empty: none."""
    http_names: str = ""
    """Comma-separated public host names under which these pages may be requested, e.g. oslo.example.com. IP addresses
    and private names are always allowed; * allows any name."""
    data: DataConfig = DataConfig()
    give_up: Annotated[float, TIME] = 0.0
    """Seconds without a session with the coordinator, at the start or later, after which the node ends with code 5. 0:
    never."""
    leave_code: int = 0
    """Exit code after a signal before the run's end: 130 where a supervisor takes 0 for the end of the work, as a
    Kubernetes Job."""
    nproc: Annotated[int, AtLeast(1)] = 1
    """Processes on this host, one per device."""
    restarts: Annotated[int, AtLeast(0)] = 3
    """How often, within an hour of their start, all processes are started again after one of them has died."""
    hang_timeout: Annotated[float, TIME] = 60.0
    """Seconds for which all other processes of the node may wait for one, and at least ten steps, before it counts as
    hanging: all are started again. 0: for ever."""
    hosts: str = "1"
    """Hosts of this node, as 4, or 3:4 to go on with 3 when one is lost. Start the same command on each."""
    rendezvous: Annotated[str, parse_host_port] = ""
    """Where the hosts of this node meet, as HOST:PORT of one of them. Keep the port from others: who reaches it can run
    code on all of them."""
    model: Annotated[str, check_model_name] = ""
    """Your model, as package.module:factory or hf:FOLDER. Default: what the run names. Code is loaded from here alone,
    never because a run says so."""
    microbatch: Annotated[int, AtLeast(0)] = 0
    """Sequences in one forward pass of a process; gradients add up over a batch. 0: all of its part of the batch."""
    checkpoint: bool = False
    """Activation checkpointing: every block keeps its inputs alone and is computed again in the backward pass."""
    compile: bool = False
    """Compile every block with torch.compile."""
    shard: bool = False
    """Shard parameters, gradients and the optimizer over the processes (FSDP2: every block, then the rest)."""
    buffers: Annotated[str, OneOf(get_args(Buffers))] = "same"
    """Of buffers that are not exchanged. same: a node whose saved floating-point ones change, or differ from those of
    the other nodes, ends; own: each node has its own. The run's `buffers` averages those of batch normalisation."""
    anchors: Annotated[str, OneOf(get_args(Where))] = "auto"
    """Where anchors and residuals are kept: in host memory, or on the device, which takes 4 bytes a parameter each
    and saves copies; auto: on the device if two steps leave the room."""
    threads: Annotated[int, AtLeast(0)] = 0
    """CPU threads per process; 0: torch decides."""
    tau: Annotated[int | None, AtLeast(0)] = None
    """Inner steps between a send and its merge on this node. Default: the run's (arXiv 2501.18512)."""
    adapt_tau: bool | None = None
    """Choose `tau` again at every send, from `tau` on: the shortest with which no update comes late because of this
    node's link, as far as rounds have room. Default: where `tau` is open here and in the run, up to a quarter of a
    round."""
    site: str = ""
    """Label of the place; nodes of one site are close to each other. Default: from the labels of the container."""
    address: Annotated[str, parse_each_tcp] = ""
    """Address at which other nodes reach this one, as tcp://host:port; empty: outbound connections only."""
    nics: Annotated[str, parse_nics] = ""
    """Network cards that the machine hides or misreports: `eth0=roce-v2/100gbit, eth1=ethernet`."""
    congestion: Annotated[str, check_congestion] = ""
    """Congestion control of its TCP connections, e.g. bbr. Default: the system's."""
    lanes: Annotated[int, check_lanes] = 0
    """Connections that carry deltas and updates, from 1 to 16. 0: as many as the link is measured to need."""
    bulk_source: str = ""
    """Address of this machine from which deltas leave and on which updates arrive, as 10.0.0.5, where it has
    several. It needs keys. Default: the system's choice, as for control messages."""
    max_uplink: Annotated[str, parse_rate] = ""
    """Most that all sessions send together, as 20mbit, and as much to an object store; empty: as fast as the links."""
    quiet_hours: Annotated[str, parse_hours] = ""
    """Hours of the day, in local time, in which it sends at most `quiet_uplink`, as 08:00-18:00 or 22:00-06:00."""
    quiet_uplink: Annotated[str, parse_rate] = ""
    """Most that it sends in the quiet hours, as 2mbit."""

    @property
    def uplink(self) -> UplinkLimit:
        """What the node may send. Raises ValueError."""
        return UplinkLimit.parse(self.max_uplink, self.quiet_hours, self.quiet_uplink)


Normalise = Literal["visits", "share"]
"""What a stage's gradient sum is divided by.

visits: the microbatches that visited it, so that it is a mean whatever was skipped.
share: those that would visit it if nothing were skipped, as SkipPipe does: a stage that a share ρ of them visits then
takes steps of about ρ of the gradient. Adam hides the difference; plain SGD does not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """What is local to a node that trains one stage of the model."""

    layout: Path | None = None
    """Layout file with stages, paths and addresses, the same on all nodes; this node trains its stage. A file with a
    higher epoch is adopted at the end of a round."""
    bind: Annotated[str, check_tcp_listening] = ""
    """Address to listen on for other stages. Default: that of the layout file."""
    peers: Path | None = None
    """Folder of the public keys of other stages; needs [node] key, and is required beyond loopback."""
    microbatches: Annotated[int, AtLeast(1)] = 4
    """Parts of the batch of a source; each takes its own path."""
    credit: Annotated[int, AtLeast(1)] = 4
    """Most microbatches of a source in flight."""
    memory: Annotated[int, AtLeast(1)] = 16
    """Most inputs that a stage keeps for their backward passes."""
    codec: Annotated[str, check_codec] = ""
    """Codec of activations and gradients between stages, e.g. q8; empty: uncompressed."""
    normalise: Annotated[str, OneOf(get_args(Normalise))] = "visits"
    """Divisor of the gradient of a stage: visits, or share as in SkipPipe (see Pipelines in the docs)."""
    patience_s: Annotated[float, check_duration] = 120.0
    """A microbatch that takes longer is sent again, or dropped and counted."""
    late_s: Annotated[float, check_duration] = 10.0
    """A stage that would start later than this is replaced by a replica that would start earlier."""
    liveness_s: Annotated[float, check_duration] = 5.0
    """Silence after which another stage counts as gone."""
