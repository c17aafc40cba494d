"""Jobs start under every launcher, and an unedited program is distributed."""
