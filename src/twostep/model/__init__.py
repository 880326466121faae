"""Describes: weight files, tokenizer, chat template, and the network as a list of operations."""
