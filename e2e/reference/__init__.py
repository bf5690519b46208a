"""The generated pages of docs/reference: `python -m e2e.reference`."""
