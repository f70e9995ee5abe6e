"""The errors that rotfed raises. Every message gives the name, what was expected, what was found, the remedy."""


class RotfedError(ValueError):
    """Base of every error that rotfed raises on purpose; nothing was changed when one is raised."""


class SpecError(RotfedError):
    """A symmetry spec is missing, malformed, or does not fit the model or the parameters it is used with."""


class TransformError(RotfedError):
    """A transform's elements are not members of their groups, do not fit its spec, or lead out of a type's range.

    `groups` are then those whose elements do.
    """

    groups: tuple[str, ...] = ()


class AlignmentError(RotfedError):
    """Two models cannot be aligned or merged: unequal parameters, non-finite values, impossible options."""


class FunctionChangedError(RotfedError):
    """A transform that should have kept the function of a model changed it: the spec is wrong."""


class RecordError(RotfedError):
    """A Flower record cannot be read as the parameters of the model that was sent out."""


class ConvergenceWarning(UserWarning):
    """An iteration stopped at its limit before it settled; its result is valid, but could be nearer."""
