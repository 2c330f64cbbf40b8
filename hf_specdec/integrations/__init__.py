"""Other libraries that generate: a module for each, imported by those who use it."""
