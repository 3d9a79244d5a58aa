"""Cases whose time goes into arithmetic."""

from rows import Group

GROUP = Group(cases={}, samples={}, signatures={})
