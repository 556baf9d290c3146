"""The errors a user can cause, and the warnings we give.

Every message is one line that names the thing and the fix: the command line prints it as it is.
Not here: `assert`, which states our own invariants, and plain `ValueError`s of single arguments.
"""

from __future__ import annotations


class DgemmaError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(DgemmaError, ValueError):
    """A configuration file, or a setting of a request, that cannot be right."""


class CheckpointError(DgemmaError, ValueError):
    """A checkpoint that cannot be found, read or trusted."""


class BackendError(DgemmaError, RuntimeError):
    """A backend that cannot run here (framework missing, no device, too little memory)."""


class NonFiniteError(DgemmaError, ArithmeticError):
    """NaN or infinity instead of a probability: a broken checkpoint or too small a dtype."""


class ContextLengthError(DgemmaError, ValueError):
    """A prompt that leaves no room for a reply within the model's context."""


class PromptError(DgemmaError, ValueError):
    """A prompt that cannot be used: empty, malformed messages, unknown roles, ids out of range."""


class DgemmaWarning(UserWarning):
    """Something unexpected that we went on with; the message says how."""
