"""What a run says of itself while it goes on: figures for each update, progress at the start and later."""
