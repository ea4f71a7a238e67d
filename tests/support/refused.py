"""The errors that users see."""

import pytest


def refused(call, *arguments, **options) -> str:
    """Call what must raise ValueError, and return its message, which is one line."""
    with pytest.raises(ValueError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)
