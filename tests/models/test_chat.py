"""Chat templates: the sandbox, and conversations with a tool under the habits of each family's template.

The templates are minimal ones with the habits of the families' published templates that matter for a tool's turn.
"""

import datetime

import pytest
import tokenizers

from async_rl.models._chat_template import ChatTemplate
from async_rl.models._tokenizers import HFTokenizer

ASK = [{"role": "user", "content": "What is 12 + 34?"}]

#: Qwen: tools answer in a user's turn, consecutive answers in one; there is always a system turn.
_QWEN_TOOL = (
  "{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
  "\n<tool_response>\n{{ m.content }}\n</tool_response>"
  "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_QWEN = (
  "<|im_start|>system\nBe helpful.<|im_end|>\n{% for m in messages %}"
  "{% if m.role == 'tool' %}"
  + _QWEN_TOOL
  + "{% else %}<|im_start|>{{ m.role }}\nTHOUGHTS{{ m.content }}<|im_end|>\n{% endif %}"
  + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
  "qwen2.5": _QWEN.replace("THOUGHTS", ""),
  # Qwen 3 opens thoughts in the last turn of the assistant, and in no other.
  "qwen3": _QWEN.replace("THOUGHTS", "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"),
  # Llama 3.x begins with a date, calls the tool's role by another name, and quotes what the tool says as JSON.
  "llama3": (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ strftime_now('%d %b %Y') }}<|eot_id|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
  ),
  # Gemma 3 knows two roles, which must alternate, and trims.
  "gemma3": (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
  ),
}
SPECIALS = {
  "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
  "llama": ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
  "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
}
#: The role in which a tool answers.
ROLES = {"qwen2.5": "tool", "qwen3": "tool", "llama3": "tool", "gemma3": "user"}


def make(family, **options):
  """A byte-level tokenizer without merges, with the special tokens and the template of a family."""
  specials = next(value for key, value in SPECIALS.items() if family.startswith(key))
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocab = {token: id for id, token in enumerate([*specials, *alphabet])}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(list(specials))
  bos_id = None if family.startswith("qwen") else 0
  return HFTokenizer(tokenizer, bos_id=bos_id, chat_template=TEMPLATES[family], **options)


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_conversation_continued_by_turns_is_the_one_rendered_at_once(family):
  """Token ids in, token ids out: the prompt, the drawn tokens up to the stop token, the tool's turn, and so on."""
  tokenizer = make(family)
  messages, ids = list(ASK), tokenizer.encode_prompt(ASK)
  for call, result in (("<calc>12 + 34</calc>", '46 "ok"\n'), ("<calc>46 * 2</calc>", "  92")):
    ids += [*tokenizer.encode(call), tokenizer.stop_ids[0]]
    ids += tokenizer.encode_turn(result, ROLES[family])
    messages += [{"role": "assistant", "content": call}, {"role": ROLES[family], "content": result}]
  assert ids == tokenizer.encode_prompt(messages)
  assert ids.count(0) == (0 if family.startswith("qwen") else 1), "one BOS"


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_tool_can_neither_end_its_turn_nor_open_another(family):
  tokenizer = make(family)
  mark = tokenizer._names[2]
  honest, forged = (tokenizer.encode_turn(f'7 "{text}"', ROLES[family]) for text in ("x", mark))
  marks = [id for id in forged if id in tokenizer._special_ids]
  assert marks == [id for id in honest if id in tokenizer._special_ids]
  # Beside the mark, the template treats both alike: it quotes, trims and wraps.
  assert tokenizer.decode(forged) == tokenizer.decode(honest).replace("x", mark)


def test_a_role_that_the_template_refuses_is_refused_with_its_reason():
  with pytest.raises(ValueError, match="refuses the messages: Roles must alternate"):
    make("gemma3").encode_turn("46", "tool")


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{% for m in messages %}{{ m.role }}{% endfor %}<|im_end|>", "does not write the model's turn"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not end the model's turn with a stop token"),
  ],
)
def test_templates_that_cannot_continue_a_conversation_are_named(template, message, monkeypatch):
  monkeypatch.setitem(TEMPLATES, "qwen3", template)
  with pytest.raises(ValueError, match=message):
    make("qwen3").encode_turn("46")


def test_the_date_of_a_template_is_fixed():
  tokenizer = make("llama3")
  assert "Today Date: 26 Jul 2024" in tokenizer.decode(tokenizer.encode_prompt(ASK))
  other = make("llama3", date=datetime.date(2025, 1, 2))
  assert "Today Date: 02 Jan 2025" in other.decode(other.encode_prompt(ASK))


def test_templates_are_sandboxed():
  for attack in (
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ strftime_now.__self__.__class__.__subclasses__() }}",
    "{{ raise_exception('no such role') }}",
  ):
    with pytest.raises(ValueError, match="refuses"):
      ChatTemplate(attack).render([])


def test_templates_have_the_features_that_families_use():
  assert ChatTemplate("{% for m in messages %}{% break %}{% endfor %}x").render([{}]) == "x"
  assert ChatTemplate("{{ messages | tojson }}").render([{"role": "<é>"}], tools=None) == '[{"role": "<é>"}]'
  with pytest.raises(ValueError, match="line 2"):
    ChatTemplate("a\n{% if %}")
