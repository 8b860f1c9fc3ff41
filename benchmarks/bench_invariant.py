"""Time and parameters of attention in invariants beside standard attention of the same function.

    python benchmarks/bench_invariant.py [--width 512 --heads 8 --tokens 1024 --rank 64 512]

The standard heads (one fused projection, one call of scaled_dot_product_attention, one output projection) are drawn;
the invariant modules are converted from them, and their outputs must agree. All are timed in this process in turn,
causal, float32, forward and forward with backward; figures are medians over --repeats, ratios those to the standard.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.nn.invariant import InvariantAttention


class Standard(nn.Module):
    """What nn.MultiheadAttention computes, always by its fused function."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads, self.projection, self.bias = module.num_heads, module.in_proj_weight, module.in_proj_bias
        self.out = module.out_proj

    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = F.linear(x, self.projection, self.bias).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2))


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rank", type=int, nargs="*", help="default: that of the heads, and the width")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    head_dim = options.width // options.heads
    torch_module = nn.MultiheadAttention(options.width, options.heads, batch_first=True)
    x = torch.randn(1, options.tokens, options.width, requires_grad=True)
    modules: dict[str, nn.Module] = {"standard": Standard(torch_module)}
    for rank in options.rank or [head_dim, options.width]:
        modules[f"invariant, rank {rank}"] = InvariantAttention.from_multihead(torch_module, rank)
    for name, module in modules.items():
        off = float((module(x, is_causal=True) - modules["standard"](x, is_causal=True)).detach().abs().max())
        if off > 1e-4:
            raise SystemExit(f"{name} computes something else: off by {off:.1e}")

    def forward(module: nn.Module) -> None:
        with torch.no_grad():
            module(x, is_causal=True)

    def both(module: nn.Module) -> None:
        module(x, is_causal=True).sum().backward()

    times: dict[tuple[str, str], list[float]] = {}
    for repeat in range(options.repeats + 1):
        for name, module in modules.items():
            for kind, function in (("forward", forward), ("both", both)):
                spent = seconds(lambda module=module, function=function: function(module))
                if repeat:  # the first round warms up
                    times.setdefault((name, kind), []).append(spent)
    print(
        f"width {options.width}, {options.heads} heads of {head_dim}, {options.tokens} tokens, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"{'':<22}{'parameters':>12}{'forward s':>11}{'ratio':>8}{'fwd+bwd s':>11}{'ratio':>8}")
    for name, module in modules.items():
        row = f"{name:<22}{sum(p.numel() for p in module.parameters()):>12,}"
        for kind in ("forward", "both"):
            median = statistics.median(times[name, kind])
            row += f"{median:>11.4f}{median / statistics.median(times['standard', kind]):>7.2f}x"
        print(row)


if __name__ == "__main__":
    main()
