"""Answers files of requests in OpenAI's batch format; an interrupted run can be resumed."""
