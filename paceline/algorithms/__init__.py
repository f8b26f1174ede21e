"""The mathematics of RL post-training as pure functions: tensors and floats in, tensors out.

Columns are (batch, response) with a mask of the same shape; what lies outside the mask, even NaN, has no effect.
"""
