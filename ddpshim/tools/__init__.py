"""Commands that look at a trainer or a machine: doctor, audit, selftest."""
