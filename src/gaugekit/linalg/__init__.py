"""Linear algebra of low-rank products from their factors, and random elements of the groups that move the factors.

A head's circuit is G = Bᵀ A with A (..., r, m) and B (..., r, n), where r is the head dimension and m, n the
widths it reads and writes. G itself, (..., n, m), is never formed: a head costs O(r² (m + n)). Leading dimensions
(layer, head, ...) may have any sizes, one and zero included.

Spectra, Gram matrices and what is computed from them are float64 whatever the floating dtype of the input, lie on the
input's device, and carry no gradient. Factors are widened to float64 a few heads at a time.
"""

from gaugekit.linalg.elements import orthonormal_complement_of_ones, random_invertible, random_orthogonal
from gaugekit.linalg.factors import apart, balance, balance_defect, beside, product_svd
from gaugekit.linalg.pivoting import column_pivots
from gaugekit.linalg.ranks import ZERO_TIE, degenerate_blocks, effective_rank, numerical_rank, stable_rank
from gaugekit.linalg.scaling import double
from gaugekit.linalg.spectra import grams, product_spectrum, spectrum_from_grams
from gaugekit.linalg.truncation import moment_factor, product_truncation, square_factor

__all__ = [
    "ZERO_TIE",
    "apart",
    "balance",
    "balance_defect",
    "beside",
    "column_pivots",
    "degenerate_blocks",
    "double",
    "effective_rank",
    "grams",
    "moment_factor",
    "numerical_rank",
    "orthonormal_complement_of_ones",
    "product_spectrum",
    "product_svd",
    "product_truncation",
    "random_invertible",
    "random_orthogonal",
    "spectrum_from_grams",
    "square_factor",
    "stable_rank",
]
