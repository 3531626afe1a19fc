"""Every public function has an example; `tests/test_docstrings.py` runs them."""

from async_rl import stabilizers


def test_every_public_function_has_an_example():
  public = [value for name, value in vars(stabilizers).items() if callable(value) and not isinstance(value, type)]
  assert len(public) >= 5
  assert [function.__name__ for function in public if ">>>" not in function.__doc__] == []
