"""Serving: requests of many clients over HTTP, decoded together."""
