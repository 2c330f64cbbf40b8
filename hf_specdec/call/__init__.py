"""One call of `generate()`: what it asks for, what is refused, its parts, and what it returns."""
