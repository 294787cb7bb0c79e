"""A phase's time, divided among its parts."""

import time


class Slot:
    """One part's time."""

    def __init__(self, allotted, scale):
        self.allotted, self.scale = allotted, scale
        self.end = time.monotonic() + allotted

    def left(self):
        """Seconds."""
        return self.end - time.monotonic()

    def is_over(self):
        """Nothing more may begin."""
        return self.left() <= 0

    def seconds(self, wanted, least):
        """How long to measure where `wanted` would be good and less than `least` says nothing."""
        return max(least, wanted * self.scale)


class Budget:
    """What is left is divided in proportion to what the parts to come need."""

    def __init__(self, minutes, needs):
        self.end = time.monotonic() + minutes * 60
        self.needs = dict(needs)
        self.is_short = False

    @classmethod
    def least(cls, names):
        """As little of everything as says anything, however long it takes on a busy machine."""
        budget = cls(60, [(name, 1) for name in names])
        budget.is_short = True
        return budget

    def leave_out(self, name):
        """A part that is not measured needs no time."""
        self.needs.pop(name, None)

    def enter(self, name):
        """A part begins."""
        left = max(0.0, self.end - time.monotonic())
        together = sum(self.needs.values())
        needs = self.needs.pop(name)
        if self.is_short:
            return Slot(left, 0.0)
        scale = left / together
        # A part that was quicker than thought leaves its time to those after it.
        return Slot(needs * scale, min(scale, 1.5))
