"""One small decoder that composes norm × placement × attention × residual × positions × MLP.

    plain residual, by placement, f attention and then f MLP, N the norm
    pre        h ← h + f(N h)            and N before the head          Xiong et al., arXiv 2002.04745
    post       h ← N(h + f(h))                                          Vaswani et al., arXiv 1706.03762
    sandwich   h ← h + N(f(N h))         and N before the head          Ding et al., arXiv 2105.13290
    peri       as sandwich, and N after the embedding                   Kim et al., arXiv 2502.02732

    residual on the sphere: h ← L(h + |α| ⊙ (L(g(h)) − h)), L(x) = x / |x|, matrices of unit rows or columns, no norm
    before the head; g is f, and where there is a norm, f(N h), or N(f(N h)) with the two last placements. Without one,
    with standard attention, rotary positions and swiglu, this is `HypersphereTransformer` [nGPT].

Legend
------
b, n, d, V          windows, tokens, width, vocabulary
embedding (V, d), positions (context, d), head (V, d)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gaugekit.errors import ConfigError
from gaugekit.nn.decoding import MLP, CausalAttention
from gaugekit.nn.hypersphere import HypersphereAttention, HypersphereBlock, HypersphereMLP, Scale
from gaugekit.nn.invariant import InvariantAttention
from gaugekit.nn.norms import norm
from gaugekit.nn.relational import RelationalAttention
from gaugekit.nn.spheres import Reader, Rows, Unit
from gaugekit.training.config import ModelConfig

__all__ = ["Block", "Causal", "Decoder"]


class Causal(nn.Module):
    """An attention that is told at every call that it is causal."""

    def __init__(self, attention: RelationalAttention | InvariantAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, is_causal=True)


class Block(nn.Module):
    """A plain residual block; (..., n, d) to (..., n, d)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.placement = config.placement
        twice = config.placement in ("sandwich", "peri")
        self.attention, self.mlp = attention_of(config), mlp_of(config)
        self.norm_attention, self.norm_mlp = norm_of(config), norm_of(config)
        self.norm_attention_out, self.norm_mlp_out = (norm_of(config) if twice else None for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        if self.placement == "post":
            h = self.norm_attention(h + self.attention(h))
            return self.norm_mlp(h + self.mlp(h))
        y = self.attention(self.norm_attention(h))
        h = h + (y if self.norm_attention_out is None else self.norm_attention_out(y))
        y = self.mlp(self.norm_mlp(h))
        return h + (y if self.norm_mlp_out is None else self.norm_mlp_out(y))


class Decoder(nn.Module):
    """Logits (b, n, V) of tokens (b, n), n up to `config.context`.

    Args:
        config: what it is made of. `config.vocab` must be set.

    Raises: ConfigError for a config that does not fit together, or tokens that are more than the context.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.check()
        if config.vocab < 1:
            raise ConfigError("model.vocab must be set, or taken from a tokenizer")
        self.config = config
        on_sphere = config.residual == "sphere"
        table = Rows if on_sphere else nn.Embedding
        self.embedding = table(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.norm_embedding = norm_of(config) if config.placement == "peri" and not on_sphere else None
        self.blocks = nn.ModuleList(sphere_block(config) if on_sphere else Block(config) for _ in range(config.layers))
        self.norm = norm_of(config) if not on_sphere and config.placement != "post" else None
        d, vocab = config.width, config.vocab
        self.head = Reader(d, vocab) if on_sphere else nn.Linear(d, vocab, bias=False)
        self.s_z = Scale(config.vocab, 1.0, config.width**-0.5) if on_sphere else None
        if config.tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights anew: matrices and tables normal(0, init_std), those that write to the stream over √(2 layers) as in
        GPT-2, biases zero; on spheres and in norms, as these draw themselves. Scores and temperatures of relational
        attention are left."""
        config = self.config
        for part in self.modules():
            if isinstance(part, InvariantAttention):
                part.reset_parameters(config.init_std)
            elif isinstance(part, nn.Linear | nn.Embedding) and not isinstance(part, Unit):
                nn.init.normal_(part.weight, std=config.init_std)
                if isinstance(part, nn.Linear) and part.bias is not None:
                    nn.init.zeros_(part.bias)
            elif (
                part is not self
                and not list(part.children())
                and callable(reset := getattr(part, "reset_parameters", 0))
            ):
                reset()
        for block in self.blocks:
            for part in block.modules():
                if isinstance(part, CausalAttention | RelationalAttention | MLP):
                    writer = part.down if isinstance(part, MLP) else getattr(part, "out", None)
                    if writer is not None:
                        writer.weight.div_(math.sqrt(2 * config.layers))
                elif isinstance(part, InvariantAttention):
                    part.vo.columns.div_(math.sqrt(2 * config.layers))

    def states(self, tokens: Tensor) -> Tensor:
        """What the head reads, (b, n, d)."""
        n = tokens.shape[-1]
        if n > self.config.context:
            raise ConfigError(f"{n} tokens are more than the context of {self.config.context}")
        h = self.embedding(tokens)
        if self.positions is not None:
            h = h + self.positions.weight[:n]
        if self.norm_embedding is not None:
            h = self.norm_embedding(h)
        for block in self.blocks:
            h = block(h)
        return h if self.norm is None else self.norm(h)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.states(tokens))
        return logits if self.s_z is None else (logits * self.s_z()).to(logits.dtype)


def norm_of(config: ModelConfig) -> nn.Module:
    try:
        return norm(config.norm, config.width, **config.norm_options)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"model.norm_options: {error}") from error


def attention_of(config: ModelConfig) -> nn.Module:
    kv_heads = config.kv_heads or config.heads
    if config.attention == "relational":
        score, frame, values = config.score, config.frame, config.values
        return Causal(RelationalAttention(config.width, config.heads, score=score, frame=frame, values=values))
    if config.attention == "invariant":
        return Causal(InvariantAttention(config.width, config.heads, kv_heads=kv_heads, bias=config.bias))
    base = config.rotary_base if config.positions == "rotary" else None
    if config.residual == "sphere":
        return HypersphereAttention(config.width, config.heads, kv_heads, rotary_base=base)
    return CausalAttention(config.width, config.heads, kv_heads, config.bias, base)


def mlp_of(config: ModelConfig) -> nn.Module:
    if config.residual == "sphere":
        return HypersphereMLP(config.width, config.units, config.mlp)
    return MLP(config.width, config.units, config.mlp, config.bias)


def sphere_block(config: ModelConfig) -> HypersphereBlock:
    def branch(f: nn.Module) -> nn.Module:
        if config.norm == "none":
            return f
        after = [norm_of(config)] if config.placement in ("sandwich", "peri") else []
        return nn.Sequential(norm_of(config), f, *after)

    return HypersphereBlock(config.width, branch(attention_of(config)), branch(mlp_of(config)))
