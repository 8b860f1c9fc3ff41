"""Seconds per head for the singular values of G = Bᵀ A, from the factors and from the formed matrix.

    python benchmarks/bench_spectra.py [--heads 32 --d-model 4096 --head-dim 128 --skip-dense]

All methods run in this process on the same float32 factors A, B (heads, r, d), random, with rows whose size
falls from 1 to 1 / --condition, mixed by a rotation. Quick ones are timed after a warm-up, as the median over
--repeats of all heads at once; the dense SVD is timed once, on one head, and nothing is extrapolated: all
figures are per head. The condition decides which path `product_spectrum` takes, which is printed.
TransformerLens is timed if it is installed, in float32 as it would be used and in float64 for like accuracy.

Differences are between the spectra of head 0 and a reference, the dense SVD in float64 unless skipped,
else that of QR: the largest error as a share of the largest singular value, and the largest relative error of
any of the r.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.linalg import grams, product_spectrum, spectrum_from_grams


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float  # per head
    spectrum: Tensor  # (r,), of head 0


def inputs(heads: int, d: int, r: int, condition: float, seed: int) -> tuple[Tensor, Tensor]:
    """A and B, (heads, r, d) float32: left-rotated rows of falling size with Gaussian directions."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(0, -1, r, base=condition) if condition > 1 else torch.ones(r)

    def one() -> Tensor:
        rows = torch.randn(heads, r, d, generator=generator).mul_(size[:, None] / d**0.5)
        left = torch.linalg.qr(torch.randn(heads, r, r, generator=generator)).Q
        return left @ rows

    return one(), one()


def qr_spectrum(a: Tensor, b: Tensor) -> Tensor:
    """Singular values by QR of both factors in float64, the textbook method."""
    upper_a, upper_b = (torch.linalg.qr(x.to(torch.float64).mT, mode="r").R for x in (a, b))
    return torch.linalg.svdvals(upper_b @ upper_a.mT)


def timed(name: str, function: Callable[[], Tensor], heads: int, repeats: int) -> Row:
    spectrum = function()  # warm-up
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return Row(name, statistics.median(seconds) / heads, spectrum[0])


def dense(name: str, a: Tensor, b: Tensor) -> Row:
    """The (d, d) product of head 0 formed and its singular values taken, once."""
    start = time.perf_counter()
    spectrum = torch.linalg.svdvals(b[0].mT @ a[0])
    return Row(name, time.perf_counter() - start, spectrum[: a.shape[-2]])


def table(rows: list[Row], reference: Row) -> str:
    ours = rows[0].seconds
    lines = [f"{'method':<34}{'s / head':>12}{'ratio':>10}{'err / s_max':>13}{'rel. err':>11}"]
    truth = reference.spectrum.to(torch.float64)
    for row in rows:
        error = (row.spectrum.to(torch.float64) - truth).abs()
        share, relative = float(error.max() / truth[0]), float((error / truth).max())
        lines.append(f"{row.name:<34}{row.seconds:>12.3e}{row.seconds / ours:>9.1f}x{share:>13.1e}{relative:>11.1e}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--d-model", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--condition", type=float, default=30.0, help="of the sizes of the rows of A and of B")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-dense", action="store_true", help="leave out the SVD of the (d, d) product, slow")
    options = parser.parse_args()
    heads, repeats = options.heads, options.repeats

    a, b = inputs(heads, options.d_model, options.head_dim, options.condition, options.seed)
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    gram_a, gram_b = grams(a), grams(b)
    sound = int(spectrum_from_grams(gram_a, gram_b)[1].sum())
    print(
        f"{heads} heads, d_model {options.d_model}, head_dim {options.head_dim}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; {sound} heads by Cholesky, {heads - sound} by QR"
    )

    rows = [
        timed("gaugekit product_spectrum", lambda: product_spectrum(a, b), heads, repeats),
        timed("gaugekit spectrum_from_grams", lambda: spectrum_from_grams(gram_a, gram_b)[0], heads, repeats),
        timed("QR, float64", lambda: qr_spectrum(a, b), heads, repeats),
    ]
    reference = rows[2]
    try:
        from transformer_lens import FactoredMatrix  # type: ignore[import-not-found]
    except ImportError:
        print("TransformerLens is not installed, left out: pip install transformer-lens")
    else:

        def lens(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
            return lambda: FactoredMatrix(left.mT, right).svd()[1]  # built anew, since it caches

        rows.append(timed("TransformerLens, float32", lens(b, a), heads, repeats))
        rows.append(timed("TransformerLens, float64", lens(wide_b, wide_a), heads, repeats))
    if not options.skip_dense:
        rows.append(dense("dense SVD, float32, one head", a, b))
        reference = dense("dense SVD, float64, one head", wide_a, wide_b)
        rows.append(reference)
    print(f"reference: {reference.name}; ratio: to product_spectrum")
    print(table(rows, reference))


if __name__ == "__main__":
    main()
