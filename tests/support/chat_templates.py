"""Small chat templates in the style of several families, the control tokens that they write, and an independent
environment to render them in."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from support.gguf_writer import write_gguf
from support.small_vocabulary import small_tokenizer_metadata

from twostep.model.gguf import read_gguf
from twostep.model.template import ChatTemplate
from twostep.model.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Family:
    """`system`: whether the template takes a system message."""

    source: str
    control: tuple[str, ...]
    system: bool = True


CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>"
    "\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set talk = messages[1:] %}{% else %}{% set talk = messages %}{% endif %}"
    "{% for message in talk %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{% if loop.last and system is defined %}{{ '[INST] ' ~ system ~ '\n\n' ~ message['content'] ~ '[/INST]' }}"
    "{% else %}{{ '[INST] %s[/INST]' % message['content'] }}{% endif %}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)

GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

QWEN3 = """
{%- macro turn(role, text) -%}{{ '<|im_start|>' ~ role ~ '\n' ~ text ~ '<|im_end|>\n' }}{%- endmacro %}
{%- if tools %}{{- '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}
{%- endif %}{{ '# Tools' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- turn('system', messages[0].content) }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- turn(message.role, message.content) }}
{%- elif message.role == 'assistant' %}
    {%- set content = message.content %}{% set thought = '' %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last %}{{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content }}
    {%- else %}{{- '<|im_start|>assistant\n' + content }}{% endif %}
    {%- for call in message.tool_calls or [] %}{% set call = call.function %}
    {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}
    {{- '}\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{{- turn('user', '<tool_response>\n' + message.content + '\n</tool_response>') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

PARTS = (
    "{{ bos_token }}{% for message in messages %}{{ '<\uff5c' ~ message.role | capitalize ~ '\uff5c>' }}"
    "{% for part in message.content %}{% if part['type'] == 'text' %}"
    "{% generation %}{{ part['text'] }}{% endgeneration %}{% endif %}{% endfor %}{{ eos_token }}{% endfor %}"
)
"""Content is a list of parts, and of nothing else."""

FAMILIES = {
    "chatml": Family(CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": Family(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": Family(MISTRAL, ("[INST]", "[/INST]")),
    "gemma": Family(GEMMA, ("<start_of_turn>", "<end_of_turn>"), system=False),
    "qwen3": Family(QWEN3, ("<|im_start|>", "<|im_end|>")),
    "parts": Family(PARTS, ("<\uff5cSystem\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")),
}
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}
CONTROL = tuple(sorted({*MARKS.values(), *(token for family in FAMILIES.values() for token in family.control)}))
KEPT_WHOLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""User-defined tokens."""


def family_tokenizer(folder: Path, pre: str = "qwen2") -> Tokenizer:
    """Bytes, a few merges, and the special tokens of all families."""
    values = small_tokenizer_metadata()
    tokens = [*values["tokenizer.ggml.tokens"][:-3], *CONTROL, *KEPT_WHOLE]  # type: ignore[index]
    kinds = [1] * len(tokens)
    kinds[-len(CONTROL) - len(KEPT_WHOLE) :] = [3] * len(CONTROL) + [4] * len(KEPT_WHOLE)
    named = {"tokens": tokens, "token_type": np.array(kinds, np.int32), "pre": pre}
    path = write_gguf(folder / f"{pre}.gguf", values | {f"tokenizer.ggml.{key}": value for key, value in named.items()})
    return load_tokenizer(read_gguf(path).metadata)


def family_template(name: str) -> ChatTemplate:
    return ChatTemplate(FAMILIES[name].source, name, MARKS)


def plainly_rendered(source: str, variables: dict[str, Any]) -> str:
    """By Jinja alone, without the block `generation`."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _dumps
    source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return environment.from_string(source).render({**MARKS, **variables})


_dumps: Callable[..., str] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})  # noqa: E731
