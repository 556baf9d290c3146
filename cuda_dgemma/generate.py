"""`python -m cuda_dgemma.generate "prompt"`: `dgemma generate` on the CUDA backend."""

import sys

from dgemma.cli import command_main

if __name__ == "__main__":
    sys.exit(command_main("generate", backend="cuda", prog="python -m cuda_dgemma.generate"))
