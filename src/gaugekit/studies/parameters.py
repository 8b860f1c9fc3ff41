"""Do heads train better where their parameters are the invariants G_QK and G_VO?

All arms start from one function: standard heads as drawn; the same, moved to where W_Q and W_K, and W_V and W_O, are
equally long in every direction; and the same in invariants. These are the numbers of `InvariantAttention`: of rank k
(2dk − k² a product, each function once), the same with units added to the MLP until parameters are those of standard
heads, and the full form, whole (d, d) matrices.

Rule, fixed before the first run. The difference of held-out loss after equal steps, invariants of rank k less standard
heads, seed by seed, in percent of the standard arm's mean. Confirmed if the 95 % interval ends below 1 %: better, or
as good for what matters. Not confirmed if it begins above 1 %. Else inconclusive. What broke off in a run is infinitely
bad. Whether it is better than standard heads is said: only if the interval ends below 0. The other arms and measures
are shown beside, and decide nothing.
"""
