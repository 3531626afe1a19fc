"""Chat templates: Jinja programs that come with a checkpoint and turn messages into text.

They are code from the outside, so they run in Jinja's sandbox, where they can neither reach Python's internals nor
change what they are given.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

#: The date that templates write unless told otherwise.
TEMPLATE_DATE = datetime.date(2024, 7, 26)


class ChatTemplate:
  """A chat template, ready to render.

  Some templates write today's date into every prompt (Llama 3.2). Here they get a fixed one, so that a run that is
  resumed tomorrow, or repeated next year, sees the same prompts.

  >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}")
  >>> template.render([{"role": "user", "content": "Hi"}])
  '<user>Hi</s>'
  """

  def __init__(
    self, source: str, special_tokens: Mapping[str, str] | None = None, *, date: datetime.date = TEMPLATE_DATE
  ):
    """Compiles a template.

    Args:
      source: the Jinja source, as in `chat_template` of a tokenizer's configuration.
      special_tokens: the variables of the template such as `bos_token`.
      date: the result of the template's `strftime_now`; the default is the date that Llama 3.1's template writes.

    Raises:
      ValueError: if the template is not valid Jinja.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=date.strftime)
    self.source = source
    self._variables = dict(special_tokens or {})
    try:
      self._template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
      raise ValueError(f"The chat template is not valid Jinja (line {error.lineno}): {error.message}") from error

  def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
    """Returns the text of a conversation.

    Args:
      messages: the turns so far, each `{"role": ..., "content": ...}`.
      add_generation_prompt: whether to open the assistant's turn at the end.
      **variables: the other variables of the template, for example `tools` or `enable_thinking`.

    Raises:
      ValueError: if the template refuses the messages, for example for an unknown role.
    """
    try:
      return self._template.render(
        messages=messages, add_generation_prompt=add_generation_prompt, **(self._variables | variables)
      )
    except jinja2.TemplateError as error:
      raise ValueError(f"The chat template refuses the messages: {error}") from error
    except Exception as error:  # a program from outside may fail in any way
      raise ValueError(f"The chat template fails on the messages: {type(error).__name__}: {error}") from error


class _Generation(jinja2.ext.Extension):
  """Accepts `{% generation %}` blocks, which mark the model's own text and write what they contain."""

  tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

  def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
  return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own filter escapes HTML
