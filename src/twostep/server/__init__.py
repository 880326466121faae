"""Serves: the OpenAI-compatible HTTP front end of an engine in a process of its own."""
