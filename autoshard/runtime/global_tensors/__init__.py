"""Tensors that ranks share and user code computes with: results of forward, rows of a loader.

In comes a DTensor (or a rank's rows, with what they are a part of); out goes a `GlobalTensor`,
which has the values and gradients of one device in every function of torch. May import layouts
and, of the runtime, reshardings, DTensors and the comparison of ranks.
"""
