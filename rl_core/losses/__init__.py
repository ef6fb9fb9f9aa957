"""Pure functions of tensors and floats: losses, advantages, KL estimators, importance weights.

Every loss returns (loss, metrics). Both are divided by the global denominator that the caller passes (the loss tokens,
sequences or pairs of the whole optimizer step), so that the values of micro-batches add up. Metrics whose name ends in
`_max` or `_min` combine by max or min.
"""
