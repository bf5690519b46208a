"""A release: what it is made of (`make release`), and the check of its wheel (`make check-wheel`). docs/release.md."""
