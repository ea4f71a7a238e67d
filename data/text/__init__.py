"""From text to token ids: tokenizers, chat templates, prompt sets."""
