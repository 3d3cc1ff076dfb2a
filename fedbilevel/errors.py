"""The two ways a run can end that are not a defect of the package."""


class InputError(ValueError):
    """Something the user gave cannot be used: one line with the thing, the value and the remedy."""


class Diverged(ArithmeticError):
    """The iterates left the finite numbers, or a loss its bound: one paragraph with what to try."""
