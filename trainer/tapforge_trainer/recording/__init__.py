"""What a run writes down of its episodes, and how that is read again: records in segments, screens in packs."""

#: where it lies in the folder of a run
ROLLOUT = "rollout"
#: how names of groups begin that people played
PERSON = "person-"
