"""Chat templates by LLaMA-Factory's names: checked against the tokenizer's own, supplied where it has none."""

from __future__ import annotations

from typing import Any

from search_r1.errors import ConfigError
from search_r1.llamafactory_keys import nearest

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA3 = (
    "{% for message in messages %}{{ (bos_token or '') if loop.first }}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_SUPPLIED = {"<|im_start|>": _CHATML, "<|start_header_id|>": _LLAMA3}
_MARKERS = {
    "<|im_start|>": "chatml qwen qwen3 qwen3_nothink smollm smollm2 hermes2 intern2 marco yi",
    "<|start_header_id|>": "llama3",
    "[INST]": "llama2 llama2_zh mistral mistral_small ministral",
    "<start_of_turn>": "gemma gemma2 gemma3",
    "<|assistant|>": "phi phi_small phi3 glm4 chatglm3 tulu3",
    "<|im_sep|>": "phi4",
    "<｜Assistant｜>": "deepseek3 deepseekr1",
}
"""What the turns of each template are marked by."""
_MARKER_OF = {name: marker for marker, names in _MARKERS.items() for name in names.split()}


def choose_chat_template(tokenizer: Any, name: str) -> None:
    """Leave the tokenizer with the chat template of that name; it is saved with the model, for RL to use.

    `auto` keeps the tokenizer's own. `empty` takes it away: texts then follow one another bare.

    Raises:
        ConfigError: an unknown name, or one that does not fit the tokenizer.
    """
    if name == "auto":
        return
    if name == "empty":
        tokenizer.chat_template = None
        return
    if name not in _MARKER_OF:
        names = ["auto", "empty", *_MARKER_OF]
        raise ConfigError(f"there is no chat template {name!r}{nearest(name, names)} (there are {', '.join(names)})")
    marker, own = _MARKER_OF[name], getattr(tokenizer, "chat_template", None)
    if own:
        if marker not in str(own):
            raise ConfigError(
                f"the chat template {name!r} marks turns by {marker}, which the tokenizer of the model never writes: "
                "name the template of this model, or `auto` to take the tokenizer's own"
            )
    elif marker in _SUPPLIED and marker in tokenizer.get_vocab():
        tokenizer.chat_template = _SUPPLIED[marker]
    else:
        raise ConfigError(
            f"the tokenizer has no chat template, and {name!r} cannot be supplied for its vocabulary: take the model's "
            "chat variant, or `empty` to train on bare texts"
        )
