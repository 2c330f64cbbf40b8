"""A call as a page: the text by who wrote it, every cycle with its draft, and where the time went.

`story` says what happened and `pieces` how each token reads; `assembly` makes one file of them with `page.css` and
`page.js`. Nothing here imports torch.
"""

from .assembly import in_notebook, page


__all__ = ["in_notebook", "page"]
