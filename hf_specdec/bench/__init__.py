"""Measures ways of decoding beside each other: plain generation, the methods, and transformers' own.

prompts     files of prompts, Spec-Bench's questions, and batches of them
decoders    the ways of decoding that are compared
engine      timed calls, in rounds
report      the figures as JSON
"""
