"""Files of requests answered as a whole, in OpenAI's batch format, and taken up again where a run ended."""
