"""A served engine for tests: the process, a client that stamps tokens, and the engine's record."""
