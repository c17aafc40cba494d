"""A training resumes in the middle of an epoch, on any number of ranks."""
