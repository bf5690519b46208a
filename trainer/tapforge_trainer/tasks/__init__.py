"""Which tasks a run practises, demonstrates and is measured on: from suites and files, in which order, and what the
measured ones share with the practised ones. Demonstrations for the warm start are made here as well."""
