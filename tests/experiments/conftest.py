"""Runs of equal models and sizes share their programs, and only runs whose picture a test looks at draw it."""

from sharing import draws_pictures  # noqa: F401
from sharing import no_pictures  # noqa: F401
from sharing import shared_programs  # noqa: F401
