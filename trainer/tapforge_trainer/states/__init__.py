"""What makes two screens the same state: `frame` and `reading` of one observation, `grouping` of a group's steps."""
