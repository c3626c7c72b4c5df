"""The mathematics of SAO and of the methods it is compared with: pure torch functions.

No I/O, no config object, no nn.Module in here. Shapes: B batch (trajectories), T tokens.
"""
