"""Tasks that a model proposes from screens and apps.

`looking` screens that tasks are proposed from · `prompts` what is asked · `asking` an endpoint, with a journal and a
budget · `reading` its answers · `alike` which goals are the same · `generate` the file, round by round · `simulated` an
endpoint for the simulated phone, without a model
"""
