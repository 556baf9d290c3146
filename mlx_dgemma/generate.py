"""`python -m mlx_dgemma.generate "prompt"`: `dgemma generate` on the MLX backend."""

import sys

from dgemma.cli import command_main

if __name__ == "__main__":
    sys.exit(command_main("generate", backend="mlx", prog="python -m mlx_dgemma.generate"))
