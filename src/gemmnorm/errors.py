"""The exceptions and the warning category that gemmnorm raises."""


class GemmNormError(Exception):
    """Base of every error that gemmnorm raises on purpose.

    Errors about an argument also inherit Python's own type, so that callers who catch `ValueError` or `TypeError`,
    as `nn.BatchNorm1d` and `F.linear` would raise them, keep working.
    """


class GemmNormValueError(GemmNormError, ValueError):
    """An argument has a right type and an impossible value or shape."""


class GemmNormTypeError(GemmNormError, TypeError):
    """An argument has a type, dtype or device that does not go with the others."""


class GemmNormProductValueError(GemmNormValueError, RuntimeError):
    """Sizes that do not go together, for which `F.linear` and `F.batch_norm` raise a `RuntimeError`."""


class GemmNormProductTypeError(GemmNormTypeError, RuntimeError):
    """Dtypes or devices that cannot be multiplied, for which `F.linear` raises a `RuntimeError`."""


class GemmNormRuntimeError(GemmNormError, RuntimeError):
    """The operation cannot be carried out (a second derivative, a strategy that this machine cannot run)."""


class GemmNormWarning(UserWarning):
    """Something was done another way than asked for; the result is right all the same."""
