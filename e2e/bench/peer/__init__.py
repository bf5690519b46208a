"""The scenario `peer`: tapforge beside agent-sandbox."""
