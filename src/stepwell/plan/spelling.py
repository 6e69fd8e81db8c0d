"""What to say to somebody who has misspelt a name: the nearest right one, in the first line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from stepwell.errors import UsageError


def misspelt(what: str, text: str, known: Iterable[str], more: str = "") -> UsageError:
    """The error for a name that is not known; `more` is what else could have been said."""
    names = list(known)
    near = difflib.get_close_matches(text.lower(), names, 1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    return UsageError(f"no such {what}: {text!r}{hint}", todo="there are: " + ", ".join(names) + more)
