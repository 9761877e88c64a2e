"""The built-in model: a small GPT over bytes or tokens, which the daemon's own trainer, the demo and benchmarks train.

Not a model zoo: models of others come by name (`named.py`), or with a loop of their own (`node/library.py`).

Pre-norm transformer: RMSNorm, rotary positions (RoFormer, arXiv:2104.09864), SwiGLU (arXiv:2002.05202), causal
attention, no biases. Parameters of layer i are named `blocks.<i>.…`, the others `embed.weight`, `norm.weight` and, when
untied, `head.weight`, so that fragments can be cut by layer.

Shape suffixes: B batch, T time (tokens), S = T + 1, D model width, N heads, H width of a head, F inner width of the
MLP, V vocabulary.
"""

import dataclasses
import json
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farloop.node.settings import VOCABULARY, ModelConfig

ROPE_BASE = 10_000.0  # longest rotary wavelength is 2π times this, in tokens (RoFormer §3.2.2)
INIT_STD = 0.02  # standard deviation of the initial weights (GPT-2)


def config_json(config: ModelConfig) -> str:
    """Canonical JSON: equal configurations give equal bytes. A model over bytes does not name its vocabulary."""
    sizes = dataclasses.asdict(config)
    if config.vocabulary == VOCABULARY:
        del sizes["vocabulary"]
    return json.dumps(sizes, sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> ModelConfig:
    """The configuration that `config_json` wrote.

    Raises ValueError with one line when `text` is not JSON, a size is missing, unknown or impossible.
    """
    sizes = json.loads(text)
    expected = {field.name for field in dataclasses.fields(ModelConfig)}
    if not isinstance(sizes, dict) or {"vocabulary", *sizes} != expected:
        raise ValueError(f"not the sizes of a built-in model, which are {', '.join(sorted(expected))}: {text[:200]}")
    return ModelConfig(**sizes)


def build(config: ModelConfig, seed: int) -> "GPT":
    """The model on the CPU in fp32: a function of (config, seed) alone, and the global generator stays as it was."""
    return GPT(config, torch.Generator().manual_seed(seed))


class GPT(nn.Module):
    """Logits of the next token at every position."""

    rope_cos_TH: Tensor
    rope_sin_TH: Tensor

    def __init__(self, config: ModelConfig, generator: torch.Generator) -> None:
        """Weights are drawn from `generator`, a CPU generator."""
        super().__init__()
        self.config = config
        with torch.device("meta"):  # The modules' own initialisation would draw from the global generator.
            # Given its weights, it draws none: on the meta device that would import a whole compiler.
            empty = torch.empty(config.vocabulary, config.dim, dtype=torch.float32, device="meta")
            self.embed = nn.Embedding(config.vocabulary, config.dim, _weight=empty)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.dim)
            # A tied head is no module: `named_parameters` and `state_dict` then agree on one name for the tensor.
            self.head = None if config.tied else nn.Linear(config.dim, config.vocabulary, bias=False)
        self.to_empty(device="cpu")
        self._initialise_(generator)
        cos_TH, sin_TH = rope_tables(config.context, config.dim // config.heads)
        # Functions of the configuration, so no checkpoint holds them.
        self.register_buffer("rope_cos_TH", cos_TH, persistent=False)
        self.register_buffer("rope_sin_TH", sin_TH, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] for `tokens_BT`, an integer tensor [B, T] with values in [0, V).

        Raises ValueError when T exceeds the context.
        """
        length, context = tokens_BT.shape[1], self.config.context
        if length > context:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's context of {context}")
        cos_TH, sin_TH = self.rope_cos_TH[:length], self.rope_sin_TH[:length]
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TH, sin_TH)
        x_BTD = self.norm(x_BTD)
        return F.linear(x_BTD, self.embed.weight if self.head is None else self.head.weight)

    def loss(self, tokens_BS: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, a scalar, of predicting all of [B, S] but the first column."""
        logits_BTV = self(tokens_BS[:, :-1])
        # fp32 even where the model runs in bf16, whose 8 bits would blur the third digit of the loss.
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())

    @torch.no_grad()
    def _initialise_(self, generator: torch.Generator) -> None:
        """Gains are 1, matrices have standard deviation `INIT_STD`.

        The 2·layers matrices that add to the residual stream get 1/√(2·layers) of it, so that the stream's variance
        does not grow with depth (GPT-2).
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = INIT_STD / math.sqrt(2 * self.config.layers) if writes_residual else INIT_STD
            # Uniform on ±√3·std, not normal: `rand` is an integer times 2⁻²⁴, then one exact and one rounded operation,
            # while a vectorised logarithm or cosine may differ in the last bit from one CPU to the next. Clusters of
            # different hardware so build a bit-identical version 0.
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn.sub_(0.5).mul_(2 * math.sqrt(3) * std))


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TH, sin_TH)
        out_BTD: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out_BTD


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        qkv_BT3NH = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q_BNTH, k_BNTH, v_BNTH = qkv_BT3NH.permute(2, 0, 3, 1, 4)
        q_BNTH = rotate(q_BNTH, cos_TH, sin_TH)
        k_BNTH = rotate(k_BNTH, cos_TH, sin_TH)
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        out_BTD: Tensor = self.out(y_BNTH.transpose(1, 2).flatten(2))
        return out_BTD


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        out_BTD: Tensor = self.down(F.silu(gate_BTF) * up_BTF)
        return out_BTD


def rope_tables(context: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [context, head_dim] of t·ROPE_BASE^(−2i/head_dim); both halves of a row hold the same angles.

    Computed in fp64 and rounded once: fp32 angles would put errors of 7e-5 into the table by t = 2047.
    """
    even = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu")  # [head_dim / 2]
    frequency = ROPE_BASE ** (-even / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float64, device="cpu"), frequency)  # [context, head_dim / 2]
    angle_TH = torch.cat((angle, angle), dim=-1)
    return angle_TH.cos().float(), angle_TH.sin().float()


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Turn the pair (x[i], x[i + H/2]) of every head by its position's i-th angle (RoFormer equation 34)."""
    first, second = x_BNTH.chunk(2, dim=-1)
    turned_BNTH = x_BNTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH
    return turned_BNTH.type_as(x_BNTH)
