"""The errors of the package. Each also is the built-in error that callers expect of such a mistake."""


class SpecDecError(Exception):
    """Base class of all errors raised by `hf_specdec`."""


class SpecConfigError(SpecDecError, ValueError):
    """A setting, or a combination of settings, that cannot be honoured."""


class CheckpointFormatError(SpecDecError, ValueError):
    """A checkpoint that does not have the promised format, or does not fit its target model."""


class CheckpointAccessError(CheckpointFormatError, OSError):
    """A checkpoint that cannot be reached: there is none of that name, no access to it, or no connection."""


class UnsupportedModelError(SpecDecError, NotImplementedError):
    """A target or draft model whose architecture cannot be driven by the decoding loop."""


class MissingDependencyError(SpecDecError, ImportError):
    """An optional package that the chosen method needs is not installed."""
