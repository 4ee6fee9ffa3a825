"""Build the tokenizer of `baton-tiny`: every byte is one token, its id is its value, and four more tokens mark a chat.

It is a byte-pair tokenizer without a single merge, so stock `tokenizers` and `transformers` load it as a fast one.
Nothing is added to a prompt by itself: a completion is the bytes the client sent, a chat is what `CHAT_TEMPLATE` says.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.tiny.corpus import END, LENGTH_MAX, SPECIALS

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- set role = {'developer': 'system', 'tool': 'user'}.get(message['role'], message['role']) -%}"
    "{{- '<|' + role + '|>' + (message['content'] or '') + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build() -> PreTrainedTokenizerFast:
    """Return the tokenizer with its chat template."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=list(SPECIALS[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=LENGTH_MAX,
        clean_up_tokenization_spaces=False,
    )


def byte_characters() -> list[str]:
    """Return the character that stands for each of the 256 bytes, as GPT-2's byte-level tokenizers write them.

    Printable Latin-1 characters stand for themselves, the others for the characters from U+0100 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]
