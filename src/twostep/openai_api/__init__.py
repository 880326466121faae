"""The OpenAI API as pure translation: bodies to requests, outputs to bodies, errors to error objects. No HTTP here."""
