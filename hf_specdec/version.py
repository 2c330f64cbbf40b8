"""The version of the package, and how to install it."""

__version__ = "0.1.0"

# It is on no index: what an index has under its name, now or later, is not this package.
INSTALLATION = "`pip install PATH`, the path of its checkout or its wheel"
