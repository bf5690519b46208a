"""Claims: exclusive rights to slots, written on the cluster before they are answered.

What decides, each importing only what stands below it (`pyproject.toml` holds them to it). All of it is pure:

| module | decides |
|---|---|
| `ledger` | whether a request is granted, waits or is refused: requests, turns, quotas, releases. The rules are there |
| `claims` | what becomes of a slot's claim: observed, granted, held, renewed, expired, revoked, given back, foreign |
| `slots` | whether a slot can be granted at this moment, and every count that the others go by |
| `scheduling` | which free slot is next, whose turn it is, and which claimants give slots back |
| `types`, `claim_record` | nothing: the records they hand around, and the record that is written on a slot |

What acts: `http` answers callers, `auth` authenticates them, `service` puts a ledger to work for one term, `writer`
writes what it decided, `renewals` keeps time, `external` and `pools` know devices that are not Pods, `tls`, `material`
and `certificates` hold the keys. Nothing here knows the controllers of pools and runs: they call in.
"""
