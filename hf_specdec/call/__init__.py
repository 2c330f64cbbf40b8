"""One call of `generate()`: what it asks for, what is refused, and what it returns."""
