"""The mathematics of SAO and of the methods it is compared with: pure torch functions.

    statistics   masked sums and means, explained variance
    importance   importance ratio and trust region              (equations 2 and 3)
    advantages   advantages and value targets over action tokens (equations 4 and 5)
    baselines    small memories of past rewards, for the methods without a critic
    objectives   policy loss, value loss, entropy, divergence    (equation 1)

No I/O, no config object, no nn.Module in here. Shapes: B batch (trajectories), T tokens,
V vocabulary. Tensors of shape [B, T] are padded and share one alignment: position t of
`policy_logprobs`, `rewards`, `advantages` belongs to token t, and `values[b, t]` is V of the
state in which token t was chosen (the critic's output at position t - 1). Masks are boolean,
True counts. What stands outside `action_mask` never matters, not even NaN or infinity.
Log-probabilities and divergences are in nats. docs/algorithm.md maps the paper's symbols.
"""
