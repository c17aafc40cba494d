"""Lists the environment variables that are not options: messages between processes of a job, and switches."""

PREFIX = "DDPSHIM_"
LAUNCHER = "DDPSHIM_LAUNCHER"  # which launcher's variables to use if those of several are set
RANK_LOGS = "DDPSHIM_RANK_LOGS"  # folder for the output of each rank of `run`; unset if output goes to the screen
RUN_DIR = "DDPSHIM_RUN_DIR"  # a private folder of one `run`, where failing ranks record when and how they failed
UNEDITED = "DDPSHIM_UNEDITED"  # whether to distribute an unedited program: on, off, auto
ROWS = "DDPSHIM_ROWS"  # auto; all: divide also what is too small to gain; off: compute whole batches on every rank
TRACEBACK = "DDPSHIM_TRACEBACK"  # full: tracebacks show the frames of ddpshim, too
RANK = "DDPSHIM_RANK"  # this rank, while the launcher's variables are hidden from an unedited program
CHECK = "DDPSHIM_CHECK"  # folder to which the ranks of a check write; else unset or empty
CERTIFY = "DDPSHIM_CERTIFY"  # settings with which the ranks write a certificate; else unset
RESUME_FROM = "DDPSHIM_RESUME_FROM"  # a Resumable's file from which a certified run is repeated, or "the beginning"
SEED = "DDPSHIM_SEED"  # of a certified program that sets none; else it is drawn
UPSTREAM = "DDPSHIM_UPSTREAM"  # source trees for the tests
FAULT = "DDPSHIM_FAULT"  # for the tests: the fault to cause
ALLOWED = {UNEDITED: ("on", "off", "auto"), ROWS: ("auto", "all", "off"), TRACEBACK: ("full",)}
OF_USERS = (LAUNCHER, UNEDITED, ROWS, TRACEBACK)  # set by users; the others are messages, or for the tests
ALL = (*OF_USERS, RANK_LOGS, RUN_DIR, RANK, CHECK, CERTIFY, RESUME_FROM, SEED, UPSTREAM, FAULT)
