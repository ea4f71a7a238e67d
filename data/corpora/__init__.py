"""Sources of text: the standard library, local files, the Hub, collected teacher answers."""
