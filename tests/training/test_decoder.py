"""The decoder that composes: every combination runs and is causal, and each part is what is written at its head."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from drawn import gap, normal
from torch import Tensor, nn

from gaugekit.errors import ConfigError
from gaugekit.nn.decoding import MLP, CausalAttention
from gaugekit.nn.hypersphere import HypersphereTransformer
from gaugekit.nn.invariant import InvariantAttention
from gaugekit.nn.relational import RelationalAttention
from gaugekit.nn.scores import LearnedScore
from gaugekit.nn.spheres import normalize_, spheres
from gaugekit.training import config as keys
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Decoder

VOCAB, WIDTH, CONTEXT = 5, 8, 6
SMALL = ModelConfig(vocab=VOCAB, context=CONTEXT, width=WIDTH, layers=1, heads=2, hidden=16)
NORMS, PLACEMENTS = get_args(keys.Norm), get_args(keys.Placement)
POSITIONS, MLPS = get_args(keys.Positions), get_args(keys.MLP)
SCORES = [("standard", "dot"), ("invariant", "dot"), *(("relational", score) for score in get_args(keys.Score))]


def of(**changes: Any) -> ModelConfig:
    return replace(SMALL, **changes)


def drawn(model: Decoder, seed: int) -> Decoder:
    """In float64, with random parameters, none of them zero, and matrices on their spheres."""
    model.double()
    parameters = list(model.parameters())
    noise = normal(sum(p.numel() for p in parameters), seed=seed).split([p.numel() for p in parameters])
    with torch.no_grad():
        for p, x in zip(parameters, noise, strict=True):
            p.copy_(p + 0.2 * x.view_as(p) if p.ndim < 2 else 0.5 * x.view_as(p))
    normalize_(spheres(model))
    return model


def made(seed: int = 0, **changes: Any) -> Decoder:
    return drawn(Decoder(of(**changes)), seed)


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def apart(a: Tensor, b: Tensor) -> float:
    return gap(a.detach(), b.detach())


# --- every combination ----------------------------------------------------------------------------------------


def illegal(config: ModelConfig) -> list[str]:
    """Keys that do not go together."""
    if config.positions == "rotary" and config.attention != "standard":
        return ["model.positions=rotary", f"attention={config.attention}"]
    if config.residual == "sphere" and config.placement == "post":
        return ["model.residual=sphere", "placement=post"]
    return []


def idle(config: ModelConfig, name: str) -> bool:
    """Whether a parameter cannot matter: a length of what is projected onto the sphere next, or of what is read by a
    branch of degree one, which is."""
    if config.residual == "plain" or config.norm != "scale":
        return False
    linear = config.mlp == "relu" if ".mlp." in name else config.attention == "standard" or config.score == "cosine"
    return name.endswith(".2.weight") or (name.endswith(".0.weight") and linear)


@pytest.mark.parametrize("residual", ["plain", "sphere"])
@pytest.mark.parametrize(("attention", "score"), SCORES)
def test_every_combination(attention: Any, score: Any, residual: Any) -> None:
    """Finite logits, gradients for all parameters, and no token sees those after it."""
    tokens = some_tokens(1, CONTEXT).repeat(2, 1)
    tokens[1, 3] = (tokens[1, 3] + 1) % VOCAB
    count = 0
    for norm, placement, positions, mlp in itertools.product(NORMS, PLACEMENTS, POSITIONS, MLPS):
        changes = {"norm": norm, "placement": placement, "attention": attention, "score": score}
        config = of(**changes, residual=residual, positions=positions, mlp=mlp)
        if refused := illegal(config):
            with pytest.raises(ConfigError) as caught:
                Decoder(config)
            assert all(key in str(caught.value) for key in refused)
            assert "\n" not in str(caught.value)
            continue
        count += 1
        model = drawn(Decoder(config), count)
        logits = model(tokens)
        assert logits.shape == (2, CONTEXT, VOCAB)
        assert bool(logits.isfinite().all()), config
        assert apart(logits[0, :3], logits[1, :3]) < 1e-12, config
        assert apart(logits[0, 3:], logits[1, 3:]) > 1e-6, config
        F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        assert all(p.grad is not None for p in model.parameters())
        sizes = torch.stack(torch._foreach_norm([p.grad for p in model.parameters()])).tolist()
        for (name, _), size in zip(model.named_parameters(), sizes, strict=True):
            assert math.isfinite(size) and (size > 0 or idle(config, name)), (config, name)
    placements = 4 if residual == "plain" else 3
    assert count == len(NORMS) * len(MLPS) * placements * (3 if attention == "standard" else 2)


@pytest.mark.parametrize("score", get_args(keys.Score))
@pytest.mark.parametrize("frame", ["full", "split"])
@pytest.mark.parametrize("values", ["plain", "linear"])
def test_relational_frames_and_values(score: Any, frame: Any, values: Any) -> None:
    model = made(attention="relational", score=score, frame=frame, values=values)
    attention = next(part for part in model.modules() if isinstance(part, RelationalAttention))
    assert (attention.frame, attention.values) == (frame, values)
    tokens = some_tokens(1, CONTEXT).repeat(2, 1)
    tokens[1, 4] = (tokens[1, 4] + 1) % VOCAB
    logits = model(tokens)
    assert apart(logits[0, :4], logits[1, :4]) < 1e-12
    assert apart(logits[0, 4:], logits[1, 4:]) > 1e-6


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_counts_with_positions_only(positions: Any) -> None:
    """One token sees the two before it as a set, or in their order."""
    model = made(positions=positions)
    tokens = torch.tensor([[1, 2, 3], [2, 1, 3]])
    logits = model(tokens)[:, -1]
    assert (apart(logits[0], logits[1]) < 1e-12) == (positions == "none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 7}, r"model\.heads=2 does not divide model\.width=7"),
        ({"heads": 4, "kv_heads": 3}, r"model\.kv_heads=3 does not divide model\.heads=4"),
        ({"width": 6, "positions": "rotary"}, r"model\.positions=rotary needs an even width / heads"),
        ({"attention": "relational", "kv_heads": 1}, r"model\.attention=relational has no key/value heads"),
        ({"residual": "sphere", "tied": True}, r"model\.residual=sphere has neither biases nor a tied head"),
        ({"residual": "sphere", "bias": True}, r"model\.residual=sphere has neither biases nor a tied head"),
        ({"score": "rbf"}, r"model\.score=rbf is of attention=relational, and attention is standard"),
        ({"frame": "full", "attention": "invariant"}, r"model\.frame=full is .* attention is invariant"),
        ({"values": "plain"}, r"model\.values=plain is of attention=relational"),
        ({"layers": 0}, r"model\.layers must be at least 1, got 0"),
        ({"hidden": -1}, r"model\.hidden must be 0 \(the default\) or more, got -1"),
        ({"rotary_base": 0.0}, r"model\.rotary_base must be a positive number, got 0\.0"),
        ({"init_std": math.inf}, r"model\.init_std must be a positive number, got inf"),
        ({"vocab": 0}, r"model\.vocab must be set, or taken from a tokenizer"),
        ({"norm_options": {"epsilon": 1}}, r"model\.norm_options: norm 'layer' has no option 'epsilon': it takes"),
        ({"norm_options": {"eps": "small"}}, r"model\.norm_options: "),
        ({"norm_options": {"device": "abacus"}}, r"model\.norm_options: "),
        ({"norm_options": {"eps": 0.0}}, r"model\.norm_options: eps is a positive number"),
        ({"width": 1, "heads": 1}, r"model\.norm_options: LayerNorm of 1 feature"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Decoder(of(**changes))


def test_length_of_the_context() -> None:
    for positions in POSITIONS:
        model = made(positions=positions)
        whole = model(some_tokens(2, CONTEXT))
        assert apart(model(some_tokens(2, CONTEXT)[:, :2]), whole[:, :2]) < 1e-12
        with pytest.raises(ConfigError, match="7 tokens are more than the context of 6"):
            model(some_tokens(2, CONTEXT + 1))


# --- against the equations ------------------------------------------------------------------------------------


def turned(x: Tensor, position: int, base: float) -> Tensor:
    k = len(x)
    z = torch.complex(x[: k // 2], x[k // 2 :])
    z = z * torch.polar(
        torch.ones(k // 2, dtype=x.dtype), position * base ** (-2 * torch.arange(k // 2, dtype=x.dtype) / k)
    )
    return torch.cat([z.real, z.imag])


def attention_of(a: CausalAttention, x: Tensor) -> Tensor:
    """(n, d), one number after the other."""
    k, share, outputs = a.head_dim, a.heads // a.kv_heads, []
    for i in range(len(x)):
        heads = []
        for h in range(a.heads):
            g = h // share
            q = a.query(x[i])[h * k : (h + 1) * k]
            keys_ = [a.key(x[j])[g * k : (g + 1) * k] for j in range(i + 1)]
            values = torch.stack([a.value(x[j])[g * k : (g + 1) * k] for j in range(i + 1)])
            if a.rotary_base is not None:
                q = turned(q, i, a.rotary_base)
                keys_ = [turned(key, j, a.rotary_base) for j, key in enumerate(keys_)]
            scores = torch.stack([q @ key for key in keys_]) / math.sqrt(k)
            heads.append(scores.softmax(0) @ values)
        outputs.append(a.out(torch.cat(heads)))
    return torch.stack(outputs)


def units_of(m: MLP, x: Tensor) -> Tensor:
    u = m.up(x)
    if m.gate is not None:
        gate = m.gate(x)
        return m.down(u * gate / (1 + (-gate).exp()))
    return m.down(u.clamp(min=0) if m.activation == "relu" else u * (1 + torch.erf(u / math.sqrt(2))) / 2)


def layer_norm(norm: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return norm.weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() + norm.bias


DIRECT: list[dict[str, Any]] = [
    {},
    {"positions": "rotary", "kv_heads": 1, "rotary_base": 20.0, "mlp": "relu", "bias": True},
    {"positions": "none", "heads": 4, "kv_heads": 2, "mlp": "swiglu", "tied": True},
]


@pytest.mark.parametrize("changes", DIRECT, ids=str)
def test_pre_norm_against_the_equations(changes: dict[str, Any]) -> None:
    model: Any = made(layers=2, **changes)
    tokens = some_tokens(CONTEXT - 1)
    h = model.embedding.weight[tokens]
    if model.positions is not None:
        h = h + model.positions.weight[: CONTEXT - 1]
    for block in model.blocks:
        h = h + attention_of(block.attention, layer_norm(block.norm_attention, h))
        h = h + units_of(block.mlp, layer_norm(block.norm_mlp, h))
    assert apart(model.states(tokens[None])[0], layer_norm(model.norm, h)) < 1e-12
    assert apart(model(tokens[None])[0], layer_norm(model.norm, h) @ model.head.weight.T) < 1e-12


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", ["rms", "derf"])
def test_placements_against_the_equations(placement: Any, norm: Any) -> None:
    model: Any = made(layers=2, placement=placement, norm=norm)
    tokens = some_tokens(2, CONTEXT)
    h = model.embedding(tokens) + model.positions.weight
    if placement == "peri":
        h = model.norm_embedding(h)
    for b in model.blocks:
        if placement == "pre":
            h = h + b.attention(b.norm_attention(h))
            h = h + b.mlp(b.norm_mlp(h))
        elif placement == "post":
            h = b.norm_attention(h + b.attention(h))
            h = b.norm_mlp(h + b.mlp(h))
        else:
            h = h + b.norm_attention_out(b.attention(b.norm_attention(h)))
            h = h + b.norm_mlp_out(b.mlp(b.norm_mlp(h)))
    h = h if placement == "post" else model.norm(h)
    assert apart(model(tokens), model.head(h)) < 1e-12
    norms = sum("norm" in name and name.endswith("weight") for name, _ in model.named_parameters())
    assert norms == {"pre": 5, "post": 4, "sandwich": 9, "peri": 10}[placement]


@pytest.mark.parametrize("placement", ["pre", "sandwich", "peri"])
def test_norms_in_branches_of_the_sphere(placement: Any) -> None:
    model: Any = made(layers=2, placement=placement, residual="sphere", norm="layer", mlp="relu")
    tokens = some_tokens(2, CONTEXT)
    h = model.embedding(tokens) + model.positions.weight
    for block in model.blocks:
        for branch, alpha in ((block.attention, block.alpha_attention), (block.mlp, block.alpha_mlp)):
            assert len(branch) == (2 if placement == "pre" else 3)
            y = branch[1](branch[0](h))
            y = y if placement == "pre" else branch[2](y)
            start = F.normalize(h, dim=-1)
            h = F.normalize(start + alpha().abs() * (F.normalize(y, dim=-1) - start), dim=-1)
    assert apart(model(tokens), model.s_z() * (h @ model.head.weight.T)) < 1e-12


@pytest.mark.parametrize("kv_heads", [0, 1])
def test_the_hypersphere_s_own_composition(kv_heads: int) -> None:
    """Standard attention, rotary, swiglu and no norm on the sphere is nGPT, gradients and all."""
    model = made(
        layers=2,
        residual="sphere",
        norm="none",
        positions="rotary",
        mlp="swiglu",
        kv_heads=kv_heads,
        rotary_base=50.0,
    )
    theirs = HypersphereTransformer(VOCAB, WIDTH, 2, 2, 16, kv_heads or None, rotary_base=50.0, dtype=torch.float64)
    theirs.load_state_dict(model.state_dict())
    tokens = some_tokens(2, CONTEXT)
    assert apart(model(tokens), theirs(tokens)) == 0
    for m in (model, theirs):
        F.cross_entropy(m(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    for (name, p), (other, q) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert {s.name: s.dim for s in spheres(model)} == {s.name: s.dim for s in spheres(theirs)}


@pytest.mark.parametrize("residual", ["plain", "sphere"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_heads_are_equal_heads(kv_heads: int, residual: Any) -> None:
    changes: dict[str, Any] = {"heads": 4, "positions": "rotary", "residual": residual}
    grouped, full = made(kv_heads=kv_heads, **changes), made(**changes)
    state = grouped.state_dict()
    for name in state:
        if name.endswith(("key.weight", "value.weight")):
            state[name] = state[name].unflatten(0, (kv_heads, -1)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    full.load_state_dict(state)
    tokens = some_tokens(2, CONTEXT)
    assert apart(grouped(tokens), full(tokens)) < 1e-12


def test_shared_heads_of_invariants() -> None:
    model: Any = made(attention="invariant", heads=4, kv_heads=2, bias=True)
    attention = model.blocks[0].attention.attention
    assert isinstance(attention, InvariantAttention)
    assert (attention.kv_heads, attention.output_bias is not None) == (2, True)


def test_one_matrix_for_embedding_and_head() -> None:
    tied: Any = made(tied=True)
    free: Any = made()
    free.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    assert tied.head.weight is tied.embedding.weight
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == VOCAB * WIDTH
    tokens = some_tokens(2, CONTEXT)
    assert apart(tied(tokens), free(tokens)) == 0
    for model in (tied, free):
        model(tokens).square().mean().backward()
    assert apart(tied.embedding.weight.grad, free.embedding.weight.grad + free.head.weight.grad) < 1e-12
    reset = Decoder(of(tied=True))
    assert reset.head.weight is reset.embedding.weight


# --- sizes and first weights ----------------------------------------------------------------------------------


def test_units() -> None:
    """swiglu has three matrices where the others have two: 8/3 d units, up to a multiple of 8, are of like size."""
    for width, units in ((128, 344), (96, 256), (8, 24), (384, 1024), (768, 2048)):
        assert ModelConfig(width=width, mlp="swiglu").units == units
        assert ModelConfig(width=width, mlp="gelu").units == 4 * width
        assert units % 8 == 0 and units - 8 < 8 / 3 * width <= units
        assert ModelConfig(width=width, mlp="swiglu", hidden=5).units == 5
    model: Any = Decoder(of(mlp="swiglu", hidden=0))
    assert model.blocks[0].mlp.up.weight.shape == (24, WIDTH)


def test_first_weights() -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocab=64, width=64, layers=8, heads=4, context=64, bias=True, init_std=0.05, norm_options={})
    model = Decoder(config)
    for name, p in model.named_parameters():
        x = p.detach()
        if name.endswith("bias"):
            assert not x.any(), name
        elif "norm" in name:
            assert bool((x == 1).all()), name
        else:
            writes = name.endswith(("out.weight", "down.weight"))
            std = 0.05 / (4 if writes else 1)  # √(2 · 8)
            assert float(x.std()) == pytest.approx(std, rel=0.05), name
            assert abs(float(x.mean())) < 5 * std / math.sqrt(x.numel()), name


def test_first_weights_of_other_attentions() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab": 16, "width": 64, "layers": 8, "heads": 4, "context": 16, "init_std": 0.05}
    relational: Any = Decoder(ModelConfig(attention="relational", **sizes)).blocks[0].attention
    assert float(relational.attention.value.weight.detach().std()) == pytest.approx(0.05, rel=0.05)
    assert float(relational.attention.out.weight.detach().std()) == pytest.approx(0.05 / 4, rel=0.05)
    invariant: Any = Decoder(ModelConfig(attention="invariant", **sizes)).blocks[0].attention
    heads = invariant.attention.to_heads()
    # Products of k = 16 terms, of which those that write to the stream are over √(2 · 8).
    for first, second, std in ((heads.w_q, heads.w_k, 1.0), (heads.w_o, heads.w_v, 1 / 4)):
        product = first.mT @ second
        assert float(product.std()) == pytest.approx(std * 0.05**2 * math.sqrt(16), rel=0.1)


def test_first_weights_on_the_sphere() -> None:
    torch.manual_seed(0)
    model: Any = Decoder(of(residual="sphere", layers=2, norm="rms", mlp="swiglu"))
    for sphere in spheres(model):
        length = sphere.parameter.detach().norm(dim=sphere.dim)
        assert apart(length, torch.ones_like(length)) < 1e-6
    assert len(spheres(model)) == 2 + 2 * 7
    assert apart(model.s_z(), torch.ones(VOCAB)) < 1e-6
    assert apart(model.blocks[0].alpha_mlp(), torch.full((WIDTH,), 0.05)) < 1e-8


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": True, "norm": "dyt", "placement": "peri"},
        {"residual": "sphere", "norm": "scale", "placement": "sandwich", "mlp": "swiglu"},
        {"attention": "invariant", "norm": "crms"},
        {"attention": "relational", "norm": "derf", "tied": True},
    ],
    ids=str,
)
def test_weights_anew(changes: dict[str, Any]) -> None:
    """What is drawn anew does not depend on what was there."""
    models = made(0, **changes), made(100, **changes)
    for model in models:
        torch.manual_seed(3)
        model.reset_parameters()
    kept = ("log_temperature",)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q) == (not name.endswith(kept)), name
    torch.manual_seed(4)
    models[1].reset_parameters()
    assert not torch.equal(models[0].head.weight, models[1].head.weight)


def test_learned_scores_are_left_by_a_reset() -> None:
    model = made(attention="relational", score="learned")
    score = next(part for part in model.modules() if isinstance(part, LearnedScore))
    before = score.units.detach().clone()
    model.reset_parameters()
    assert torch.equal(score.units, before)


def test_norms_have_their_options() -> None:
    model: Any = Decoder(of(norm="prms", norm_options={"p": 0.5, "eps": 0.1}))
    assert {(m.p, m.eps) for m in (model.norm, model.blocks[0].norm_mlp)} == {(0.5, 0.1)}
    assert isinstance(Decoder(of(norm="none")).norm, nn.Identity)
