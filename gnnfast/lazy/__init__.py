"""Rows of edges that do not exist, which a user's own function gets in place of gathered features, and what it makes of them."""

from gnnfast.lazy import operations, views  # noqa: F401 (they say what torch's operations do to such rows)
