"""Grammars that constrain a text: one contract over the libraries, and masks for whole drafts.

matchers.py               the contract: a row's place in a grammar, masks after all nodes of a draft, forced tokens
<library>_matcher.py      the libraries, each in its own terms
recognition.py            whose processor is which grammar
processor.py              `hf_specdec.grammar()`, a logits processor of any text
rows.py, masks.py         the grammar of a call's rows, drafts within it, and masks on scores
"""
