"""Machinery that several drafting methods share."""
