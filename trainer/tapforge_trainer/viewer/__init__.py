"""Looking at a run: a replay page of episodes and a learning curve. Reads records, changes nothing."""
