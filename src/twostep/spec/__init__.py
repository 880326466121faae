"""States: model shapes and the arithmetic of their memory. Pure, imports nothing of ours."""
