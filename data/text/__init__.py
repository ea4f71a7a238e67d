"""Text to token ids: tokenizers, chat templates and prompt sets."""
