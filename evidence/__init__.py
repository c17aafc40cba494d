"""Programs that measure what the documentation claims, and the tables that they write."""
