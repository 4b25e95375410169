"""The one error that a user's mistake raises: it names the value and the fix."""


class UserError(ValueError):
    """A wrong path, option, checkpoint or prompt.

    The command line prints its text without a traceback and exits with code 2.
    """
