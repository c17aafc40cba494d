"""The commands: check, report, selftest, options."""
