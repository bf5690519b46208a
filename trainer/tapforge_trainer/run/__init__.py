"""What a run is besides its loop: the plan, its folder, the parts that its file asks for, resuming, evaluation, the
warm start, the report, and how its processes are stopped and restarted."""
