"""A stage's module and its jobs; tensors as bytes."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farloop.algo.stages import Stage
from farloop.node.model.built_in import GPT
from farloop.node.settings import Normalise
from farloop.pipeline.messages import Kind, MicrobatchRoute, TensorInfo, Work, as_fragment
from farloop.quant.errors import BadPayload
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest
from farloop.wire.frames import Buffer
from farloop.wire.reasons import RemoteProtocolError

# --- Tensors as bytes: raw, or written by a codec of `quant/`

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_bytes(x: Tensor, codec: str = "") -> tuple[TensorInfo, Buffer]:
    """The tensor as bytes of its own dtype, or in the codec's payload; where it can, without a copy.
    Raises NonFiniteError: a codec met NaN or infinity: the model is broken."""
    x = x.detach()
    if codec:
        fragment = as_fragment(x.shape)
        flat = torch.zeros(fragment.numel, device=x.device, dtype=torch.float32)
        flat[: x.numel()] = x.flatten()
        raw = codec_named(codec).encode(flat, fragment).cpu()
    else:
        raw = x.cpu().contiguous().flatten().view(torch.uint8)
    data = raw.numpy().data
    dtype = str(x.dtype).removeprefix("torch.")
    info = TensorInfo(shape=tuple(x.shape), dtype=dtype, codec=codec, size=data.nbytes, checksum=blob_digest(data))
    return info, data


def from_bytes(info: TensorInfo, data: Buffer, device: torch.device, codec: str = "") -> Tensor:
    """The tensor again. `codec`: the one that is used here; bytes of another are not believed.
    Raises RemoteProtocolError: bytes that no such encoder can have written."""
    if info.codec != codec:
        raise RemoteProtocolError(f"a tensor written by {info.codec or 'no codec'!r}, here it is {codec or 'none'!r}")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if not codec:
        return raw.view(DTYPES[info.dtype]).view(info.shape).to(device)
    fragment, how = as_fragment(info.shape), codec_named(codec)
    if len(raw) != how.payload_bytes(fragment):
        raise RemoteProtocolError(f"{len(raw)} bytes of {codec} for shape {info.shape}")
    try:
        how.validate(raw, fragment)
    except BadPayload as error:
        raise RemoteProtocolError(str(error)) from error
    flat = how.decode(raw, fragment)
    return flat[: math.prod(info.shape)].view(info.shape).to(device, DTYPES[info.dtype])


# --- The module of a stage, and its jobs
#
# A stage keeps the input of every microbatch until its gradient comes back, and then computes the forward pass again
# (activation checkpointing at the stage boundary). So an optimizer step in between does not corrupt a rerouted
# microbatch. A skipped stage is the identity, because the residual stream bypasses it.
#
# Shape suffixes as in `node/model/built_in.py`: B batch, T time (tokens), S = T + 1, D model width.


class StagePart(nn.Module):
    """Some layers of a `GPT` under the names they have in the whole; stage 0 has embedding, norm and head too."""

    rope_cos_TH: Tensor
    rope_sin_TH: Tensor

    def __init__(self, model: GPT, stage: Stage, *, source: bool) -> None:
        """Takes the layers out of the whole model, which is not to be used afterwards."""
        super().__init__()
        if not 0 <= stage.first < stage.stop <= len(model.blocks):
            raise ValueError(f"layers {stage.first} to {stage.stop} of a model of {len(model.blocks)}")
        self.config = model.config
        if source:
            self.embed, self.norm, self.head = model.embed, model.norm, model.head
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(stage.first, stage.stop)})
        self.register_buffer("rope_cos_TH", model.rope_cos_TH, persistent=False)
        self.register_buffer("rope_sin_TH", model.rope_sin_TH, persistent=False)

    def run(self, x_BTD: Tensor) -> Tensor:
        length = x_BTD.shape[1]
        cos_TH, sin_TH = self.rope_cos_TH[:length], self.rope_sin_TH[:length]
        for block in self.blocks.values():
            x_BTD = block(x_BTD, cos_TH, sin_TH)
        return x_BTD

    def begin(self, tokens_BS: Tensor) -> Tensor:
        """Stage 0: the embedding of all but the last token, then the layers."""
        return self.run(self.embed(tokens_BS[:, :-1]))

    def loss(self, x_BTD: Tensor, tokens_BS: Tensor) -> Tensor:
        """Stage 0: mean cross-entropy in nats per token, as `GPT.loss`."""
        x_BTD = self.norm(x_BTD)
        logits_BTV = F.linear(x_BTD, self.embed.weight if self.head is None else self.head.weight)
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.run(x_BTD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Result of a step on one stage."""

    loss: float | None  # mean over the microbatches whose loss was computed here, nats per token; None on other stages
    visits: int  # microbatches whose gradient this stage has taken
    tokens: int  # tokens in these microbatches


class StageJobs:
    """Does the work of one stage, one job at a time; gradients add up in the parameters until `finish`."""

    def __init__(
        self, part: StagePart, *, device: torch.device | None = None, mixed: torch.autocast | None = None
    ) -> None:
        self.part = part
        self.device = device or torch.device("cpu")
        self._mixed = mixed or torch.autocast("cpu", enabled=False)
        self._tokens_BS: Sequence[Tensor] = ()
        self._inputs: dict[MicrobatchRoute, Tensor] = {}
        self._visits: Counter[Kind] = Counter()
        self._num_tokens = 0
        self._losses: list[float] = []

    def load(self, microbatches: Sequence[Tensor]) -> None:
        """A source's tokens [B, S] of the step's microbatches, by index."""
        self._tokens_BS = [tokens_BS.to(self.device, non_blocking=True) for tokens_BS in microbatches]

    def do(self, work: Work, given: Tensor | None) -> Tensor | None:
        """Do one job; `given` is its tensor, None if the source begins.

        Returns for a forward the activations [B, T, D], for a loss the gradient of `given`, for a backward the gradient
        of the stage's input, None at the source.
        """
        match work.kind:
            case Kind.FORWARD:
                with torch.no_grad(), self._mixed:
                    if given is None:
                        return self.part.begin(self._tokens_BS[work.trip.index])
                    self._inputs[work.trip] = given
                    return self.part.run(given)
            case Kind.LOSS:
                assert given is not None
                return self._loss(work.trip, given)
            case Kind.BACKWARD:
                assert given is not None
                return self._backward(work.trip, given)

    def forget(self, trip: MicrobatchRoute) -> None:
        self._inputs.pop(trip, None)

    @torch.no_grad()
    def finish(self, expected: int, normalise: Normalise = "visits") -> Trained:
        """End the step: gradients become means. `expected`: visits if nothing had been skipped, for `share`."""
        blocks, heads = self._visits[Kind.BACKWARD], self._visits[Kind.LOSS]
        for name, parameter in self.part.named_parameters():
            if parameter.grad is None:
                continue
            # A trip that was lost after its loss has left its gradient in the head, and none in the layers. A tied
            # embedding takes both: it is divided by the larger number, so never made longer than a mean.
            visits = {"norm": heads, "head": heads, "embed": max(blocks, heads)}.get(name.partition(".")[0], blocks)
            parameter.grad.div_(max(visits if normalise == "visits" else expected, 1))
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        trained = Trained(loss=loss, visits=blocks, tokens=self._num_tokens)
        self._visits.clear()
        self._losses.clear()
        self._num_tokens = 0
        return trained

    def _loss(self, trip: MicrobatchRoute, given: Tensor) -> Tensor:
        x_BTD = given.requires_grad_()
        with self._mixed:
            loss = self.part.loss(x_BTD, self._tokens_BS[trip.index])
        torch.autograd.backward(loss)
        self._visits[Kind.LOSS] += 1
        self._losses.append(loss.item())
        assert x_BTD.grad is not None
        return x_BTD.grad

    def _backward(self, trip: MicrobatchRoute, gradient_BTD: Tensor) -> Tensor | None:
        given = self._inputs.pop(trip, None)
        with self._mixed:
            if given is None:
                out_BTD = self.part.begin(self._tokens_BS[trip.index])
            else:
                out_BTD = self.part.run(given.requires_grad_())
        torch.autograd.backward(out_BTD, gradient_BTD)
        self._visits[Kind.BACKWARD] += 1
        self._num_tokens += gradient_BTD.shape[0] * gradient_BTD.shape[1]
        return given.grad if given is not None else None
