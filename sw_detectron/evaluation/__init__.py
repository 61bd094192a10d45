"""Pictures of what a detector learned and of how it learned it."""
