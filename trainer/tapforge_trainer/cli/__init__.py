"""The command `tapforge`: `main.py` has the commands of a run and adds those of the other files, `tapforge agent`,
`cluster`, `doctor`, `env`, `explain` and `phone`; `play.py` is `env play`. No other room imports this one."""
