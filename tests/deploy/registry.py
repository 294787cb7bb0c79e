"""The checks of deploy/, by name."""

CHECKS = {}


def check(function):
    """Names a check as its function, with dashes."""
    CHECKS[function.__name__.replace("_", "-")] = function
    return function
