"""The commands of the command line, one module each; `dgemma.cli` lists them.

A command module has `DESCRIPTION`, `add_arguments(parser, backend)` and `run(args)`, which returns
the exit status. It imports what it works with inside `run`, so that `--help` imports nothing.
`flags.py` is no command: it holds the flags that several share.
"""
