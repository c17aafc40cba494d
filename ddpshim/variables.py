"""Lists the environment variables that are no options: messages between processes of a job, and switches."""

PREFIX = "DDPSHIM_"
LAUNCHER = "DDPSHIM_LAUNCHER"  # which launcher's variables count, where several are set
HOOKS = "DDPSHIM_HOOKS"  # off: an unedited trainer is left alone
RANK_LOGS = "DDPSHIM_RANK_LOGS"  # where `run` has each rank write; unset where output goes to the screen
RUN_DIR = "DDPSHIM_RUN_DIR"  # private to one `run`: when and how each failing rank failed
UNEDITED = "DDPSHIM_UNEDITED"  # whether a program for one process is distributed as it is: on, off, auto
AUDIT = "DDPSHIM_AUDIT"  # where the ranks of an audit write; not set without one
PROVE = "DDPSHIM_PROVE"  # where the ranks of a proof write; not set without one
UPSTREAM = "DDPSHIM_UPSTREAM"  # source trees for the tests
# A module file's or a site's own, as DDPSHIM_MODULE_ROOT: never looked at.
MODULE_PREFIX = "DDPSHIM_MODULE_"
FAULT = "DDPSHIM_FAULT"  # of the tests: what is to go wrong
OF_USERS = (LAUNCHER, HOOKS, UNEDITED)  # the others are messages, or of the tests
ALL = (LAUNCHER, HOOKS, RANK_LOGS, RUN_DIR, UNEDITED, AUDIT, PROVE, UPSTREAM, FAULT)
