"""The errors that a user can mend."""


class UserError(ValueError):
    """A mistake in a config, a path or an argument; its message names the thing and the remedy.

    The command-line tools print it as one line, without a traceback, and exit with status 1.
    """
