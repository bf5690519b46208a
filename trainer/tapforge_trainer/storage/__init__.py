"""Objects in a store that is named by a URI, and what the errors of its libraries mean."""
