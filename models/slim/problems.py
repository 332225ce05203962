"""What ends a command with a sentence."""


class Problem(Exception):
    """Something that was asked for and cannot be; the message says what was expected and what was found."""


def why(error):
    """An OSError in words, without the path."""
    return (error.strerror or str(error)).lower()
