"""Where text comes from: the standard library, files, the Hub, collected answers."""
