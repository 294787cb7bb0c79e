"""What both clients need: the expected view of the machine, and checks that say what they saw.

TEST_LIMIT is the quota in bytes, absent on the bare driver. TEST_UUIDS are the machine's GPUs.
"""

import os
import sys

LIMIT = int(os.environ["TEST_LIMIT"]) if "TEST_LIMIT" in os.environ else None
UUIDS = os.environ["TEST_UUIDS"].split(",")
MIB = 1 << 20


def same(what, seen, expected):
    """Ends the test unless the two are equal."""
    if seen != expected:
        sys.exit(f"{what}: {seen!r}, expected {expected!r}")


def holds(what, condition):
    """Ends the test unless the condition holds."""
    if not condition:
        sys.exit(f"{what} does not hold")
