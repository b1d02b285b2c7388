"""Names of processes, command lines and file names are anybody's: none may steer a terminal or add a line to a log."""


def clean(text: object) -> str:
    """What is not printable becomes ``?``."""
    return "".join(c if c.isprintable() else "?" for c in str(text))
