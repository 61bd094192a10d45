"""The errors that a user can mend."""


class UserError(ValueError):
    """A mistake in a config, a path or an argument; its message names the thing and the remedy.

    The command-line tools print it as one line, without a traceback, and exit with status 1.
    """


def one_line(error: Exception) -> str:
    """What an error of a library says, in one line."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split()) or type(error).__name__
