"""Whether this machine can run what a file asks for: `tapforge doctor`, and its quick part at the start of a run.

- `machine.observe` looks at the machine (`Facts`); `findings.diagnose` is pure: facts and needs -> findings, each with
  its remedy.
- `fail` means that the run can't work here; `warn`, that it may work badly or fail later. What was not looked at is not
  spoken of.
- The quick part starts no process and connects to nothing but this machine and its Ray. The whole one asks torch what
  it sees, in a process of its own, and the hub, each with a deadline.
"""
