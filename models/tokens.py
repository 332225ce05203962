"""Text to token ids and back, as the checkpoint's own tokenizer.json says; and its template for a chat.

The libraries made for it do the work: `tokenizers`, and `jinja2` for the template.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer

from models.config import BadModel, read_json


class Tokens:
    """A folder's tokenizer. BadModel where there is none or it cannot be read."""

    def __init__(self, folder):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise BadModel(f"{folder}: expected a tokenizer in tokenizer.json, found none")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise BadModel(f"{path}: cannot be read as a tokenizer: {error}") from None

    def encode(self, text, *, special=True):
        """Token ids of a text. special: with those that the tokenizer puts around it, such as the beginning's."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids):
        """The text of token ids, special ones left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat(self, message):
        """Token ids of a conversation that begins with this message, up to where the answer begins.

        BadModel where the checkpoint has no template, or its template does not take one message.
        """
        import jinja2.sandbox  # a tenth of a second, for those who chat

        template, special = self._template()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
        messages = [{"role": "user", "content": message}]
        try:
            text = environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
        except jinja2.TemplateError as error:
            raise BadModel(f"{self.folder}: its chat template does not take a message: {error}") from None
        return self.encode(text, special=False)

    def stream(self, ids):
        """Pieces of text, as token ids come: an iterator. A piece may be empty, while a character is not whole.

        The text of all ids so far is what `decode` gives for them, up to the last whole character."""
        seen, shown, text = [], 0, ""
        for token in ids:
            seen.append(token)
            text = self.decode(seen)
            if text.endswith("\ufffd"):  # the bytes of a character that is still to come
                yield ""
                continue
            yield text[shown:]
            shown = len(text)
            if "\n" in text[-1:] and len(seen) > 64:  # so that long texts are not decoded from their start each time
                seen, shown = [], 0
        yield text[shown:] if seen else ""

    def _template(self):
        path = self.folder / "tokenizer_config.json"
        found = read_json(path) if path.is_file() else {}
        special = {name: _text(found[name]) for name in ("bos_token", "eos_token") if found.get(name) is not None}
        file = self.folder / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.is_file() else found.get("chat_template")
        if isinstance(template, list):  # several by name
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        if not template:
            raise BadModel(f"{self.folder}: expected a chat template in tokenizer_config.json, found none")
        return template, special


def _text(token):
    return token["content"] if isinstance(token, dict) else token


def _refuse(message):
    import jinja2

    raise jinja2.TemplateError(message)
