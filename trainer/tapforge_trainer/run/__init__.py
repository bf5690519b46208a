"""What a run is besides its loop: the plan, its folder, the parts that its file asks for, going on after an end,
evaluation, the warm start, and the processes around it."""
