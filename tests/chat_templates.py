"""Chat templates in the layouts of well-known models, on a small tokenizer; and the real one of Qwen3."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.model_factory import END_OF_TURN, tiny_tokenizer
from tests.shared_data import shared_data

_TOOLS = (
    "{{ 'Tools:\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    '{{ \'Call one so: <tool_call>{"name": <its name>, "arguments": <a JSON object>}</tool_call>\' }}'
)
_TOOLS_IN_ANOTHER_FORM = (
    '{{ \'To use a function, say only {"name": its name, "parameters": its arguments by name}.\n\' }}'
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}"
)
QWEN2_5 = (
    "{% set own = messages[0]['content'] if messages[0]['role'] == 'system' else 'You are a friendly assistant.' %}"
    "{{ '<|im_start|>system\\n' + own }}{% if tools %}{{ '\\n\\n' }}" + _TOOLS + "{% endif %}{{ '<|im_end|>\\n' }}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{% elif not (loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3_1 = (
    "{{ '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% endif %}{{ '<|eot_id|>' }}"
    "{% set ns = namespace(told=false) %}"
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if tools and message['role'] == 'user' and not ns.told %}{% set ns.told = true %}"
    + _TOOLS_IN_ANOTHER_FORM
    + "{% endif %}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a small assistant<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}"
    "{% else %}{{ message['content'] + '</s>' }}{% endif %}{% endfor %}"
)
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2.5": (QWEN2_5, ("<|im_start|>", END_OF_TURN)),
    "llama-3.1": (LLAMA_3_1, ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")),
    "smollm2": (SMOLLM2, ("<|im_start|>", END_OF_TURN)),
    "no-system": (NO_SYSTEM, ("</s>", "[INST]", "[/INST]")),
}
"""Template and special tokens, by the model whose layout it is."""


@cache
def chat_tokenizer(layout: str) -> Any:
    """The small tokenizer with a layout's template and control tokens; `qwen3` is the real tokenizer."""
    if layout == "qwen3":
        return AutoTokenizer.from_pretrained(shared_data("tokenizers/qwen3"))
    template, special = LAYOUTS[layout]
    return with_template(template, special)


def with_template(template: str, special: tuple[str, ...] = ("<|im_start|>", END_OF_TURN)) -> Any:
    plain = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(plain)),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer
