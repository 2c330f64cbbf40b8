"""`hf-specdec bench`: methods beside plain generation and transformers' own, on the user's model and prompts.

prompts     files of prompts, Spec-Bench's questions
decoders    the ways of decoding that are compared
measure     timed calls, in rounds
figures     medians, percentiles and spreads
report      what was measured, as JSON
plots       the same as charts
"""
