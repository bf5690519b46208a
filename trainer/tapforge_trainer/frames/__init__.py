"""A screen as a model sees it, fitted once and named by its content, and handles by which processes share it."""
