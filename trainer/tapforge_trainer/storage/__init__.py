"""Objects in a store that is named by a URI, what the errors of its libraries mean, and what a local path means."""
