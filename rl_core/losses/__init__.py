"""Pure functions of tensors and floats: losses, advantages, KL estimators, importance weights.

Every loss returns (loss, metrics). Loss and metrics are divided by the global denominator that the caller passes (the
loss tokens, sequences or pairs of the whole optimizer step), so that those of micro-batches add up; metrics whose name
ends in `_max` or `_min` combine by max or min.
"""
