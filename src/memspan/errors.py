"""The one error that users see: a line that says what is wrong and what to do about it."""


class MemspanError(ValueError):
    """A mistake outside memspan's code: a bad file, option or environment.

    The command line prints the message as one line and exits with status 2; in Python it is a
    ``ValueError``. The message says what is wrong *and* what to do.
    """
