"""Grammars that constrain a text: one contract over the libraries, and masks for whole drafts.

matchers.py               the contract: a row's place in a grammar, masks after all nodes of a draft, forced tokens
libraries.py              the libraries, each in its own terms
processor.py              `hf_specdec.grammar()`, a logits processor of any text
masks.py                  the grammar of a call's rows, whose processor it is: masks on scores, and on drafts
"""
