"""The shared core of dgemma: no backend, no framework.

Load a model with `mlx_dgemma.load()` (or `cuda_dgemma.load()`); what it returns is
`dgemma.model.Model`. Importing this package imports nothing else.
"""

__version__ = "0.1.0"
