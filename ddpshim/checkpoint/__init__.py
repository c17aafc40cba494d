"""Writes and finds checkpoint files, in the background if asked, and resumes trainings."""

from ddpshim.checkpoint.files import copy as copy
from ddpshim.checkpoint.files import find_damage as find_damage
from ddpshim.checkpoint.files import find_latest as find_latest
from ddpshim.checkpoint.files import flush as flush
from ddpshim.checkpoint.files import keep_newest as keep_newest
from ddpshim.checkpoint.files import save as save
from ddpshim.checkpoint.files import save_in_background as save_in_background
from ddpshim.checkpoint.files import written as written
