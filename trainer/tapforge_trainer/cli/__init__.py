"""The command `tapforge`: one file for each group of subcommands; `main.py` has the groups. Nothing else imports
them."""
